"""Which layer may be moved before which: checked before a kernel moves many of them in one launch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Extent(NamedTuple):
    """Addresses of one tensor of one layer: from `start` up to `stop`."""

    start: int
    stop: int


def extent(tensor: torch.Tensor) -> Extent:
    """Where a contiguous tensor lies."""
    return Extent(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def check_order(sources: Sequence[Extent], destinations: Sequence[Extent], distance: int) -> None:
    """Raise ValueError unless every phase overwrites only what a fence has made free.

    sources, destinations: one a phase, in order. distance: phase p starts to write when phase p - distance is over on
    all ranks, so what it writes must not be what a later phase, itself included, reads.
    """
    read, written = np.array(sources, np.uint64).reshape(-1, 2), np.array(destinations, np.uint64).reshape(-1, 2)
    overlap = (written[:, None, 0] < read[None, :, 1]) & (read[None, :, 0] < written[:, None, 1])
    phase, reader = np.nonzero(overlap & (np.arange(len(read)) > np.arange(len(written))[:, None] - distance))
    if len(phase):
        raise ValueError(
            f"phase {phase[0]} writes memory that phase {reader[0]} reads: only what phases up to "
            f"{phase[0] - distance} read is free by then"
        )
