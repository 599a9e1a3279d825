"""Exhaustive search through a protocol_model.World: what can go wrong, on which shortest path, and how it ends."""

from collections import deque
from dataclasses import dataclass, field

from moebius_engine.layout import other
from tests.unit.protocol_model import FAULT, Rank, State, Step, World


@dataclass
class Report:
    """states: how many there are. problems: each with the shortest path to it. ends: by faults, in order."""

    states: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)
    ends: dict[tuple[tuple[str, str], ...], set[str]] = field(default_factory=dict)


def search(world: World) -> Report:
    """Breadth first, through every state that `world` can reach."""
    begin, report = world.begin(), Report()
    origins: dict[State, tuple[State, str] | None] = {begin: None}
    todo = deque([begin])
    while todo:
        state = todo.popleft()
        steps = world.steps(state)
        for problem in problems(world, state, steps):
            report.problems.setdefault(problem, _path(origins, state))
        if _is_last(steps):
            report.ends.setdefault(state.faults, set()).add(_end(state))
        for label, after in steps:
            if after not in origins:
                origins[after] = state, label
                todo.append(after)
    report.states = len(origins)
    return report


def problems(world: World, state: State, steps: list[Step]) -> set[str]:
    """What is wrong in a state, in words."""
    found = {f"{rank.overran} waits for more than {world.timeout_s:g} s" for rank in state.ranks if rank.overran}
    if any(len({name for name, _ in turn}) > 1 for turn in zip(*(rank.told for rank in state.ranks), strict=False)):
        found.add("ranks are in different collectives")
    if any(len(set(turn)) > 1 for turn in zip(*(rank.moves for rank in state.ranks), strict=False)):
        found.add("ranks move different layers")
    if all(rank.told and rank.told[-1][0] == "decode" for rank in state.ranks):
        found |= _problems_of_decoding(world, state)
    statuses, kinds = {rank.status for rank in state.ranks}, {kind for kind, _ in state.faults}
    if _is_last(steps):
        if "live" in statuses:
            found.add("hang")
        if statuses >= {"decoding", "failed"}:
            found.add("some ranks go on and others end")
        if kinds <= {"refuse"} and "failed" in statuses:
            found.add("a refusal ends the engine")
        if not kinds and any(rank.layout != world.target for rank in state.ranks):
            found.add("no switch although nothing was wrong")
    return found


def _problems_of_decoding(world: World, state: State) -> set[str]:
    """All ranks have left the switch and take the next forward step."""
    source, found = other(world.target), {f"bad {tensor} in use" for tensor, _ in state.bad}
    if len({rank.layout for rank in state.ranks}) > 1:
        found.add("ranks in different layouts")
    for rank in state.ranks:
        refused = rank.told[-1][1]
        if rank.arrived < len(rank.moves) or _holds(world, rank) != {rank.layout}:
            found.add("bytes of two layouts on a rank")
        if rank.layout == source and rank.ready:
            found.add("places in the target are not free")
        if rank.layout == world.target and not rank.ready:
            found.add("the target was not made ready")
        if (refused is None) != (rank.layout == world.target):
            found.add("the outcome does not say what happened")
    return found


def _holds(world: World, rank: Rank) -> set:
    """The layouts that this rank's bytes lie in."""
    arrived = [move for index, move in enumerate(rank.moves[: rank.arrived]) if index not in rank.struck]
    held = {(move.tensor, move.layer): move.layout for move in arrived}
    tensors = ("weights", "kv") if world.with_weights else ("kv",)
    return {held.get((tensor, layer), other(world.target)) for tensor in tensors for layer in range(world.layers)}


def _is_last(steps: list[Step]) -> bool:
    return all(label.startswith(FAULT) for label, _ in steps)


def _end(state: State) -> str:
    """How a switch has ended, as docs/protocol.md says it."""
    if any(rank.status not in ("decoding", "dead", "stopped") for rank in state.ranks):
        return "late" if any(rank.overran for rank in state.ranks) else "ends"
    refused = next((rank.told[-1][1] for rank in state.ranks if rank.status == "decoding"), "")
    if state.bad:
        return "bad bytes"
    return "switched" if refused is None else "rolled back"


def _path(origins: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    path: list[str] = []
    while (origin := origins[state]) is not None:
        state, label = origin
        path.append(label)
    return path[::-1]
