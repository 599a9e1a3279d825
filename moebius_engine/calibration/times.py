"""Step and switch times as a calibration has measured them."""

from collections.abc import Sequence

import numpy as np

from moebius_engine.calibration.curve import Point
from moebius_engine.layout import Layout
from moebius_engine.telemetry import SwitchRecord


class MeasuredTimes:
    """A StepTimes (costmodel/times.py) of one engine.

    Steps are linear between the numbers of requests that were measured, in their logarithms, and level beyond. They are
    those at the calibration's context: a longer one lengthens both layouts' steps, and their difference little.

    points: of both layouts. switches: committed ones, at least one; `switched` adds what is seen later.
    """

    def __init__(self, points: Sequence[Point], switches: Sequence[SwitchRecord]):
        self._steps = {}
        for layout in Layout:
            own = sorted((p.requests, p.step_s) for p in points if p.layout == layout)
            if not own:
                raise ValueError(f"no step of {layout} was measured")
            requests, seconds = zip(*own, strict=True)
            self._steps[layout] = (np.log(requests), np.log(seconds))
        if not switches:
            raise ValueError("no switch was measured")
        self._switches: dict[str, SwitchRecord] = {}
        for record in switches:
            self.switched(record)

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        return float(np.exp(np.interp(np.log(max(requests, 1.0)), *self._steps[layout])))

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        """By the bytes of the last switch to `target`, or else of any: KV goes with its tokens, the rest stays."""
        seen = self._switches.get(target.value) or next(iter(self._switches.values()))
        return (seen.total_ms - seen.kv_ms + seen.kv_ms * kv_tokens / max(seen.kv_tokens, 1)) / 1e3

    def switched(self, record: SwitchRecord) -> None:
        """A switch was committed."""
        self._switches[record.target] = record
