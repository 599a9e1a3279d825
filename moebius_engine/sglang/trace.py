"""Rank 0's record of a rollout step: the in-flight count over time, switches, idle ranks."""

import time
from collections import deque

from moebius_engine.layout import Layout
from moebius_engine.sglang.inbox import Header
from moebius_engine.telemetry import LayerLoad, PayoffEstimate, StepTrace, SwitchReason, SwitchRecord, TraceSample

_MOST_SAMPLES, _MOST_SWITCHES = 1 << 17, 1 << 12  # a server that nobody asks for its trace keeps the latest


class Trace:
    """ranks: P. A trace runs from the engine's start or the last begin(); samples are kept when the count changes."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        self.begin(step=0)

    def begin(self, step: int) -> None:
        self.step = step
        self._began = time.monotonic()
        self._tokens_before: int | None = None
        self._samples: deque[TraceSample] = deque(maxlen=_MOST_SAMPLES)
        self._switches: deque[SwitchRecord] = deque(maxlen=_MOST_SWITCHES)
        self._rank_steps = self._idle_rank_steps = 0
        self._estimates: dict[str, PayoffEstimate] = {}
        self._declined = 0

    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began

    def sample(self, layout: Layout, headers: list[Header], inflight: int) -> None:
        """Record one exchange."""
        tokens = sum(header.tokens for header in headers)
        if self._tokens_before is None:
            self._tokens_before = tokens
        idle = sum(header.running == 0 for header in headers)
        if idle < self._ranks:
            self._rank_steps += self._ranks
            self._idle_rank_steps += idle
        last = self._samples[-1] if self._samples else None
        if last is not None and last.inflight == inflight and last.layout == layout:
            return
        self._samples.append(
            TraceSample(
                t_s=self.elapsed_s(),
                inflight=inflight,
                tokens=tokens - self._tokens_before,
                layout=layout.value,
            )
        )

    def switched(self, record: SwitchRecord) -> None:
        self._switches.append(record)

    def estimated(self, estimate: PayoffEstimate) -> None:
        """Kept: the first and the last that speak against a switch, and the last that speaks for one."""
        if estimate.pays:
            self._estimates["pays"] = estimate
        else:
            self._estimates["last" if "first" in self._estimates else "first"] = estimate
            self._declined += 1

    def end(self, expert_load: tuple[LayerLoad, ...]) -> StepTrace:
        return StepTrace(
            step=self.step,
            samples=tuple(self._samples),
            switches=tuple(self._switches),
            rank_steps=self._rank_steps,
            idle_rank_steps=self._idle_rank_steps,
            estimates=tuple(self._estimates.values()),
            declined=self._declined,
            expert_load=expert_load,
        )


def refused_switch(scheduler, target: Layout, reason: SwitchReason, why: str) -> SwitchRecord:
    """Record of a switch that is refused before it is planned, with the counts of the last exchange."""
    running = scheduler.inbox.running()
    unmoved = ("kv_tokens", "decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms", "total_ms", "kv_bytes")
    return SwitchRecord(
        source=scheduler.layout.value,
        target=target.value,
        reason=reason,
        step=scheduler.trace.step,
        forward_ct=scheduler.forward_ct,
        started_at_s=scheduler.trace.elapsed_s(),
        running=running,
        waiting=scheduler.inbox.inflight() - running,
        prefilling=0,
        weight_bytes=0,
        refused=why,
        **dict.fromkeys(unmoved, 0),
    )
