"""Strategies side by side on the same traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rollout.simulate.machine import Machine
from rollout.simulate.outcome import Run
from rollout.simulate.strategies import STRATEGIES, StrategyName, play
from rollout.simulate.trace import Trace

BIN_S = 10  # of the mean TTFT over arrivals (arXiv 2606.26607, section 6.2)


@dataclass(frozen=True)
class StepsRow:
    """A strategy over a series of rollout steps. A step ends with the last replica; counts are those of all replicas.

    seconds: of each step. over_better, over_worse: how many times faster than the better and the worse static layout.
    declined: switches that the estimate was against, at their first asking in a step. refused: for lack of KV.
    """

    strategy: StrategyName
    seconds: tuple[float, ...]
    over_better: tuple[float, ...]
    over_worse: tuple[float, ...]
    switches: int
    declined: int
    refused: int
    retracted: int
    request_steps: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class ServingRow:
    """A strategy on a serving trace. Seconds; TTFT over all requests, and the worst bin's mean; TPOT over requests."""

    strategy: StrategyName
    seconds: float
    switches: int
    ttft_mean: float
    ttft_p99: float
    ttft_worst_bin: float
    tpot_mean: float


def compare_steps(
    machine: Machine,
    traces: Sequence[Trace],
    threshold: int,
    strategies: Sequence[StrategyName] = STRATEGIES,
    replicas: int = 1,
) -> list[StepsRow]:
    """Each strategy over the same steps, request i of a step on replica i mod replicas. Both static layouts are always
    run, to compare with."""
    parts = [trace.split(replicas) for trace in traces]

    def all_replicas(strategy: StrategyName) -> list[list[Run]]:
        """Runs by step and replica."""
        by_replica = [play(strategy, machine, [step[r] for step in parts], threshold) for r in range(replicas)]
        return [list(step) for step in zip(*by_replica, strict=True)]

    runs = {strategy: all_replicas(strategy) for strategy in dict.fromkeys((*strategies, "tp", "ep"))}
    seconds = {name: tuple(max(run.seconds for run in step) for step in steps) for name, steps in runs.items()}
    static = list(zip(seconds["tp"], seconds["ep"], strict=True))
    return [
        StepsRow(
            strategy=name,
            seconds=seconds[name],
            over_better=tuple(min(both) / own for both, own in zip(static, seconds[name], strict=True)),
            over_worse=tuple(max(both) / own for both, own in zip(static, seconds[name], strict=True)),
            switches=sum(len(run.switches) for step in runs[name] for run in step),
            declined=sum(bool(run.declined) for step in runs[name] for run in step),
            refused=sum(run.refused for step in runs[name] for run in step),
            retracted=sum(run.retracted for step in runs[name] for run in step),
            request_steps=sum(run.request_steps for step in runs[name] for run in step),
        )
        for name in strategies
    ]


def compare_serving(
    machine: Machine, trace: Trace, threshold: int, strategies: Sequence[StrategyName]
) -> list[ServingRow]:
    return [serving_row(name, trace, play(name, machine, [trace], threshold)[0]) for name in strategies]


def serving_row(strategy: StrategyName, trace: Trace, run: Run) -> ServingRow:
    arrivals = np.array(trace.arrivals_s)
    ttft = np.array(run.first_s) - arrivals
    bins = arrivals // BIN_S
    return ServingRow(
        strategy=strategy,
        seconds=run.seconds,
        switches=len(run.switches),
        ttft_mean=float(ttft.mean()),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        ttft_worst_bin=max(float(ttft[bins == one].mean()) for one in np.unique(bins)),
        tpot_mean=tpot_s(trace, run),
    )


def tpot_s(trace: Trace, run: Run, begin_s: float = 0.0, end_s: float = float("inf")) -> float:
    """Mean seconds per token after the first, over requests that arrived from begin_s on and before end_s."""
    rows = zip(trace.arrivals_s, run.first_s, run.finish_s, trace.responses, strict=True)
    return fmean((end - first) / (n - 1) for at, first, end, n in rows if begin_s <= at < end_s and n > 1)
