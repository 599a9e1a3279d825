"""What the simulator must equal: the same engine, one token at a time, the policy asked before every step."""

from dataclasses import dataclass, field

from moebius_engine.layout import Layout
from moebius_engine.switch.policy import Policy
from rollout.simulate.limits import Limits


@dataclass(frozen=True)
class Linear:
    """Step times that grow linearly: TP is faster up to `crossing` requests, if the context is the same."""

    floor_tp: float = 0.02
    floor_ep: float = 0.04
    crossing: float = 8.0
    per_token: float = 1e-6
    pause: float = 0.3
    pause_per_token: float = 1e-4

    def step_s(self, layout, requests, context):
        if layout == Layout.EP:
            return self.floor_ep + self.per_token * requests * context
        slope = (self.floor_ep - self.floor_tp) / self.crossing
        return self.floor_tp + slope * requests + 2 * self.per_token * requests * context

    def prefill_s(self, layout, tokens, requests=1):
        return (self.floor_ep if layout == Layout.EP else self.floor_tp) + 1e-4 * tokens + 1e-3 * requests

    def switch_s(self, target, requests, kv_tokens):
        return self.pause + self.pause_per_token * kv_tokens


UNLIMITED = Limits(running=10_000, prefill_tokens=dict.fromkeys(Layout, 10_000))


@dataclass
class Slow:
    """First and last token's times, all switches (time, target, in flight), and the end."""

    first_s: dict[int, float] = field(default_factory=dict)
    finish_s: dict[int, float] = field(default_factory=dict)
    switches: list[tuple[float, Layout, int]] = field(default_factory=list)
    seconds: float = 0.0


def token_by_token(trace, times, config, limits, start=Layout.EP) -> Slow:
    slow, policy, layout, now = Slow(), Policy(config), start, 0.0
    tokens = dict.fromkeys(range(len(trace.prompts)), 0)
    running: list[int] = []
    waiting: list[int] = []
    arrived: set[int] = set()

    def held():
        return sum(trace.prompts[i] + tokens[i] for i in running)

    def switch(target, inflight):
        nonlocal layout, now
        slow.switches.append((now, target, inflight))
        now += times.switch_s(target, inflight, held())
        layout = target
        policy.switched(now)

    begin = policy.begin_step(len(trace.prompts) if trace.is_step else None)
    if begin not in (None, layout):
        switch(begin, 0)
    while len(slow.finish_s) < len(trace.prompts):
        for i, at in enumerate(trace.arrivals_s):
            if at <= now and i not in arrived:
                arrived.add(i)
                waiting.append(i)
        inflight = len(running) + len(waiting)
        target = policy.observe(now, inflight, layout)
        if target is not None:
            if held() > limits.kv_tokens[target]:
                policy.refused(now)
            else:
                switch(target, inflight)
        batch: list[int] = []
        while waiting and len(running) + len(batch) < limits.running:
            sizes = [trace.prompts[i] + tokens[i] for i in [*batch, waiting[0]]]
            alone = not running and not batch
            if len(sizes) > 1 and sum(sizes) > limits.prefill_tokens[layout]:
                break
            reserved = (len(running) + len(sizes)) * limits.reserve_tokens
            if not alone and held() + sum(sizes) + len(sizes) + reserved > limits.kv_tokens[layout]:
                break
            batch.append(waiting.pop(0))
        if batch:
            now += times.prefill_s(layout, sum(trace.prompts[i] + tokens[i] for i in batch), len(batch))
            running += batch
        elif running:
            while held() + len(running) > limits.kv_tokens[layout]:
                loser = min(running, key=lambda i: (tokens[i], -i))
                running.remove(loser)
                waiting.insert(0, loser)
            now += times.step_s(layout, len(running), held() / len(running))
            batch = list(running)
        else:
            now = min(at for i, at in enumerate(trace.arrivals_s) if i not in arrived)
        for i in batch:
            tokens[i] += 1
            slow.first_s.setdefault(i, now)
            if tokens[i] == trace.responses[i]:
                running.remove(i)
                slow.finish_s[i] = now
    slow.seconds = now
    return slow
