"""The interface of a transfer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from moebius_engine.layout.plan import Block
from moebius_engine.memory.peers import Peers

Tensors = Mapping[str, torch.Tensor]


class TransferError(RuntimeError):
    """Bytes did not arrive. The memory of both layouts is undefined: the engine cannot go on."""


class Corrupted(RuntimeError):
    """A rank has got other bytes than were sent to it. Every rank raises it; the layer's source is whole."""


class LayerMove(NamedTuple):
    """One layer of a switch. layer: its number, for messages. source, destination: this rank's views of it."""

    layer: int
    source: Tensors
    destination: Tensors


class Transfer(Protocol):
    """Moves blocks between ranks. Collective: every rank passes the same blocks and layers in the same order.

    Blocks whose source is this rank are read from `source`, those whose destination it is are written to `destination`.
    peers: whose memory it has mapped, if it has.
    """

    peers: Peers | None

    def move(self, blocks: Sequence[Block], source: Tensors, destination: Tensors) -> None:
        """Move one layer. Where an implementation allows `source` and `destination` to overlap in memory, on every
        rank all reads come before any write; else it raises ValueError."""

    def move_layers(self, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> None:
        """Move all layers by the same blocks, in this order. May return before the bytes have arrived; later work on
        the current stream sees them. A layer may overwrite what the layers before it were read from."""

    def reserve(self, numel: int, most: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Take what moves need, so that later ones allocate nothing. Of a rank and layer, in elements: `numel` is what
        may be staged, `most` the largest move."""

    def prepare(self, blocks: Sequence[Block], moves: Sequence[LayerMove], keep: bool = True) -> None:
        """Compute ahead what `move_layers` needs with this very list and these moves, or some of them in a row. keep:
        for good, or else until the next finish(). Not collective."""

    def finish(self) -> None:
        """Wait until everything moved has arrived. Raises TransferError naming rank and layer if a peer failed."""
