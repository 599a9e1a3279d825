"""The protocol of a switch: settle → plan → agree → move → verify → commit, or roll back.

Every rank runs it between the same two forward steps. It decides the order and what happens after a refusal; the steps
themselves belong to the rank (`Steps`), so that the protocol can be tested without an engine.

Until the first byte moves, a refusal on any rank leaves all of them as they were. A fault that verification finds
after the move is undone by moving back, which restores the same bytes. A rank that dies in mid-move cannot be undone:
the others' collective ends at its deadline with an error that stops the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moebius_engine.layout import Layout


class Steps(Protocol):
    """What one rank does for a switch. Strings returned are reasons against it, None means none."""

    def settle(self) -> None:
        """Bring the scheduler between two steps: nothing in flight on the device, every result processed."""

    def plan(self, target: Layout) -> str | None:
        """Exchange request metadata and reserve places in the target layout. Touches no state of the source."""

    def move_kv(self) -> int:
        """Move live KV. Returns bytes sent by this rank."""

    def move_weights(self) -> int:
        """Reshard every layer's experts. Returns bytes sent by this rank."""

    def return_kv(self) -> None:
        """Undo move_kv."""

    def return_weights(self) -> None:
        """Undo move_weights."""

    def verify(self) -> str | None:
        """Check what was moved."""

    def commit(self) -> None:
        """Rebuild requests in the target layout and select it."""

    def abandon(self) -> None:
        """Drop the plan: the source layout stays as settle left it."""


Agree = Callable[[str | None], str | None]
"""Collective: this rank's reason against going on → all ranks' reasons joined, or None if no rank has one."""


@dataclass
class Outcome:
    """What a switch did on this rank; times in milliseconds, bytes sent by this rank."""

    refused: str | None = None
    ms: dict[str, float] = field(default_factory=dict)
    kv_bytes: int = 0
    weight_bytes: int = 0


def run_switch(
    steps: Steps,
    agree: Agree,
    target: Layout,
    *,
    with_weights: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Run one switch on this rank.

    target: the layout to go to. with_weights: False to select the layout without moving experts, allowed only when a
    full weight update follows. clock: seconds.

    Returns the outcome; `refused` names the ranks and reasons if nothing was switched. An exception means that this
    rank failed half-way and the engine cannot go on.
    """
    outcome = Outcome()

    def timed(phase: str, step: Callable, *arguments):
        began = clock()
        result = step(*arguments)
        outcome.ms[phase] = outcome.ms.get(phase, 0.0) + 1e3 * (clock() - began)
        return result

    timed("decide", steps.settle)
    refused = agree(timed("metadata", steps.plan, target))
    if refused:
        steps.abandon()
        outcome.refused = refused
        return outcome

    def move_kv() -> None:
        outcome.kv_bytes = timed("kv", steps.move_kv)

    def move_weights() -> None:
        if with_weights:
            outcome.weight_bytes = timed("weights", steps.move_weights)

    # Weights first on the way to TP, last on the way back: the two share the arena's slots in that order.
    for move in (move_weights, move_kv) if target == Layout.TP else (move_kv, move_weights):
        move()
    fault = agree(timed("rest", steps.verify))
    if fault:
        _roll_back(steps, target, with_weights)
        outcome.refused = f"rolled back: {fault}"
        return outcome
    timed("rest", steps.commit)
    return outcome


def _roll_back(steps: Steps, target: Layout, with_weights: bool) -> None:
    undo = [steps.return_kv, steps.return_weights] if with_weights else [steps.return_kv]
    for step in undo if target == Layout.TP else reversed(undo):
        step()
    steps.abandon()
