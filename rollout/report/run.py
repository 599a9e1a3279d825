"""A run as the report needs it, whatever file it came from, and which layout it stands for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["tp", "ep", "switching"]
TITLES: Mapping[str, str] = {"tp": "static TP", "ep": "static EP", "switching": "switching"}
PHASES = ("decide", "metadata", "kv", "weights", "rest")


@dataclass(frozen=True)
class Cost:
    """Committed switches of one step. direction: "ep→tp", "tp→ep", or None where the file has only their sum.

    phase_ms: the sum over these switches, for each of PHASES [ms].
    """

    direction: str | None
    switches: int
    phase_ms: Mapping[str, float]


@dataclass(frozen=True)
class Mark:
    """A committed switch in the in-flight curve: when [s since the step began], at how many requests, how long [ms]."""

    t_s: float
    inflight: int
    direction: str
    ms: float


@dataclass(frozen=True)
class Step:
    """One rollout step. threshold: T_h, where burst and tail part [requests], None if the file does not say.

    layout_at_end: None for an empty step. switched: whether a switch was made or refused within the step, other than
    the one to the layout in which it begins. inflight: (seconds since the step began, requests), None if the file has
    no such curve.
    """

    number: int
    step_s: float
    burst_s: float
    tail_s: float
    tokens: int
    threshold: int | None
    layout_at_end: str | None
    switched: bool
    costs: tuple[Cost, ...]
    inflight: tuple[tuple[float, int], ...] | None
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Run:
    """name: what the page calls it. why: how its kind is known. steps: by number, in order. notes: sentences on what
    was found while reading."""

    name: str
    kind: Kind
    why: str
    path: Path
    steps: Mapping[int, Step]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        return TITLES[self.kind] if self.name == self.kind else self.name

    @property
    def has_curves(self) -> bool:
        return all(step.inflight is not None for step in self.steps.values())


def make_run(
    name: str | None, policy: Kind | None, path: Path, steps: Sequence[Step], notes: Iterable[str] = ()
) -> Run:
    """name: None for that of its kind. policy: the kind that the run's own configuration names, None if it has none;
    then what the run did decides.

    The last line of a step counts. Raises ValueError for no step at all, and for a name "tp", "ep" or "switching" that
    contradicts the run.
    """
    if not steps:
        raise ValueError(f"{path} is an empty run: no rollout step has ended in it")
    by_number = {step.number: step for step in steps}
    if len(by_number) < len(steps):
        twice = sorted({step.number for step in steps if by_number[step.number] is not step})
        notes = (*notes, f"Several lines for {name_steps(twice)}: the last one counts.")
    kind, why = (policy, "by its configuration") if policy else _by_what_it_did(path, list(by_number.values()))
    # A switching policy may have found no reason to switch: then only the user knows.
    if name == "switching" and policy is None and kind != name:
        kind, why = "switching", "by its name; it made no switch"
    if name in TITLES and name != kind:
        raise ValueError(f"{path} is named {name}, but it is {TITLES[kind]}, {why}; give it another name: NAME={path}")
    ordered = dict(sorted(by_number.items()))
    return Run(name or kind, kind, why, path, ordered, tuple(notes))


def name_steps(numbers: Sequence[int]) -> str:
    """ "step 3", "steps 3, 4, 5", or "12 steps (3 to 20)"."""
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if len(numbers) <= 5:
        return f"steps {', '.join(map(str, numbers))}"
    return f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]})"


def _by_what_it_did(path: Path, steps: Sequence[Step]) -> tuple[Kind, str]:
    layouts = {step.layout_at_end for step in steps} - {None}
    if any(step.switched for step in steps) or len(layouts) == 2:
        return "switching", "since it switched"
    if layouts == {"tp"}:
        return "tp", "since it stayed in TP"
    if layouts == {"ep"}:
        return "ep", "since it stayed in EP"
    raise ValueError(f"{path} is an empty run: none of its {len(steps)} steps generated anything")
