"""What the runs say about each other: ratios, means, and what cannot be said. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.report.run import PHASES, TITLES, Kind, Run, name_steps


@dataclass(frozen=True)
class Speedup:
    """Time of a static layout divided by that of the switching run, so above 1 the switching run is faster.

    better, worse: over the static layout that was faster, slower, in this very step (an oracle's choice); None unless
    both were given.
    """

    over_tp: float | None
    over_ep: float | None

    @property
    def better(self) -> float | None:
        return None if self.over_tp is None or self.over_ep is None else min(self.over_tp, self.over_ep)

    @property
    def worse(self) -> float | None:
        return None if self.over_tp is None or self.over_ep is None else max(self.over_tp, self.over_ep)


@dataclass(frozen=True)
class SwitchCost:
    """Mean over the switches of one run in one direction, or in both (None) where the file has only their sum [ms]."""

    run: Run
    direction: str | None
    switches: int
    phase_ms: Mapping[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.phase_ms.values())


def static(runs: Sequence[Run], kind: Kind) -> Run | None:
    return next((run for run in runs if run.kind == kind), None)


def switching(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.kind == "switching"]


def shared_steps(runs: Sequence[Run]) -> list[int]:
    """Numbers of the steps that all runs have, in order: only these are compared."""
    return sorted(set.intersection(*(set(run.steps) for run in runs)))


def speedups(run: Run, runs: Sequence[Run]) -> dict[int, Speedup]:
    """Of a switching run, for each shared step in which time passed in all runs; empty without a static run."""
    tp, ep = static(runs, "tp"), static(runs, "ep")
    if tp is None and ep is None:
        return {}
    return {
        number: Speedup(_ratio(tp, run, number), _ratio(ep, run, number))
        for number in shared_steps(runs)
        if all(other.steps[number].step_s > 0 for other in runs)
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Arithmetic mean; None if there is none, or one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def switch_costs(runs: Sequence[Run]) -> list[SwitchCost]:
    """One row for each run and direction in which it switched."""
    rows = []
    for run in runs:
        costs = [cost for step in run.steps.values() for cost in step.costs]
        for direction in sorted({cost.direction for cost in costs}, key=str):
            mine = [cost for cost in costs if cost.direction == direction]
            switches = sum(cost.switches for cost in mine)
            phase_ms = {phase: sum(cost.phase_ms[phase] for cost in mine) / switches for phase in PHASES}
            rows.append(SwitchCost(run, direction, switches, phase_ms))
    return rows


def gaps(runs: Sequence[Run]) -> list[str]:
    """Sentences on what is missing, or makes a comparison doubtful."""
    found = []
    kinds: tuple[Kind, ...] = ("tp", "ep")
    missing = [TITLES[kind] for kind in kinds if static(runs, kind) is None]
    if len(missing) == 2:
        found.append("No static run was given, so there is no speed-up.")
    elif missing:
        found.append(
            f"No {missing[0]} run was given: which static layout is the better one is not known, and the speed-up is "
            "over the other alone."
        )
    if not switching(runs):
        found.append("No switching run was given, so there is no speed-up.")
    for run in runs:
        found += [f"{run.title}: {note}" for note in run.notes]
        if run.kind == "switching" and not any(step.costs for step in run.steps.values()):
            found.append(f"{run.title}: no switch was made, so it has no switch cost.")
        if not run.has_curves:
            found.append(f"{run.title}: a wandb run holds no in-flight curve; steps.jsonl does.")
        if any(cost.direction is None for step in run.steps.values() for cost in step.costs):
            found.append(f"{run.title}: a wandb run holds the cost of all switches, not that of each direction.")
        if empty := [number for number, step in run.steps.items() if step.step_s == 0]:
            found.append(f"{run.title}: no time passed in {name_steps(empty)}, so there is no ratio.")
    return found + _unequal(runs)


def _unequal(runs: Sequence[Run]) -> list[str]:
    found = []
    shared = shared_steps(runs)
    if not shared:
        return ["The runs have no step number in common, so nothing can be compared."]
    for run in runs:
        if alone := sorted(set(run.steps) - set(shared)):
            found.append(f"{run.title}: another run lacks {name_steps(alone)}; left out of charts, ratios and means.")
    worst = {number: _spread([run.steps[number].tokens for run in runs]) for number in shared}
    if differ := [number for number, spread in worst.items() if spread > 0]:
        found.append(
            f"The runs generated different numbers of tokens in {name_steps(differ)}, by up to "
            f"{max(worst.values()):.1%}: their times are of unequal work."
        )
    thresholds = {step.threshold for run in runs for step in run.steps.values()}
    if len(thresholds - {None}) > 1:
        numbers = ", ".join(str(threshold) for threshold in sorted(t for t in thresholds if t is not None))
        found.append(f"Burst and tail part at T_h, which differs between the runs or steps: {numbers} requests.")
    if None in thresholds:
        found.append("Not all runs say at which T_h burst and tail part.")
    return found


def _spread(tokens: Sequence[int]) -> float:
    return (max(tokens) - min(tokens)) / max(tokens) if max(tokens) else 0.0


def _ratio(other: Run | None, run: Run, number: int) -> float | None:
    return None if other is None else other.steps[number].step_s / run.steps[number].step_s
