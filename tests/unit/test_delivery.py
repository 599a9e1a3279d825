"""Outputs keep their order across switches, however late the receiver reads which rank's."""

import asyncio
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.delivery import AsyncOrderedSocket, NumberingSocket, Order, OrderedSocket


class Wire(deque):
    """What one rank has sent and nobody has read."""

    send_pyobj = deque.append


def sent(owners: list[list[int]], ranks: int) -> list[Wire]:
    """What the ranks send of requests that each switch may give to another one. owners: between two switches, the rank
    of each request, which makes two outputs of it there."""
    wires = [Wire() for _ in range(ranks)]
    sockets = [NumberingSocket(wire, rank) for rank, wire in enumerate(wires)]
    for epoch, rank_of in enumerate(owners):
        for part in range(2):
            for request, rank in enumerate(rank_of):
                sockets[rank].send_pyobj((request, 2 * epoch + part))
        for socket in sockets:
            socket.switched()
    return wires


@st.composite
def runs(draw):
    ranks, requests = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    owner = st.lists(st.integers(0, ranks - 1), min_size=requests, max_size=requests)
    owners = draw(st.lists(owner, min_size=1, max_size=4))
    wires = sent(owners, ranks)
    turns = [rank for rank, wire in enumerate(wires) for _ in wire]
    return owners, wires, draw(st.permutations(turns))


@given(runs())
def test_all_come_in_order_of_each_request(run):
    owners, wires, turns = run
    order = Order(len(wires))
    for rank in turns:
        order.take(wires[rank].popleft())
    for request in range(len(owners[0])):
        assert [part for who, part in order.ready if who == request] == list(range(2 * len(owners)))


@given(runs())
def test_what_is_not_early_is_not_held_back(run):
    """Until the first switch outputs come when they are read, and answers to commands always do."""
    owners, wires, _ = run
    order = Order(len(wires))
    for wire in wires:
        while wire and len(order.ready) < sum(len(owner) for owner in owners[:1]) and wire[0].switches == 0:
            before = len(order.ready)
            order.take(wire.popleft())
            assert len(order.ready) == before + 1
    order.take("an answer")
    assert order.ready[-1] == "an answer"


def test_control_as_read_they_are_in_another_order():
    """Rank 0 has a request, then rank 1; the receiver reads from both in turn."""
    zero, one = sent([[0], [1]], 2)
    read = [message for pair in zip(one, zero, strict=True) for message in pair]
    parts = [made.output[1] for made in read if hasattr(made, "output")]
    assert parts != sorted(parts)
    order = Order(2)
    for message in read:
        order.take(message)
    assert [part for _, part in order.ready] == [0, 1, 2, 3]


class Read:
    """A socket that is read from. name: an attribute of ZMQ's."""

    closed = False

    def __init__(self, messages):
        self._messages = messages

    def recv_pyobj(self):
        return self._messages.popleft()


class AsyncRead(Read):
    async def recv_pyobj(self):
        return self._messages.popleft()


def test_both_sockets_give_what_is_ready():
    for kind, ordered in ((Read, OrderedSocket), (AsyncRead, AsyncOrderedSocket)):
        (wire,) = sent([[0], [0]], 1)
        socket = ordered(kind(wire), 1)
        got = [socket.recv_pyobj() for _ in range(4)]
        if kind is AsyncRead:
            got = [asyncio.run(one) for one in got]
        assert [part for _, part in got] == [0, 1, 2, 3] and socket.closed is False
