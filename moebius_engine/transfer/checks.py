"""Sums of what each rank sent to each other and of what arrived there: bytes that were lost or changed are found.

A layer's sums are compared before the next layer moves, because that overwrites its source (layout/slots.py): what has
not arrived can still be taken from there.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from moebius_engine.layout.plan import Block, Index
from moebius_engine.transfer.base import Corrupted, LayerMove, Tensors

EVERY = 1999
"""One of so many layer moves is compared: a prime, so that all layers of a model have their turns.

SwitchRecord.checks_ms is what comparing takes: seen on one H200, 2.0 to 3.6 ms for a layer of Qwen3-30B-A3B or its KV
(benchmarks/switch_48_layers_h200.json). Its switch is longer by more, since what the host does beside the weights waits
for them then: 3 to 19 ms, of 50. Every twentieth switch of 48 layers has a comparison: 0.3 % of what switches take, and
1 % with what waits."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes
_PIECE_BYTES = 32 << 20  # of listed rows, gathered at once; with 2 MB, 235,000 rows a rank cost 20 ms of launches


class Checks:
    """group: of all ranks, over a CPU back end. every: compare one of so many layer moves, 1 for all.

    Collective: all ranks call both methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, every: int):
        self._group, self._every, self._count = group, every, 0

    def next_is_due(self) -> bool:
        """Whether the next layer move is to be compared."""
        self._count += 1
        return self._count % self._every == 0

    def compare(self, blocks: Sequence[Block], move: LayerMove) -> None:
        """Raises Corrupted, on all ranks, if a rank has got other bytes than were sent to it. The move has ended."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        mine = torch.stack([sums(blocks, rank, ranks, move, sent=sent) for sent in (True, False)]).cpu()
        everyone = torch.empty(ranks * 2, ranks, dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, mine, group=self._group)
        sent, got = everyone[0::2], everyone[1::2].T
        if wrong := (sent != got).nonzero().tolist():
            names = "/".join(move.source)
            pairs = ", ".join(f"{source} to {destination}" for source, destination in wrong)
            raise Corrupted(f"{names} of layer {move.layer} arrived with other bytes than were sent, rank {pairs}")


def sums(blocks: Sequence[Block], rank: int, ranks: int, move: LayerMove, sent: bool) -> torch.Tensor:
    """Sums of the words that this rank has sent to each rank, or has got from it, modulo 2^64. Returns: int64 (ranks,).

    Bytes in another place of the same rank's share are not noticed.
    """
    views = move.source if sent else move.destination
    found = torch.zeros(ranks, dtype=torch.int64, device=next(iter(views.values())).device)
    for block in blocks:
        here, there = (block.source, block.destination) if sent else (block.destination, block.source)
        index = block.source_index if sent else block.destination_index
        if here == rank:
            assert index is not None  # a rank knows its own rows
            for piece in _pieces(views, block.tensor, index):
                found[there] += piece.view(_word(piece)).sum(dtype=torch.int64)
    return found


def _word(piece: torch.Tensor) -> torch.dtype:
    """The widest words that rows of this length consist of: the same at both ends, and adding them costs no more."""
    width = piece.shape[-1] * piece.element_size()
    return next(word for size, word in _WORDS.items() if width % size == 0 and size >= piece.element_size())


def _pieces(views: Tensors, tensor: str, index: Index) -> Iterator[torch.Tensor]:
    rows, *others = index
    if isinstance(rows, slice):
        yield views[tensor][index]
    else:
        row = views[tensor][(slice(1), *others)]
        for part in rows.split(max(1, _PIECE_BYTES // (row.numel() * row.element_size()))):
            yield views[tensor][(part, *others)]
