"""One engine, event by event: continuous batching as SGLang does it, under the real policy.

Between two events all running requests get one token a step, so a jump covers all steps up to the next event: an end,
an arrival, a full KV cache, or a moment at which the policy can decide otherwise. The order within a step is SGLang's:
arrivals, the policy, then a prefill if a waiting request fits, else a decode step.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from typing import Protocol

from moebius_engine.config import SwitchConfig
from moebius_engine.costmodel.times import StepTimes
from moebius_engine.layout import Layout
from moebius_engine.switch.payoff import Payoff
from moebius_engine.switch.policy import RETRY_S, Policy
from rollout.simulate.limits import Limits
from rollout.simulate.outcome import Run, Sample, Switch
from rollout.simulate.trace import Trace

# Steps of one jump. Their time is the mean of the first's and the last's: exact if it grows linearly with the context.
MAX_JUMP = 256


class EngineTimes(StepTimes, Protocol):
    """Times of one engine of P ranks, prefills included."""

    def prefill_s(self, layout: Layout, tokens: float, requests: int = 1) -> float:
        """Seconds of one prefill of `requests` requests that have `tokens` tokens in all."""
        ...


def simulate(
    trace: Trace,
    times: EngineTimes,
    config: SwitchConfig,
    limits: Limits,
    start: Layout = Layout.EP,
    payoff: Payoff | None = None,
) -> Run:
    """Run a trace to its end. start: layout before the first request. payoff: asked before each switch of the policy.

    Raises ValueError if a request fits into no engine of these limits.
    """
    longest = max(map(sum, zip(trace.prompts, trace.responses, strict=True)))
    if longest > min(limits.kv_tokens.values()):
        raise ValueError(f"a request of {longest} tokens, and the limits hold kv_tokens={dict(limits.kv_tokens)}")
    replica = _Replica(trace, times, config, limits, start, payoff)
    replica.begin()
    while replica.step():
        pass
    return replica.run


class _Replica:
    def __init__(
        self,
        trace: Trace,
        times: EngineTimes,
        config: SwitchConfig,
        limits: Limits,
        start: Layout,
        payoff: Payoff | None,
    ):
        self._trace, self._times, self._config, self._limits = trace, times, config, limits
        self._policy, self._payoff, self._layout = Policy(config), payoff, start
        count = len(trace.arrivals_s)
        self.run = Run(first_s=[math.nan] * count, finish_s=[math.nan] * count)
        self._now, self._clock, self._kv = 0.0, 0, 0
        self._next = 0  # first request that has not arrived
        self._waiting: deque[int] = deque()
        self._ends: list[tuple[int, int]] = []  # heap of running requests: clock at the last token, request
        self._base = [0] * count  # of a running request: the clock minus its tokens
        self._so_far = [0] * count  # of a waiting request: its tokens, above 0 if it was retracted
        # The policy's answer can change with the count, once W equal counts have been seen, or when a pause of it ends.
        self._count, self._seen = -1, 0
        self._pauses = [0.0, 0.0]  # ends of the cooldown and of the wait after a refusal

    def begin(self) -> None:
        step = self._trace.is_step
        target = self._policy.begin_step(len(self._trace.arrivals_s) if step else None)
        if self._payoff is not None:
            self._payoff.begin_step()
        if target not in (None, self._layout):
            self._switch(target, 0)

    def step(self) -> bool:
        """One prefill, or decode steps up to the next event. False when all requests are done."""
        trace = self._trace
        while self._next < len(trace.arrivals_s) and trace.arrivals_s[self._next] <= self._now:
            self._waiting.append(self._next)
            self._next += 1
        running, waiting = len(self._ends), len(self._waiting)
        self.run.samples.append(Sample(self._now, self._clock, running, waiting, self._kv, self._layout))
        self._observe(running + waiting)
        if batch := self._admissible():
            self._prefill(batch)
        elif self._ends:
            self._decode()
        elif self._next < len(trace.arrivals_s):
            self._now = trace.arrivals_s[self._next]
        else:
            self.run.seconds = self._now
            return False
        return True

    def _observe(self, inflight: int) -> None:
        self._seen = self._seen + 1 if inflight == self._count else 1
        self._count = inflight
        target = self._policy.observe(self._now, inflight, self._layout)
        if target is None:
            return
        if self._payoff is not None:
            generated = [self._clock - self._base[i] for _, i in self._ends] + [self._so_far[i] for i in self._waiting]
            estimate = self._payoff.estimate(self._layout, inflight, generated, self._kv, self._trace.cap)
            if not estimate.pays:
                self.run.declined.append(estimate)
                return
        if self._kv > self._limits.kv_tokens[target]:
            self.run.refused += 1
            self._policy.refused(self._now)
            self._pauses[1] = self._now + RETRY_S
            return
        self._switch(target, inflight)

    def _switch(self, target: Layout, inflight: int) -> None:
        seconds = self._times.switch_s(target, inflight, self._kv)
        self.run.switches.append(Switch(self._now, target, inflight, self._kv, seconds))
        self._now += seconds
        self._layout = target
        self._policy.switched(self._now)
        self._pauses = [self._now + self._config.rest_s, 0.0]
        self._seen = 0

    def _admissible(self) -> list[int]:
        """Takes from the waiting requests, in their order, those of the next prefill."""
        limits, layout = self._limits, self._layout
        batch: list[int] = []
        tokens, running = 0, len(self._ends)
        while self._waiting and running < limits.running:
            request = self._waiting[0]
            size = self._trace.prompts[request] + self._so_far[request]
            if batch and tokens + size > limits.prefill_tokens[layout]:
                break
            running += 1
            kv = self._kv + tokens + size + len(batch) + 1
            if running > 1 and kv + running * limits.reserve_tokens > limits.kv_tokens[layout]:
                break
            tokens += size
            batch.append(self._waiting.popleft())
        return batch

    def _prefill(self, batch: list[int]) -> None:
        """Yields one token for each request. Decoding stands still."""
        tokens = sum(self._trace.prompts[i] + self._so_far[i] for i in batch)
        self._now += self._times.prefill_s(self._layout, tokens, len(batch))
        self._kv += tokens + len(batch)
        self.run.tokens += len(batch)
        self.run.request_steps += len(batch)
        for i in batch:
            self._base[i] = self._clock - self._so_far[i] - 1
            heapq.heappush(self._ends, (self._base[i] + self._trace.responses[i], i))
            if math.isnan(self.run.first_s[i]):
                self.run.first_s[i] = self._now
        self._finish()

    def _decode(self) -> None:
        capacity = self._limits.kv_tokens[self._layout]
        if self._kv + len(self._ends) > capacity:
            self._retract(capacity)
        count = len(self._ends)
        steps = 1
        if self._seen >= self._config.counts:
            steps = min(self._ends[0][0] - self._clock, MAX_JUMP, (capacity - self._kv) // count)
        context = self._kv / count
        first = self._times.step_s(self._layout, count, context)
        slope = 0.0
        if steps > 1:
            slope = (self._times.step_s(self._layout, count, context + steps - 1) - first) / (steps - 1)

        def seconds(steps: int) -> float:
            return steps * (first + slope * (steps - 1) / 2)

        pauses = [end for end in self._pauses if end > self._now]
        if self._next < len(self._trace.arrivals_s):
            pauses.append(self._trace.arrivals_s[self._next])
        left = min(pauses, default=math.inf) - self._now
        if seconds(steps) > left:
            steps = bisect_left(range(1, steps + 1), left, key=seconds) + 1
        self._now += seconds(steps)
        self._clock += steps
        self._kv += steps * count
        self.run.tokens += steps * count
        self.run.request_steps += steps * count
        self._finish()

    def _finish(self) -> None:
        while self._ends and self._ends[0][0] <= self._clock:
            _, i = heapq.heappop(self._ends)
            length = self._trace.responses[i]
            self._kv -= self._trace.prompts[i] + length
            self.run.finish_s[i] = self._now
            if self._payoff is not None:
                self._payoff.finished(length)

    def _retract(self, capacity: int) -> None:
        """Those with the fewest tokens, of equal ones the latest, wait again, first in line, with what they have."""
        by_tokens = sorted(self._ends, key=lambda end: (self._base[end[1]], end[1]))
        while self._kv + len(by_tokens) > capacity:
            _, i = by_tokens.pop()
            self._so_far[i] = self._clock - self._base[i]
            self._kv -= self._trace.prompts[i] + self._so_far[i]
            self._waiting.appendleft(i)
            self.run.retracted += 1
        heapq.heapify(by_tokens)
        self._ends = by_tokens
