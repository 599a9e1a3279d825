"""A checker of the switch protocol: all interleavings of P ranks, with faults at every point of each.

The ranks are real (protocol_rank.py). What their calls do to the world, to its bytes, places and messages, is modelled
here, and so are the ways in which a wait ends (test_protocol_waits.py). Requests go with the layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moebius_engine.layout import Layout, other
from moebius_engine.switch.coordinator import run_switch
from tests.unit.protocol_rank import MOVING, REFUSING, Bad, Call, Failure, next_call

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
    compared: int = 0  # of them, where layers are compared
    struck: frozenset[int] = frozenset()  # indices of moves that do not count: other bytes arrived than were sent
    summing: bool = False  # has told the sums of the latest move
    broken: bool = False  # a transfer has lost a peer, or missed its deadline
    ready: bool = False  # places in the target, for what lands there
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
    each layer's sums, before the next one moves, and the digests of KV, as with check_bytes. faults: how many at most;
    kinds: of which. waits_s: deadline in seconds of each collective on the host ("exchange", "sums" and "digests" are
    those within share, a move and verify, "decode" the first of the next forward step) and of a "transfer"; one without
    an entry waits for ever. timeout_s: what they should be at most.
    """

    target: Layout
    ranks: int = 2
    direct: bool = False
    compared: bool = False
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
        if rank.summing:
            return "sums"
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
        if call.name in MOVING:
            yield from self._move(state, number, call)
            return
        answer: str | int | None = None
        if collective := self._collective(call):
            if not rank.waiting:
                told = (*rank.told, (collective, call.argument))
                yield f"{label} tells", _with(state, number, told=told, waiting=True)
                return
            yield from self._lost_peer(state, number, label)
            given = self._given(state, number)
            if given is None:
                return
            answer = self._joined(given) if call.name == "agree" else None
        elif call.name == "finish":
            if rank.broken:
                yield f"{label} fails", self._answer(state, number, Failure("transfer"))
            if rank.arrived < len(rank.moves):
                return
        yield label, self._answer(state, number, answer)
        if call.name in REFUSING:
            refused = self._answer(state, number, f"{call.name} of rank {number}")
            yield from self._fault(state, number, "refuse", refused)

    def _move(self, state: State, number: int, call: Call) -> Iterator[Step]:
        """Layers move all at once, or where they are compared one by one."""
        rank, label = state.ranks[number], f"rank {number}: {call.name}"
        if rank.summing:
            yield from self._lost_peer(state, number, label)
            given = self._given(state, number)
            if given is not None:
                yield f"{label}: sums", self._heard_sums(state, number, call, self._joined(given))
            return
        layers = self._layers(rank, call)
        if layers and (not rank.waiting or (self.compared and rank.arrived == rank.compared == len(rank.moves))):
            begun = _with(state, number, moves=(*rank.moves, *layers[: 1 if self.compared else None]), waiting=True)
            aside = self.direct and not self.compared and call.name != "roll_back"
            yield f"{label} begins", self._answer(begun, number, 1) if aside else begun
            return
        if rank.broken:
            yield f"{label} fails", self._answer(state, number, Failure("transfer"))
        if rank.arrived < len(rank.moves):
            return
        if self.compared and rank.compared < len(rank.moves):
            told = (*rank.told, ("sums", self._latest_is_bad(state, rank)))
            yield f"{label} tells sums", _with(state, number, told=told, summing=True)
        else:
            yield label, self._answer(state, number, 1)

    def _layers(self, rank: Rank, call: Call) -> tuple[Move, ...]:
        """What a call has still to move."""
        into = [
            move for index, move in enumerate(rank.moves) if move.layout == self.target and index not in rank.struck
        ]
        back = [move for move in rank.moves if move.layout != self.target]
        if call.name == "roll_back":
            undone = [move._replace(layout=other(self.target)) for move in reversed(into)]
            return tuple(undone[len(back) :])
        tensor = call.name.removeprefix("move_")
        return tuple(
            move
            for move in (Move(tensor, layer, self.target) for layer in range(self.layers))
            if move not in rank.moves
        )

    def _latest_is_bad(self, state: State, rank: Rank) -> str | None:
        move = rank.moves[-1]
        return f"{move.tensor} of layer {move.layer}" if (move.tensor, move.layer) in state.bad else None

    def _heard_sums(self, state: State, number: int, call: Call, fault: str | None) -> State:
        rank = state.ranks[number]
        after = _with(state, number, compared=len(rank.moves), summing=False)
        if fault is None:
            return after
        if call.name == "roll_back":
            return self._answer(after, number, Failure(fault))
        move = rank.moves[-1]
        after = _with(after, number, struck=rank.struck | {len(rank.moves) - 1})
        after = after._replace(bad=after.bad - {(move.tensor, move.layer)})  # the source is whole
        return self._answer(after, number, Bad(fault))

    def _lost_peer(self, state: State, number: int, label: str) -> Iterator[Step]:
        if any(peer.status in GONE for peer in state.ranks):  # also one that has told some of us before it ended
            yield f"{label} lost a peer", self._answer(state, number, Failure("connection closed"))

    def _given(self, state: State, number: int) -> list[Any] | None:
        """What all ranks have told in the collective that this rank is in, once they all have."""
        turn = len(state.ranks[number].told) - 1
        if any(len(peer.told) <= turn for peer in state.ranks):
            return None
        return [peer.told[turn][1] for peer in state.ranks]

    def _joined(self, given: list[Any]) -> str | None:
        return "; ".join(dict.fromkeys(reason for reason in given if reason)) or None

    def _collective(self, call: Call) -> str | None:
        """The collective on the host that a call consists of, or has in it."""
        if call.name in ("agree", "decode"):
            return call.name
        if call.name == "share" and self.target == Layout.TP:  # to EP every rank computes the same partition
            return "exchange"
        return "digests" if call.name == "verify" and self.compared else None

    def _answer(self, state: State, number: int, answer: Any) -> State:
        """The next call has ended with this answer."""
        rank = state.ranks[number]
        name, done = self._call(rank).name, not isinstance(answer, Failure)
        rank = rank._replace(answers=(*rank.answers, answer), waiting=False, summing=False)
        if name == "decode":
            rank = rank._replace(status="decoding" if done else "failed")
        elif self._call(rank).name == "failed":
            rank = rank._replace(status="failed")
        elif name == "prepare":
            rank = rank._replace(ready=answer is None)
        elif name == "commit":
            rank = rank._replace(layout=self.target)
        elif name == "abandon":
            rank = rank._replace(ready=False)
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
        if name == "roll_back":
            return "roll back"
        if name == "agree":
            votes = sum(told == "agree" for told, _ in rank.told) - rank.waiting
            return ("agree to go on", "agree to commit")[votes]
        return "move" if name in (*MOVING, "finish") else name


def _with(state: State, number: int, **changes: Any) -> State:
    ranks = state.ranks
    return state._replace(ranks=(*ranks[:number], ranks[number]._replace(**changes), *ranks[number + 1 :]))
