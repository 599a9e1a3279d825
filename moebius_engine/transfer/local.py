"""Transfer between ranks that live in one process: for tests of plans."""

from collections.abc import Sequence

from moebius_engine.layout.plan import Block
from moebius_engine.transfer.base import Tensors


def move_locally(blocks: Sequence[Block], sources: Sequence[Tensors], destinations: Sequence[Tensors]) -> None:
    """Do what `Transfer.move` does on every rank. sources, destinations: one mapping a rank."""
    read = [sources[block.source][block.tensor][block.source_index].clone() for block in blocks]
    for block, content in zip(blocks, read, strict=True):
        destinations[block.destination][block.tensor][block.destination_index] = content
