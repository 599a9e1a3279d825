"""What is compared: static layouts, policies, the oracle and variants, each over a series of steps of one replica."""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Literal, get_args

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.switch.payoff import Payoff
from rollout.simulate.machine import Machine
from rollout.simulate.oracle import best_run
from rollout.simulate.outcome import Run
from rollout.simulate.replica import EngineTimes, simulate
from rollout.simulate.trace import Trace
from rollout.simulate.variants import LazyKv, PartialLayers

StrategyName = Literal["tp", "ep", "rollout", "interactive", "payoff", "oracle", "half_layers", "lazy_kv", "learned"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
MEANING: Mapping[StrategyName, str] = {
    "tp": "static TP",
    "ep": "static EP",
    "rollout": "threshold: EP, then TP once the count is below T_h (the paper's rollout setting)",
    "interactive": "the paper's interactive setting: band, window, cooldown",
    "payoff": "threshold, if the rest of the step is expected to earn the switch",
    "oracle": "the best single switch of each step, known afterwards",
    "half_layers": "threshold, with TP for half of the layers",
    "lazy_kv": "threshold, with KV moved during the next step",
    "learned": "threshold that was best in the steps before, their median",
}


def play(strategy: StrategyName, machine: Machine, traces: Sequence[Trace], threshold: int) -> list[Run]:
    """Runs the traces one after the other. threshold: T_h [requests], of the strategies that have one.

    Raises ValueError for an unknown strategy, and for the oracle of a trace that is no rollout step.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown: use one of {list(STRATEGIES)}")
    if strategy in ("oracle", "learned"):
        if serving := [trace.name for trace in traces if not trace.is_step]:
            raise ValueError(f"strategy={strategy!r} needs rollout steps, and {serving} have arrivals over time")
        return _oracle(machine, traces) if strategy == "oracle" else _learned(machine, traces, threshold)
    if strategy in ("tp", "ep"):
        layout = Layout(strategy)
        config, limits = SwitchConfig(policy=layout.value), machine.static[layout]
        return [simulate(trace, machine.times, config, limits, layout) for trace in traces]
    times: EngineTimes = machine.times
    if strategy == "half_layers":
        times = PartialLayers(times, share=0.5)
    elif strategy == "lazy_kv":
        times = LazyKv(times)
    payoff = Payoff(times) if strategy == "payoff" else None
    return [
        simulate(trace, times, _config(strategy, threshold, trace), machine.switching, _start(trace), payoff)
        for trace in traces
    ]


def _config(strategy: StrategyName, threshold: int, trace: Trace) -> SwitchConfig:
    interactive = strategy == "interactive" or (not trace.is_step and strategy != "rollout")
    return SwitchConfig(policy="interactive" if interactive else "rollout", threshold=threshold)


def _start(trace: Trace) -> Layout:
    """A weight update leaves EP; a server that nobody uses is in TP."""
    return Layout.EP if trace.is_step else Layout.TP


def _oracle(machine: Machine, traces: Sequence[Trace]) -> list[Run]:
    return [best_run(trace, machine.times, machine.switching)[0] for trace in traces]


def _learned(machine: Machine, traces: Sequence[Trace], threshold: int) -> list[Run]:
    runs: list[Run] = []
    best: list[int] = []
    for trace in traces:
        config = SwitchConfig(policy="rollout", threshold=median_low(best) if best else threshold)
        runs.append(simulate(trace, machine.times, config, machine.switching))
        best.append(best_run(trace, machine.times, machine.switching)[1])
    return runs
