"""The best single switch of a rollout step, known only when the step is over."""

from itertools import pairwise

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from rollout.simulate.limits import Limits
from rollout.simulate.outcome import Run
from rollout.simulate.replica import EngineTimes, simulate
from rollout.simulate.trace import Trace


def best_run(trace: Trace, times: EngineTimes, limits: Limits) -> tuple[Run, int]:
    """The shortest of both static runs and all runs with one switch to TP, and the threshold of that switch.

    The threshold is 1 if EP to the end is best, and more than the requests if TP from the beginning is. Switches with
    requests waiting, or whose KV does not fit into TP until the end, are not tried.
    """
    count = len(trace.arrivals_s)
    runs = [
        (simulate(trace, times, SwitchConfig(policy="ep"), limits), 1),
        (simulate(trace, times, SwitchConfig(policy="tp"), limits, start=Layout.TP), count + 1),
    ]
    if threshold := _best_threshold(trace, times, limits, runs[0][0]):
        runs.append((_switching(trace, times, limits, threshold), threshold))
    return min(runs, key=lambda run: run[0].seconds)


def _switching(trace: Trace, times: EngineTimes, limits: Limits, threshold: int) -> Run:
    return simulate(trace, times, SwitchConfig(policy="rollout", threshold=threshold), limits)


def _best_threshold(trace: Trace, times: EngineTimes, limits: Limits, ep: Run) -> int | None:
    """Two runs answer for all thresholds: what follows a switch takes as long in TP whenever TP began.

    So a switch at event i lasts as long as EP up to i, the switch, and what a run that went to TP at the earliest event
    needed from i on.
    """
    candidates = _candidates(ep, limits.kv_tokens[Layout.TP])
    if not candidates:
        return None
    first, *later = candidates
    earliest = _switching(trace, times, limits, ep.samples[first].running + 1)
    in_tp = {sample.clock: sample.t_s for sample in earliest.samples}
    seconds = {first: earliest.seconds}
    for i in later:
        sample = ep.samples[i]
        switch_s = times.switch_s(Layout.TP, sample.running, sample.kv_tokens)
        seconds[i] = sample.t_s + switch_s + earliest.seconds - in_tp[sample.clock]
    return ep.samples[min(seconds, key=lambda i: seconds[i])].running + 1


def _candidates(ep: Run, kv_tokens: int) -> list[int]:
    """Indices of the samples at which the count falls, and from which on nothing waits and all KV fits into TP."""
    found: list[int] = []
    for (_, before), (i, sample) in reversed(list(pairwise(enumerate(ep.samples)))):
        if sample.waiting or sample.kv_tokens > kv_tokens:
            break
        if 0 < sample.running < before.running + before.waiting:
            found.append(i)
        if before.kv_tokens + before.running * (sample.clock - before.clock) > kv_tokens:
            break
    return found[::-1]
