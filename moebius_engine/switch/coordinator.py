"""The protocol of a switch: settle → plan → agree → move → finish → verify → agree → commit, or roll back.

Every rank runs it between the same two forward steps. It decides the order and what happens after a refusal; the steps
themselves belong to the rank (`Steps`), so that the protocol can be tested without an engine.

Until the first byte moves, a refusal on any rank leaves all of them as they were. A fault that verification finds
after the move is undone by moving back, which restores the bytes that arrived: a wrong plan or place, not bytes that
were corrupted on their way. A rank that fails or dies cannot be undone: the others lose it in their next collective,
or wait until its deadline, and the error stops the engine. docs/protocol.md has every fault in every state.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from moebius_engine.layout import Layout


class Steps(Protocol):
    """What one rank does for a switch. Strings returned are reasons against it, None means none."""

    def settle(self) -> None:
        """Bring the scheduler between two steps: nothing in flight on the device, every result processed."""

    def plan(self, target: Layout) -> str | None:
        """Exchange request metadata and reserve places in the target layout. Touches no state of the source."""

    def move_weights(self) -> int:
        """Begin to reshard every layer's experts. Returns bytes sent by this rank."""

    def move_kv(self) -> int:
        """Begin to move live KV, after the weights. Returns bytes sent by this rank."""

    def prepare(self) -> None:
        """While bytes move: make the target layout ready for its requests. Changes neither them nor the source."""

    def finish(self) -> Mapping[str, float]:
        """Wait until all has arrived. Returns milliseconds by what was moved: "weights", "kv"."""

    def return_weights(self) -> None:
        """Undo move_weights, up to the wait for it."""

    def return_kv(self) -> None:
        """Undo move_kv, up to the wait for it."""

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
    """What a switch did on this rank; times in milliseconds ("decide", "metadata", "weights", "kv"), bytes sent by this
    rank."""

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
        outcome.ms[phase] = 1e3 * (clock() - began)
        return result

    timed("decide", steps.settle)
    refused = agree(timed("metadata", steps.plan, target))
    if refused:
        steps.abandon()
        outcome.refused = refused
        return outcome
    # Weights first: while they move, the host builds the tables of the KV and what the requests will need.
    if with_weights:
        outcome.weight_bytes = steps.move_weights()
    outcome.kv_bytes = steps.move_kv()
    steps.prepare()
    outcome.ms |= steps.finish()
    fault = agree(steps.verify())
    if fault:
        steps.return_kv()
        if with_weights:
            steps.return_weights()
        steps.finish()
        steps.abandon()
        outcome.refused = f"rolled back: {fault}"
        return outcome
    steps.commit()
    return outcome
