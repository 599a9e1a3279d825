"""A checker of the switch protocol: all interleavings of P ranks, with faults at every point of each.

The ranks are real (protocol_rank.py). What their calls do to the world, to its bytes, places and messages, is modelled
here, and so are the ways in which a wait ends (test_protocol_waits.py). Requests go with the layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moebius_engine.layout import Layout, other
from moebius_engine.switch.coordinator import run_switch
from tests.unit.protocol_rank import MOVING, REFUSING, Call, Failure, next_call

FAULTS = ("refuse", "raise", "die", "stop", "slow", "corrupt")
GONE = ("dead", "failed")  # processes that have ended, which closes their connections
FAULT = "fault"  # how the label of a step that is one begins


class Move(NamedTuple):
    tensor: str  # "weights" or "kv"
    layer: int
    layout: Layout  # into which


class Rank(NamedTuple):
    layout: Layout  # that is selected
    status: str = "live"  # or "decoding" after the switch, "failed" by an exception, "dead", "stopped"
    answers: tuple[Any, ...] = ()
    told: tuple[tuple[str, Any], ...] = ()  # collectives entered on the host: name, and what this rank gave
    waiting: bool = False  # inside the next call, for other ranks
    moves: tuple[Move, ...] = ()  # begun
    arrived: int = 0  # of them
    broken: bool = False  # a transfer has lost a peer, or missed its deadline
    reserved: bool = False  # places in the target
    overran: str = ""  # a wait of more than World.timeout_s


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    faults: tuple[tuple[str, str], ...] = ()  # kind, and the phase in which it came
    bad: frozenset[tuple[str, int]] = frozenset()  # tensor and layer whose bytes are not those that were sent


Step = tuple[str, State]  # what happens, and the state after it


@dataclass(frozen=True)
class World:
    """What surrounds the protocol.

    direct: moves go on beside the host until finish() waits for them; else each waits within its own call. compared:
    tensors whose bytes verify() compares, on all ranks. faults: how many at most; kinds: of which. waits_s: deadline in
    seconds of each collective on the host ("exchange" and "digests" are those within plan and verify, "decode" the
    first of the next forward step) and of a "transfer"; one without an entry waits for ever. timeout_s: what they
    should be at most.
    """

    target: Layout
    ranks: int = 2
    direct: bool = False
    compared: frozenset[str] = frozenset()
    with_weights: bool = True
    faults: int = 0
    kinds: tuple[str, ...] = FAULTS
    waits_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    timeout_s: float = 300.0
    layers: int = 2
    protocol: Callable = run_switch

    def begin(self) -> State:
        return State((Rank(other(self.target)),) * self.ranks)

    def steps(self, state: State) -> list[Step]:
        """All that can happen next. A deadline passes when nothing else can happen; to be slower than that is a
        fault."""
        found = [step for number in range(self.ranks) for step in self._of_rank(state, number)]
        if all(label.startswith(FAULT) for label, _ in found):
            found += [step for number in range(self.ranks) for step in self._deadline(state, number)]
        return found

    def waits_for(self, rank: Rank) -> str | None:
        """The wait across ranks that a rank is in: a collective, or "transfer"."""
        call = self._call(rank)
        if rank.status != "live":
            return None
        if rank.waiting and call.name not in MOVING:
            return self._collective(call)
        return "transfer" if (rank.waiting or call.name == "finish") and rank.arrived < len(rank.moves) else None

    def _call(self, rank: Rank) -> Call:
        return next_call(self.protocol, self.target, self.with_weights, rank.answers)

    def _of_rank(self, state: State, number: int) -> Iterator[Step]:
        rank = state.ranks[number]
        if rank.status == "live" or (self.direct and rank.status == "stopped"):
            yield from self._transfer(state, number)
        if rank.status != "live":
            return
        call = self._call(rank)
        yield from self._host(state, number, call)
        if call.name == "decode":
            return
        yield from self._fault(state, number, "die", _with(state, number, status="dead"))
        yield from self._fault(state, number, "stop", _with(state, number, status="stopped"))
        if call.name != "agree":
            yield from self._fault(state, number, "raise", self._answer(state, number, Failure(f"{call.name} broke")))
        if self.waits_for(rank):
            yield from self._fault(state, number, "slow", self._give_up(state, number))

    def _host(self, state: State, number: int, call: Call) -> Iterator[Step]:
        """The next call: what it begins, if that is still to be done; else how it ends, if it can."""
        rank, label = state.ranks[number], f"rank {number}: {call.name}"
        answer: str | int | None = None
        if collective := self._collective(call):
            if not rank.waiting:
                told = (*rank.told, (collective, self._tells(state, rank, call)))
                yield f"{label} tells", _with(state, number, told=told, waiting=True)
                return
            peers, turn = (*state.ranks[:number], *state.ranks[number + 1 :]), len(rank.told) - 1
            if any(peer.status in GONE for peer in peers):  # also one that has told some of us before it ended
                yield f"{label} lost a peer", self._answer(state, number, Failure("connection closed"))
            if any(len(peer.told) <= turn for peer in peers):
                return
            given = [peer.told[turn][1] for peer in state.ranks]
            answer = self._hears(call, given)
        elif call.name in MOVING:
            if not rank.waiting:
                layout = self.target if call.name.startswith("move") else other(self.target)
                moves = (*rank.moves, *(Move(MOVING[call.name], layer, layout) for layer in range(self.layers)))
                begun = _with(state, number, moves=moves, waiting=True)
                yield f"{label} begins", self._answer(begun, number, 1) if self.direct else begun
                return
            answer = 1
        if call.name == "finish" or call.name in MOVING:
            if rank.broken:
                yield f"{label} fails", self._answer(state, number, Failure("transfer"))
            if rank.arrived < len(rank.moves):
                return
        yield label, self._answer(state, number, answer)
        if call.name in REFUSING:
            refused = self._answer(state, number, f"{call.name} of rank {number}")
            yield from self._fault(state, number, "refuse", refused)

    def _collective(self, call: Call) -> str | None:
        """The collective on the host that a call consists of, or has in it."""
        if call.name in ("agree", "decode"):
            return call.name
        if call.name == "plan" and self.target == Layout.TP:  # to EP every rank computes the same partition
            return "exchange"
        return "digests" if call.name == "verify" and self.compared else None

    def _tells(self, state: State, rank: Rank, call: Call) -> Any:
        if call.name == "decode":
            return call.argument
        if call.name == "verify":
            return "; ".join(
                f"{tensor} of layer {layer}" for tensor, layer in sorted(state.bad) if tensor in self.compared
            )
        return call.argument

    def _hears(self, call: Call, given: list[Any]) -> str | None:
        if call.name in ("agree", "verify"):
            return "; ".join(dict.fromkeys(reason for reason in given if reason)) or None
        return None

    def _answer(self, state: State, number: int, answer: Any) -> State:
        """The next call has ended with this answer."""
        rank = state.ranks[number]
        name, done = self._call(rank).name, not isinstance(answer, Failure)
        rank = rank._replace(answers=(*rank.answers, answer), waiting=False)
        if name == "decode":
            rank = rank._replace(status="decoding" if done else "failed")
        elif self._call(rank).name == "failed":
            rank = rank._replace(status="failed")
        elif name == "plan":
            rank = rank._replace(reserved=answer is None)
        elif name == "commit":
            rank = rank._replace(layout=self.target)
        elif name == "abandon":
            rank = rank._replace(reserved=False)
        return _with(state, number, **rank._asdict())

    def _transfer(self, state: State, number: int) -> Iterator[Step]:
        """The next layer on its way: it arrives when every rank takes part in it."""
        rank = state.ranks[number]
        if rank.broken or rank.arrived == len(rank.moves):
            return
        turn, move = rank.arrived, rank.moves[rank.arrived]
        gone = any(peer.status in GONE for peer in state.ranks)
        silent = gone or any(peer.status == "stopped" and peer.arrived <= turn for peer in state.ranks)
        if (gone and not self.direct) or (silent and "transfer" in self.waits_s):  # the device sees no connection close
            yield f"rank {number}: transfer lost a peer", _with(state, number, broken=True)
        if any(len(peer.moves) <= turn or peer.arrived + (not peer.broken) <= turn for peer in state.ranks):
            return
        label, after = f"{move.tensor} of layer {move.layer}", _with(state, number, arrived=turn + 1)
        yield f"rank {number}: {label} arrives", after
        corrupt = after._replace(bad=after.bad | {(move.tensor, move.layer)})
        yield from self._fault(state, number, "corrupt", corrupt)

    def _deadline(self, state: State, number: int) -> Iterator[Step]:
        what = self.waits_for(state.ranks[number])
        if what is not None and what in self.waits_s:
            overran = what if self.waits_s[what] > self.timeout_s else ""
            waited = _with(state, number, overran=overran)
            yield f"rank {number}: {self.waits_s[what]:g} s of {what} are over", self._give_up(waited, number)

    def _give_up(self, state: State, number: int) -> State:
        if self.waits_for(state.ranks[number]) == "transfer":
            return _with(state, number, broken=True)
        return self._answer(state, number, Failure("deadline"))

    def _fault(self, state: State, number: int, kind: str, after: State) -> Iterator[Step]:
        if kind in self.kinds and len(state.faults) < self.faults:
            phase = self._phase(state.ranks[number])
            after = after._replace(faults=(*state.faults, (kind, phase)))
            yield f"{FAULT}: rank {number}: {kind} in {self._call(state.ranks[number]).name}", after

    def _phase(self, rank: Rank) -> str:
        name = self._call(rank).name
        if name.startswith("return") or (rank.moves and rank.moves[-1].layout != self.target):
            return "roll back"
        if name == "agree":
            return "agree to commit" if rank.moves else "agree to move"
        return "move" if name in (*MOVING, "prepare", "finish") else name


def _with(state: State, number: int, **changes: Any) -> State:
    ranks = state.ranks
    return state._replace(ranks=(*ranks[:number], ranks[number]._replace(**changes), *ranks[number + 1 :]))
