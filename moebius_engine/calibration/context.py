"""What longer contexts do to decode steps: attention reads more KV, in TP and in EP not equally much more.

Where TP's ranks outnumber the KV heads they hold some of them twice, so TP's steps grow faster and the layouts cross at
fewer requests.
"""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from pydantic import PositiveInt

from moebius_engine.calibration.curve import Point
from moebius_engine.layout import Layout
from moebius_engine.telemetry import Record


class Longer(Record):
    """Steps of requests that hold more tokens than all the others of a calibration."""

    context: PositiveInt
    points: tuple[Point, ...]


Curve = np.ndarray
"""Of one layout: logarithms of the numbers of requests that were measured, rising, and of a step's seconds, (2, n)."""


def curve(points: Sequence[Point], layout: Layout) -> Curve:
    """Raises ValueError if none of the points is of this layout."""
    own = sorted((p.requests, p.step_s) for p in points if p.layout == layout)
    if not own:
        raise ValueError(f"no step of {layout} was measured")
    return np.log(np.array(own)).T


def step_at(steps: Curve, requests: float) -> float:
    """Seconds of a step: linear between the numbers measured, in the logarithms, and level beyond."""
    return float(np.exp(np.interp(np.log(max(requests, 1.0)), *steps)))


def per_token(points: Sequence[Point], context: int, longer: Longer | None) -> dict[Layout, float]:
    """Seconds that each KV token more, of all requests together, adds to a step. context: of `points`. 0 where nothing
    was measured, or noise has made the longer context the faster one."""
    found = {}
    for layout in Layout:
        own = [p for p in longer.points if p.layout == layout] if longer else []
        added = [(p.step_s - step_at(curve(points, layout), p.requests)) / p.requests for p in own]
        found[layout] = max(0.0, fmean(added) / (longer.context - context)) if longer and added else 0.0
    return found


def at_longer(points: Sequence[Point], context: int, longer: Longer) -> list[Point]:
    """The points as they would be at the longer context."""
    added = per_token(points, context, longer)
    return [
        p.model_copy(update={"step_s": p.step_s + added[Layout(p.layout)] * p.requests * (longer.context - context)})
        for p in points
    ]
