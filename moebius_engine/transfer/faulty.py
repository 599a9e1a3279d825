"""A transfer that loses or changes bytes on purpose (switch/faults.py)."""

from collections.abc import Sequence
from typing import Any

import torch

from moebius_engine.layout.plan import Block
from moebius_engine.transfer.base import LayerMove, Transfer


class FaultyTransfer:
    """transfer: what really moves; only move_layers differs. rank: this one."""

    def __init__(self, transfer: Transfer, rank: int):
        self._transfer, self._rank = transfer, rank
        self._armed: tuple[str, int] | None = None

    def arm(self, kind: str, layer: int) -> None:
        """In the next move that has this layer, "corrupt" a byte that arrives here, or "drop" all that does."""
        self._armed = (kind, layer)

    def move_layers(self, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> None:
        kind, layer = self._armed or ("", -1)
        spoilt = next((move for move in moves if move.layer == layer), None)
        if spoilt is None:
            self._transfer.move_layers(blocks, moves)
            return
        self._armed = None
        before = [(view, view.clone()) for view in spoilt.destination.values()]
        self._transfer.move_layers(blocks, moves)
        self._transfer.finish()
        if kind == "drop":
            for view, old in before:
                view.copy_(old)
        else:
            self._flip(next(block for block in blocks if block.destination == self._rank), spoilt)

    def _flip(self, block: Block, move: LayerMove) -> None:
        """A bit of the first element. It alone is written: a listed row may occur twice."""
        view, index = move.destination[block.tensor], block.destination_index
        assert index is not None  # a rank knows its own rows
        rows, *others = index
        first = rows.start or 0 if isinstance(rows, slice) else int(rows[0])
        place = (first, *(cut.start or 0 for cut in others), *[0] * (view.ndim - len(index)))
        word = view[place].reshape(1).clone().view(torch.uint8)
        word[0] ^= 1
        view[place] = word.view(view.dtype)[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)
