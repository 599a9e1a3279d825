"""A move cut into rounds, so that its staging stays within bounds: pure arithmetic, the same on every rank."""

from collections.abc import Sequence

import torch

from moebius_engine.layout.plan import Block, Index


def rounds(blocks: Sequence[Block], ranks: int, limit: int) -> list[list[Block]]:
    """The blocks in as few rounds as keep what any rank sends, and receives, in one within `limit` elements.

    Every round has an equal part of every block's first dimension. Raises ValueError if one entry of each is too much.
    """
    longest = max((block.shape[0] for block in blocks), default=1)
    count = max(1, -(-max(loads(blocks, ranks)) // limit))
    while count <= longest or count == 1:
        parts = [[_part(block, turn, count) for block in blocks] for turn in range(count)]
        if max(load for part in parts for load in loads(part, ranks)) <= limit:
            return [[block for block in part if block.numel] for part in parts]
        count += 1
    raise ValueError(f"no rounds of at most {limit} elements a rank: {longest} rounds are not enough")


def loads(blocks: Sequence[Block], ranks: int) -> list[int]:
    """Elements that each rank sends and receives."""
    sent, received = [0] * ranks, [0] * ranks
    for block in blocks:
        sent[block.source] += block.numel
        received[block.destination] += block.numel
    return sent + received


def _part(block: Block, turn: int, count: int) -> Block:
    first, last = (at * block.shape[0] // count for at in (turn, turn + 1))
    return block._replace(
        source_index=_cut(block.source_index, first, last),
        destination_index=_cut(block.destination_index, first, last),
        shape=(last - first, *block.shape[1:]),
    )


def _cut(index: Index | None, first: int, last: int) -> Index | None:
    if index is None:
        return None
    head, *rest = index
    if isinstance(head, torch.Tensor):
        return (head[first:last], *rest)
    start = head.start or 0
    return (slice(start + first, start + last), *rest)
