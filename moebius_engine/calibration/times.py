"""Step and switch times as a calibration has measured them."""

from collections.abc import Sequence

from moebius_engine.calibration.context import Longer, curve, per_token, step_at
from moebius_engine.calibration.curve import Point
from moebius_engine.layout import Layout
from moebius_engine.telemetry import SwitchRecord


class MeasuredTimes:
    """A StepTimes (costmodel/times.py) of one engine.

    points: of both layouts, at `context` tokens a request; a step of shorter ones is taken for as long. longer: at more
    tokens, without which context plays no part. switches: committed ones; `switched` adds what is seen later. Raises
    ValueError without points of a layout, and without a switch.
    """

    def __init__(
        self, points: Sequence[Point], switches: Sequence[SwitchRecord], context: int, longer: Longer | None = None
    ):
        self._curves = {layout: curve(points, layout) for layout in Layout}
        self._context, self._per_token = context, per_token(points, context, longer)
        if not switches:
            raise ValueError("no switch was measured")
        self._switches: dict[str, SwitchRecord] = {}
        for record in switches:
            self.switched(record)

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        more = requests * max(0.0, context - self._context)
        return step_at(self._curves[layout], requests) + self._per_token[layout] * more

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        """By the bytes of the last switch to `target`, or else of any: KV goes with its tokens, the rest stays."""
        seen = self._switches.get(target.value) or next(iter(self._switches.values()))
        return (seen.total_ms - seen.kv_ms + seen.kv_ms * kv_tokens / max(seen.kv_tokens, 1)) / 1e3

    def switched(self, record: SwitchRecord) -> None:
        """A switch was committed."""
        self._switches[record.target] = record
