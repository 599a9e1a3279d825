"""What a switch moves: blocks from one rank's tensor into another's. Transfers, checks and costs all read these.

A block names a tensor, an index into the source rank's view and one into the destination rank's view; both have the
same shape. All layers of a model move by the same blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moebius_engine.layout import Layout
from moebius_engine.layout.experts import ep_experts, tp_columns
from moebius_engine.layout.heads import holders_per_head, kv_heads_of_rank
from moebius_engine.layout.shape import ModelShape

Index = tuple[Any, ...]
"""Slices, or for KV an int64 tensor of rows and a slice of heads. A rank may lack the rows of other ranks: None."""


class Block(NamedTuple):
    source: int  # rank
    destination: int  # rank
    tensor: str  # "w13", "w2", "k" or "v"
    source_index: Index | None
    destination_index: Index | None
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def expert_blocks(shape: ModelShape, ranks: int, target: Layout) -> list[Block]:
    """The blocks of one layer's experts.

    EP views are w13_EIH (E/P, 2I, H) and w2_EHI (E/P, H, I), TP views (E, 2I/P, H) and (E, H, I/P). The way back is
    the exact reverse.
    """
    blocks = []
    width, local = shape.intermediate // ranks, shape.experts // ranks
    for source in range(ranks):
        owned = ep_experts(source, shape.experts, ranks)
        experts = slice(owned.start, owned.stop)
        for destination in range(ranks):
            columns = tp_columns(destination, shape.intermediate, ranks)
            for piece in range(2):  # gate, up
                start = piece * shape.intermediate + columns.start
                blocks.append(
                    Block(
                        source,
                        destination,
                        "w13",
                        (slice(None), slice(start, start + width)),
                        (experts, slice(piece * width, (piece + 1) * width)),
                        (local, width, shape.hidden),
                    )
                )
            blocks.append(
                Block(
                    source,
                    destination,
                    "w2",
                    (slice(None), slice(None), slice(columns.start, columns.stop)),
                    (experts,),
                    (local, shape.hidden, width),
                )
            )
    return blocks if target == Layout.TP else reverse(blocks)


def reverse(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that undo `blocks`."""
    return [
        block._replace(
            source=block.destination,
            destination=block.source,
            source_index=block.destination_index,
            destination_index=block.source_index,
        )
        for block in blocks
    ]


class RowMove(NamedTuple):
    """KV rows of whole requests between an EP rank and the TP ranks, in one order on both sides.

    ep_rank: their owner in EP. tokens: how many. ep_rows, tp_rows: int64 rows, None where this rank does not know them.
    """

    ep_rank: int
    tokens: int
    ep_rows: torch.Tensor | None
    tp_rows: torch.Tensor | None


def kv_blocks(shape: ModelShape, ranks: int, target: Layout, moves: Sequence[RowMove]) -> list[Block]:
    """The blocks of one layer's KV (k_TKD and v_TKD: rows, local heads, D).

    To TP, the owner sends each rank the heads that it holds. To EP, with K < P, each of the P / K holders of a head
    sends its share of the tokens, not all of them.
    """
    blocks = []
    holders = holders_per_head(shape.kv_heads, ranks)
    for move in moves:
        for tp_rank in range(ranks):
            heads = kv_heads_of_rank(shape.kv_heads, ranks, tp_rank)
            first, last = 0, move.tokens
            if target == Layout.EP:
                share = tp_rank % holders
                first, last = share * move.tokens // holders, (share + 1) * move.tokens // holders
            if first == last:
                continue
            ep_index = None if move.ep_rows is None else (move.ep_rows[first:last], slice(heads.start, heads.stop))
            tp_index = None if move.tp_rows is None else (move.tp_rows[first:last], slice(0, len(heads)))
            dims = (last - first, len(heads), shape.head_dim)
            for tensor in ("k", "v"):
                if target == Layout.TP:
                    blocks.append(Block(move.ep_rank, tp_rank, tensor, ep_index, tp_index, dims))
                else:
                    blocks.append(Block(tp_rank, move.ep_rank, tensor, tp_index, ep_index, dims))
    return blocks
