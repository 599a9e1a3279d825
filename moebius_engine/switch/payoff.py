"""Does a switch pay? An estimate of what the rest of a rollout step saves in the other layout, against the switch.

The threshold says which layout is faster now. It does not know for how long: at the end of a step whose responses are
all about equally long, the pause of a switch costs more than the few steps that are left.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from moebius_engine.costmodel.times import StepTimes
from moebius_engine.layout import Layout, other
from moebius_engine.telemetry import PayoffEstimate

_POINTS = 32  # of the rest of the step, at which both layouts' step times are asked for


class Payoff:
    """Learns response lengths, and judges switches by them.

    times: of decode steps and switches. history: earlier rollout steps whose lengths are kept; the policy in training
    changes them slowly.
    """

    def __init__(self, times: StepTimes, history: int = 3):
        if history < 0:
            raise ValueError(f"history={history}: 0 steps or more")
        self._times = times
        self._earlier: deque[list[int]] = deque(maxlen=history)
        self._lengths: list[int] = []

    def begin_step(self) -> None:
        """A rollout step begins: the lengths of the last one are history."""
        if self._lengths:
            self._earlier.append(self._lengths)
        self._lengths = []

    def finished(self, length: int) -> None:
        """A response ended with `length` tokens."""
        self._lengths.append(length)

    def estimate(
        self, layout: Layout, inflight: int, generated: Sequence[int], kv_tokens: float, cap: int
    ) -> PayoffEstimate:
        """What a switch away from `layout` would gain now.

        inflight: requests over all ranks. generated: tokens so far of each of them, or of a sample, 0 for a waiting
        one. kv_tokens: what they hold in all. cap: longest response [tokens].

        With S the survival function of the lengths, a response of g tokens still runs j steps later with probability
        S(g + j) / S(g). Some request runs then with probability a(j) = 1 - prod(1 - S(g + j) / S(g)), and if so, n(j) =
        sum(S(g + j) / S(g)) / a(j) are expected to. The gain is the sum over j of a(j) times the difference of both
        layouts' step times at n(j) requests and a context grown by j.
        """
        if inflight < 1 or not generated:
            raise ValueError(f"inflight={inflight} with {len(generated)} lengths: both at least 1")
        if cap < 1:
            raise ValueError(f"cap={cap}: at least 1 token")
        target, context = other(layout), kv_tokens / inflight
        lengths = np.array([length for step in (*self._earlier, self._lengths) for length in step])
        so_far = np.minimum(generated, cap - 1)
        steps = np.unique(np.geomspace(1, cap - so_far.min(), _POINTS).astype(int)) - 1
        hazard = CumulativeHazard(lengths, so_far)
        ends = so_far[:, None] + steps
        alive = np.exp(hazard(so_far)[:, None] - hazard(ends)) * (ends < cap)
        some = 1 - np.exp(inflight * np.log1p(-np.minimum(alive, 1 - 1e-12)).mean(axis=0))
        count = np.clip(inflight * alive.mean(axis=0) / np.maximum(some, 1e-12), 1, inflight)
        saved = np.array([self._faster_s(layout, n, context + j) for n, j in zip(count, steps, strict=True)])
        return PayoffEstimate(
            target=target.value,
            inflight=inflight,
            known=len(lengths),
            running=len(generated),
            steps_left=float(np.trapezoid(some, steps)),
            faster_s=float(saved[0]),
            gain_s=float(np.trapezoid(some * saved, steps)),
            cost_s=self._times.switch_s(target, inflight, kv_tokens),
        )

    def _faster_s(self, layout: Layout, requests: float, context: float) -> float:
        now, then = (self._times.step_s(it, float(requests), float(context)) for it in (layout, other(layout)))
        return now - then


class CumulativeHazard:
    """H(x) = -ln S(x) of response lengths: Nelson-Aalen's estimator, with a Pareto tail beyond the longest one.

    lengths: of finished responses. running: tokens so far of those that run, which are longer than that.

    O. Aalen, Nonparametric inference for a family of counting processes, 1978; the tail index is B. M. Hill's (A simple
    general approach to inference about the tail of a distribution, 1975) with running responses as censored. It looks
    at the longest: the square root of all, but no fewer finished ones than there are running ones beyond them, and at
    all of them if fewer have finished. Without any finished response H is 0: they run to the cap.
    """

    def __init__(self, lengths: np.ndarray, running: np.ndarray):
        self._knots, ended = np.unique(np.append(lengths, 0), return_counts=True)
        ended[0] = 0  # put there as the first knot
        at_risk = _at_least(lengths, self._knots) + _at_least(running, self._knots + 1)
        self._hazard = np.cumsum(ended / np.maximum(at_risk, 1))
        self._index = 0.0
        if len(lengths):
            both = np.sort(np.concatenate([lengths, running]))
            beyond = (running >= lengths.max()).sum()
            longest = max(2 * beyond, math.ceil(math.sqrt(len(both))))
            start = max(1, both[-longest]) if longest < len(both) else 1
            logs = np.log(np.maximum(both, start) / start).sum()
            self._index = (lengths >= start).sum() / max(logs, 1e-6)  # all equal: it ends where the longest has

    def __call__(self, x: np.ndarray) -> np.ndarray:
        last = max(1, self._knots[-1])
        return np.interp(x, self._knots, self._hazard) + self._index * np.log(np.maximum(x, last) / last)


def _at_least(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many of the values are at least each bound."""
    return len(values) - np.searchsorted(np.sort(values), bounds)
