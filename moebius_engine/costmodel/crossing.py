"""Where the step times of the two layouts cross."""

from collections.abc import Callable
from dataclasses import dataclass

from moebius_engine.costmodel.times import StepTimes
from moebius_engine.layout import Layout


@dataclass(frozen=True)
class Crossing:
    """requests: in flight, where both layouts take equally long; None if one is faster everywhere. below, above: the
    faster one on either side of it, the same one if there is none."""

    requests: float | None
    below: Layout
    above: Layout


def crossing(times: StepTimes, context: Callable[[float], float], most: float) -> Crossing:
    """The crossing between 1 and `most` requests. If there are several, the highest, since that is the one that a step
    which drains meets first.

    context: KV tokens of a request, on average, while so many are in flight; it grows as a rollout step drains.

    Looked for on a grid whose points are 1/8 of a doubling apart, then bisected to a thousandth of a request.
    Raises ValueError if most is below 1.
    """
    if most < 1:
        raise ValueError(f"most={most:g} must be at least 1 request")

    def faster(requests: float) -> Layout:
        ep, tp = (times.step_s(layout, requests, context(requests)) for layout in (Layout.EP, Layout.TP))
        return Layout.EP if ep < tp else Layout.TP

    above = faster(most)
    high = most
    while high > 1:
        low = max(1.0, high / 2 ** (1 / 8))
        if (below := faster(low)) != above:
            while high - low > 1e-3:
                middle = (low + high) / 2
                low, high = (low, middle) if faster(middle) == above else (middle, high)
            return Crossing((low + high) / 2, below, above)
        high = low
    return Crossing(None, above, above)
