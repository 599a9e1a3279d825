"""The protocol of a switch: settle → weights → share → prepare → agree → KV → verify → agree → commit, or roll back.

Every rank runs it between the same two forward steps. It decides the order and what happens after a refusal; the steps
themselves belong to the rank (`Steps`), so that the protocol can be tested without an engine.

Weights go first, because their way is long and known beforehand: while they move, the host tells and plans where
requests and their KV go. A refusal on any rank, a rank's exception in what it does alone, and bytes that did not arrive
as they were sent are undone by moving back the layers that have moved. An exception in what ranks do together cannot be
undone, nor can a rank that has died: the others lose it in their next collective, or wait until its deadline, and the
error ends the engine. docs/protocol.md has every fault in every state.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from moebius_engine.layout import Layout
from moebius_engine.transfer.base import Corrupted

log = logging.getLogger(__name__)


class Steps(Protocol):
    """What one rank does for a switch. Strings returned are reasons against it, None means none."""

    def settle(self) -> None:
        """Bring the scheduler between two steps: nothing in flight on the device, every result processed."""

    def move_weights(self, target: Layout) -> int:
        """Begin to reshard every layer's experts. Returns bytes sent by this rank. Raises Corrupted."""

    def share(self, target: Layout) -> None:
        """Tell the other ranks what they need to know of this rank's requests, and hear theirs."""

    def prepare(self) -> str | None:
        """Alone: plan, take places in the target layout and make it ready for what lands there. Changes neither the
        requests nor the source's KV."""

    def move_kv(self) -> int:
        """Begin to move live KV, after weights and plan. Returns bytes sent by this rank. Raises Corrupted."""

    def finish(self) -> Mapping[str, float]:
        """Wait until all has arrived. Returns milliseconds: of the "weights", of the "kv", between the two of the
        "metadata", and of the "checks" among them."""

    def verify(self) -> str | None:
        """Check what was moved."""

    def roll_back(self) -> None:
        """Move back what has moved, KV first, and check it. What was not moved stays."""

    def commit(self) -> None:
        """Rebuild requests in the target layout and select it."""

    def abandon(self) -> None:
        """Drop the plan: the source layout is as settle left it."""


Agree = Callable[[str | None], str | None]
"""Collective: this rank's reason against going on → all ranks' reasons joined, or None if no rank has one."""


@dataclass
class Outcome:
    """What a switch did on this rank; times in milliseconds ("decide", and what Steps.finish returns), bytes sent by
    this rank."""

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

    Returns the outcome; `refused` names the ranks and reasons if all was undone. An exception means that this
    rank failed half-way, or that bytes were lost on their way back, and the engine cannot go on.
    """
    outcome, began = Outcome(), clock()
    steps.settle()
    outcome.ms["decide"] = 1e3 * (clock() - began)
    fault = _move(steps, agree, target, outcome, with_weights)
    if fault is None:
        steps.commit()
        return outcome
    steps.roll_back()
    outcome.refused = f"rolled back: {fault}"
    steps.abandon()
    return outcome


def _move(steps: Steps, agree: Agree, target: Layout, outcome: Outcome, with_weights: bool) -> str | None:
    """Move everything. Returns: all ranks' reasons against what has arrived, or is to move."""
    try:
        if with_weights:
            outcome.weight_bytes = steps.move_weights(target)
        steps.share(target)
        fault = agree(_attempt("prepare", steps.prepare))
        if fault is None:
            outcome.kv_bytes = steps.move_kv()
            outcome.ms |= steps.finish()
            fault = agree(steps.verify())
    except Corrupted as error:  # on all ranks alike
        return str(error)
    return fault


def _attempt(name: str, step: Callable[[], str | None]) -> str | None:
    """Run what a rank does alone: if it fails, that is its reason against going on."""
    try:
        return step()
    except Exception as error:
        log.exception("%s failed: the switch is undone", name)
        return f"{name} failed: {error!r}"
