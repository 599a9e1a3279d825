"""What happens next in a soak: drawn by a seed, so that a run can be had again."""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from moebius_engine.switch.faults import Fault, State

Happening = Literal["switch", "undone", "ending", "kill", "stop", "abort", "update", "step"]
_WEIGHTS: dict[Happening, int] = {
    "switch": 50,
    "undone": 24,
    "abort": 10,
    "update": 5,
    "step": 5,
    "ending": 3,
    "kill": 2,
    "stop": 1,
}
_STATES = tuple(state for state in get_args(State) if state != "roll_back")  # reached after another fault only


@dataclass(frozen=True)
class Event:
    """what: a switch, also with a fault that is undone or that ends the engine; a rank killed or stopped between
    switches; an abort; a weight update; the next step. rank, fault: where they belong to it."""

    what: Happening
    rank: int = 0
    fault: Fault | None = None


class Mix:
    """ranks, layers: of the engine. faults: without them it only switches, aborts, updates and steps."""

    def __init__(self, seed: int, ranks: int, layers: int, faults: bool):
        self._random = random.Random(seed)
        self._ranks, self._layers = ranks, layers
        harmless = ("switch", "abort", "update", "step")
        self._weights = {what: weight for what, weight in _WEIGHTS.items() if faults or what in harmless}

    def draw(self) -> Event:
        (what,) = self._random.choices(list(self._weights), list(self._weights.values()))
        rank = self._random.randrange(self._ranks)
        if what == "undone":
            return Event(what, rank, self._undone(rank))
        if what == "ending":
            return Event(what, rank, self._ending(rank))
        return Event(what, rank)

    def _undone(self, rank: int) -> Fault:
        kind = self._random.choice(["refuse", "raise", "no_memory", "slow", "corrupt", "drop"])
        layer = self._random.randrange(self._layers)
        if kind in ("corrupt", "drop"):
            return Fault(kind, self._random.choice(["move_weights", "move_kv"]), rank, layer=layer)  # type: ignore[arg-type]
        if kind == "slow":
            return Fault("slow", self._random.choice(_STATES), rank, seconds=0.2)
        states = ["prepare", "verify"] if kind == "refuse" else ["prepare"]
        return Fault(kind, self._random.choice(states), rank)  # type: ignore[arg-type]

    def _ending(self, rank: int) -> Fault:
        kind = self._random.choice(["raise", "no_memory", "stop", "die"])
        states = _STATES
        if kind in ("raise", "no_memory"):
            states = tuple(state for state in _STATES if state != "prepare")
        return Fault(kind, self._random.choice(states), rank)  # type: ignore[arg-type]
