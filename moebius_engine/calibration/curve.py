"""From decode-step times in both layouts to the number of requests where they cross, with its uncertainty."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field, NonNegativeInt
from scipy.optimize import isotonic_regression

from moebius_engine.telemetry import LayoutName, Record

# Step times of neighbouring numbers of requests do not lie on a smooth curve: other tiles, other kernels. Around the
# falling curve the logarithms of three sweeps' ratios scatter by 0.01 to 0.03 (benchmarks/calibration_h200.json).
_SCATTER = 0.02
_DRAWS, _SHARE = 200, 0.95  # of the ratios, and how many of their crossings an interval holds


class Point(Record):
    """Decode steps of one layout at one number of requests."""

    layout: LayoutName = Field(description="layout")
    requests: NonNegativeInt = Field(description="requests that decode, over all ranks [requests]")
    step_s: float = Field(description="median duration of a step [s]")
    error_s: float = Field(description="standard error of that median [s]")
    steps: NonNegativeInt = Field(description="steps measured")


class Crossing(Record):
    """Where EP begins to be faster. None: one layout is faster at all numbers measured."""

    requests: float | None = Field(description="requests at which both take equally long [requests]")
    least: float | None = Field(description="lower end of its 95 % interval, None if below all measured [requests]")
    most: float | None = Field(description="upper end of its 95 % interval, None if above all measured [requests]")
    winner: LayoutName | None = Field(description="the layout that is faster at all numbers measured")


def point(layout: LayoutName, requests: int, seconds: Sequence[float]) -> Point:
    """Median of single steps, and its standard error from their quartiles (both heed no outliers).

    For a normal distribution of standard deviation s the median of n has the error 1.253 s / √n, and the quartiles lie
    1.349 s apart.
    Raises ValueError for fewer than four steps.
    """
    if len(seconds) < 4:
        raise ValueError(f"{len(seconds)} steps of {requests} requests in {layout}: at least 4 are needed")
    low, _, high = statistics.quantiles(seconds, n=4)
    error = 1.253 * (high - low) / 1.349 / math.sqrt(len(seconds))
    return Point(layout=layout, requests=requests, step_s=statistics.median(seconds), error_s=error, steps=len(seconds))


def crossing(points: Sequence[Point]) -> Crossing:
    """Where ln(EP's step / TP's step) falls through 0, between numbers of requests measured in both layouts.

    More requests favour EP, so the logarithm is taken as falling (isotonic regression, weighted by the errors and the
    scatter of single numbers), and as linear in ln(requests) in between. Raises ValueError if fewer than two numbers
    were measured in both layouts.
    """
    curve = _falling(points)
    found = _falls_through_zero(curve.logs, curve.values)
    winner: LayoutName | None = None
    if not 0 < found < math.inf:
        winner = "tp" if found else "ep"
    at, least, most = (n if 0 < n < math.inf else None for n in (found, *_interval(curve)))
    return Crossing(requests=at, least=least, most=most, winner=winner)


def likely(points: Sequence[Point]) -> tuple[float, float]:
    """Between which numbers of requests the layouts cross, with 95 %: 0 for below all measured, inf for above them.

    It holds so many of the crossings that are found if the falling curve's ratios are drawn anew, each with its error.
    Raises as crossing.
    """
    return _interval(_falling(points))


class _Falling(NamedTuple):
    """ln(EP's step / TP's step), made falling, over ln(requests); errors: of a single number's."""

    logs: np.ndarray
    values: np.ndarray
    errors: np.ndarray


def _falling(points: Sequence[Point]) -> _Falling:
    times = {(p.layout, p.requests): p for p in points}
    sizes = sorted(p.requests for p in points if p.layout == "ep" and ("tp", p.requests) in times)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} numbers of requests were measured in both layouts: at least 2 are needed")
    pairs = [(times["ep", n], times["tp", n]) for n in sizes]
    ratios = np.array([math.log(ep.step_s / tp.step_s) for ep, tp in pairs])
    errors = np.array([math.hypot(_SCATTER, *(p.error_s / p.step_s for p in pair)) for pair in pairs])
    return _Falling(np.log(sizes), _isotonic(ratios, errors), errors)


def _interval(curve: _Falling) -> tuple[float, float]:
    draw = np.random.default_rng(0)
    drawn = curve.values + curve.errors * draw.standard_normal((_DRAWS, len(curve.values)))
    found = sorted(_falls_through_zero(curve.logs, _isotonic(ratios, curve.errors)) for ratios in drawn)
    outside = round((1 - _SHARE) / 2 * _DRAWS)
    at = _falls_through_zero(curve.logs, curve.values)
    return min(found[outside], at), max(found[-1 - outside], at)


def _isotonic(ratios: np.ndarray, errors: np.ndarray) -> np.ndarray:
    return isotonic_regression(ratios, weights=1 / errors**2, increasing=False).x


def _falls_through_zero(logs: np.ndarray, values: np.ndarray) -> float:
    """exp(x) where the falling line through the points comes from above 0 to 0 or below; 0 if it is there from the
    first on, inf if it never is."""
    if values[0] <= 0:
        return 0.0
    for left in range(len(values) - 1):
        if values[left + 1] <= 0:
            share = values[left] / (values[left] - values[left + 1])
            return float(math.exp(logs[left] + share * (logs[left + 1] - logs[left])))
    return math.inf
