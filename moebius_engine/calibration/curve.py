"""From decode-step times in both layouts to the number of requests where they cross, with its uncertainty."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from pydantic import Field, NonNegativeInt
from scipy.optimize import isotonic_regression

from moebius_engine.telemetry import LayoutName, Record

_SURE = 2.0  # standard errors: about 95 %


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

    More requests favour EP, so the logarithm is taken as falling (isotonic regression, weighted by the errors), and as
    linear in ln(requests) in between. The interval is where the same curve, moved up and down by two standard errors,
    falls through 0. Raises ValueError if fewer than two numbers were measured in both layouts.
    """
    times = {(p.layout, p.requests): p for p in points}
    sizes = sorted(p.requests for p in points if p.layout == "ep" and ("tp", p.requests) in times)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} numbers of requests were measured in both layouts: at least 2 are needed")
    pairs = [(times["ep", n], times["tp", n]) for n in sizes]
    ratios = np.array([math.log(ep.step_s / tp.step_s) for ep, tp in pairs])
    errors = np.array([math.hypot(*(max(p.error_s / p.step_s, 1e-4) for p in pair)) for pair in pairs])
    falling = isotonic_regression(ratios, weights=1 / errors**2, increasing=False).x
    logs = np.log(sizes)
    found, least, most = (_falls_through_zero(logs, falling + shift * errors) for shift in (0, -_SURE, _SURE))
    winner: LayoutName | None = None
    if found is None:
        winner = "tp" if falling[-1] > 0 else "ep"
    return Crossing(requests=found, least=least, most=most, winner=winner)


def _falls_through_zero(logs: np.ndarray, values: np.ndarray) -> float | None:
    """exp(x) of the first place where the line through the points comes from above 0 to 0 or below."""
    for left in range(len(values) - 1):
        if values[left] > 0 >= values[left + 1]:
            share = values[left] / (values[left] - values[left + 1])
            return float(math.exp(logs[left] + share * (logs[left + 1] - logs[left])))
    return None
