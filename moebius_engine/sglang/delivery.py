"""A request's outputs reach their receiver in the order in which they were made, also across a switch.

Each rank has a socket of its own to the detokenizer, or to the tokenizer manager where there is none, and the receiver
reads from all in turn. A switch gives a request to another rank, whose first outputs would overtake what the receiver
has not read yet of the rank before: tokens in another order, or behind the end. So an output says after how many
switches it was made, a rank says when it has sent all from before a switch, and what is early is held back.
"""

from collections import deque
from typing import Any, NamedTuple

from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_detokenizer_process


class Made(NamedTuple):
    """An output, and the number of switches before it."""

    switches: int
    output: Any


class Ended(NamedTuple):
    """All that this rank made before its switch of this number has been sent."""

    rank: int
    switches: int


class NumberingSocket:
    """A rank's end. socket: of SGLang's SenderWrapper."""

    def __init__(self, socket: Any, rank: int):
        self._socket, self._rank, self._switches = socket, rank, 0

    def send_pyobj(self, output: Any) -> None:
        self._socket.send_pyobj(Made(self._switches, output))

    def switched(self) -> None:
        """A switch is committed: what comes now is made after it."""
        self._switches += 1
        self._socket.send_pyobj(Ended(self._rank, self._switches))


class Order:
    """Puts what comes from several ranks, in order from each, into an order that switches keep.

    ready: messages to be handled, from the left.
    """

    def __init__(self, ranks: int):
        self._ended = [0] * ranks
        self._early: list[Made] = []
        self.ready: deque[Any] = deque()

    def take(self, message: Any) -> None:
        """Any message; what is neither of the two classes above, such as an answer to a command, keeps its place."""
        if isinstance(message, Ended):
            self._ended[message.rank] = message.switches
            self._early.sort(key=lambda made: made.switches)  # stable
            while self._early and self._early[0].switches <= min(self._ended):
                self.ready.append(self._early.pop(0).output)
        elif not isinstance(message, Made):
            self.ready.append(message)
        elif message.switches > min(self._ended):
            self._early.append(message)
        else:
            self.ready.append(message.output)


class OrderedSocket:
    """The receiver's end. socket: the one that SGLang reads from, whose other methods it has."""

    def __init__(self, socket: Any, ranks: int):
        self._socket, self._order = socket, Order(ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_pyobj(self) -> Any:
        while not self._order.ready:
            self._order.take(self._socket.recv_pyobj())
        return self._order.ready.popleft()


class AsyncOrderedSocket(OrderedSocket):
    """The same for a socket of zmq.asyncio."""

    async def recv_pyobj(self) -> Any:
        while not self._order.ready:
            self._order.take(await self._socket.recv_pyobj())
        return self._order.ready.popleft()


class OrderedDetokenizer(DetokenizerManager):
    """Upstream's, fed in order. In EP's server arguments dp_size is the number of ranks."""

    def init_ipc_channels(self, port_args, server_args) -> None:
        super().init_ipc_channels(port_args, server_args)
        self.recv_from_scheduler: Any = OrderedSocket(self.recv_from_scheduler, server_args.dp_size)


def run_detokenizer(server_args, port_args) -> None:
    """Entry point of the detokenizer's process."""
    run_detokenizer_process(server_args, port_args, OrderedDetokenizer)
