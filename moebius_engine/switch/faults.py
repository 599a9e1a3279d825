"""Faults of a switch, on purpose: for tests and `moebius-rollout soak`. docs/protocol.md says how each one ends."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moebius_engine.switch.coordinator import Steps

log = logging.getLogger(__name__)

Kind = Literal["refuse", "raise", "no_memory", "slow", "stop", "die", "corrupt", "drop"]
State = Literal["settle", "move_weights", "share", "prepare", "move_kv", "finish", "verify", "roll_back", "commit"]
_MOVES = ("move_weights", "move_kv", "roll_back")


class InjectedFault(RuntimeError):
    """Raised on purpose."""


@dataclass(frozen=True)
class Fault:
    """What happens on a rank when its next switch comes to a state.

    kind: "refuse" (a reason against the switch, such as no room), "raise" (an exception), "no_memory" (an allocation
        fails), "slow" (`seconds` pass first), "stop" (SIGSTOP), "die" (SIGKILL), "corrupt" (a byte that arrives in
        `layer` is another), "drop" (nothing arrives there).
    at: a step of coordinator.Steps. rank: on which. layer: for "corrupt" and "drop".

    Raises ValueError for what cannot be.
    """

    kind: Kind
    at: State
    rank: int = 0
    seconds: float = 1.0
    layer: int = 0

    def __post_init__(self) -> None:
        for name, known in (("kind", Kind), ("at", State)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {list(get_args(known))}")
        if self.kind == "refuse" and self.at not in ("prepare", "verify"):
            raise ValueError(f"kind='refuse' at {self.at!r}: only 'prepare' and 'verify' can refuse")
        if self.kind in ("corrupt", "drop") and self.at not in _MOVES:
            raise ValueError(f"kind={self.kind!r} at {self.at!r}: bytes arrive at {list(_MOVES)}")


class FaultySteps:
    """Steps of this rank, with a fault where one is armed. It happens once.

    spoil: arms "corrupt" and "drop", which belong to the transfer.
    """

    def __init__(self, steps: Steps, rank: int, spoil: Callable[[Fault], None]):
        self._steps, self._rank, self._spoil = steps, rank, spoil
        self._armed: list[Fault] = []

    def arm(self, fault: Fault) -> None:
        """Let it happen in the next switch that comes to that state."""
        if fault.rank == self._rank:
            self._armed.append(fault)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        step = getattr(self._steps, name)

        def with_fault(*arguments: Any) -> Any:
            fault = next((fault for fault in self._armed if fault.at == name), None)
            if fault is not None:
                self._armed.remove(fault)
                log.warning("injected: %s", fault)
                if fault.kind == "refuse":  # after the step, in which the others may need this rank
                    return step(*arguments) or f"{name} was told to refuse"
                self._happen(fault)
            return step(*arguments)

        return with_fault

    def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                raise InjectedFault(f"{fault.at} was told to fail")
            case "no_memory":
                raise MemoryError(f"{fault.at} was told to find no memory")
            case "slow":
                time.sleep(fault.seconds)
            case "stop" | "die":
                os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
            case "corrupt" | "drop":
                self._spoil(fault)
