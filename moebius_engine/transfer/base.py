"""The interface of a transfer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from moebius_engine.layout.plan import Block

Tensors = Mapping[str, torch.Tensor]


class Transfer(Protocol):
    """Moves one layer's blocks between ranks."""

    def move(self, blocks: Sequence[Block], source: Tensors, destination: Tensors) -> None:
        """Collective: every rank passes the same blocks in the same order.

        Blocks whose source is this rank are read from `source`, those whose destination it is are written to
        `destination`. Both may overlap in memory: on every rank all reads come before any write.
        """

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Take scratch for moves of up to `numel` elements a rank, so that later moves allocate nothing."""
