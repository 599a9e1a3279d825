"""What a rank copies, as strips: equal chunks of contiguous bytes at a pitch, or at listed rows.

Pure arithmetic on shapes and strides; needs no device. A kernel, or numpy in a test, then copies the strips.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from moebius_engine.layout.plan import Block, Index


class Strip(NamedTuple):
    """`rows` chunks of `chunk` bytes: chunk i lies at offset + pitch · i, or offset + pitch · rows_list[i].

    destination: rank. tensor: its name. Offsets, in bytes, count from the start of the tensor's view; source_rows and
    destination_rows are int64 row lists, or None.
    """

    destination: int
    tensor: str
    rows: int
    chunk: int
    source_offset: int
    destination_offset: int
    source_pitch: int
    destination_pitch: int
    source_rows: torch.Tensor | None
    destination_rows: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.rows * self.chunk


class _Side(NamedTuple):
    """One end of a block, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: torch.Tensor | None


def strips(
    blocks: Sequence[Block], rank: int, source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]
) -> list[Strip]:
    """The strips of all blocks whose source is `rank`.

    source, destination: views of one layer; every rank's have the same shapes and strides.

    Raises ValueError for a block whose rows this rank does not know, whose shape differs from what its indices cut
    out, or which is no strip.
    """
    return [
        _strip(block, source[block.tensor], destination[block.tensor])
        for block in blocks
        if block.source == rank and block.numel
    ]


def _strip(block: Block, source: torch.Tensor, destination: torch.Tensor) -> Strip:
    if source.dtype != destination.dtype:
        raise ValueError(f"{block.tensor}: from {source.dtype} to {destination.dtype}")
    ends = [
        _side(block, source, block.source_index, "source"),
        _side(block, destination, block.destination_index, "destination"),
    ]
    size, listed = source.element_size(), any(side.rows is not None for side in ends)
    # Dimensions of one element say nothing; listed rows are never part of a chunk.
    dims = [dim for dim, n in enumerate(block.shape) if n > 1 or (listed and dim == 0)]
    chunk = 1
    while len(dims) > listed and all(side.strides[dims[-1]] == chunk for side in ends):
        chunk *= block.shape[dims.pop()]
    even = all(
        side.strides[outer] == side.strides[inner] * block.shape[inner]
        for side in ends
        for outer, inner in pairwise(dims)
    )
    if not even or (listed and len(dims) > 1):
        raise ValueError(f"block {block.tensor} {block.shape} is no strip of equal chunks at one pitch")
    pitches = [side.strides[dims[-1]] * size if dims else 0 for side in ends]
    return Strip(
        block.destination,
        block.tensor,
        block.numel // chunk,
        chunk * size,
        ends[0].offset * size,
        ends[1].offset * size,
        pitches[0],
        pitches[1],
        ends[0].rows,
        ends[1].rows,
    )


def _side(block: Block, tensor: torch.Tensor, index: Index | None, end: str) -> _Side:
    if index is None:
        raise ValueError(
            f"{block.tensor} from rank {block.source} to rank {block.destination}: the sender must know its {end} rows"
        )
    rows = index[0] if isinstance(index[0], torch.Tensor) else None
    cut = tensor[(slice(None), *index[1:])] if rows is not None else tensor[index]
    shape = (len(rows), *cut.shape[1:]) if rows is not None else tuple(cut.shape)
    if shape != block.shape:
        raise ValueError(f"{block.tensor}: the block is {block.shape}, its {end} index cuts out {shape}")
    if rows is not None and (rows.dtype != torch.int64 or not rows.is_contiguous()):
        raise ValueError(f"{block.tensor}: {end} rows must be contiguous int64, not {rows.dtype}")
    offset = int(cut.storage_offset()) - int(tensor.storage_offset())
    return _Side(offset, shape, tuple(cut.stride()), rows)


def word_size(strips: Sequence[Strip], addresses: Sequence[int]) -> int:
    """The widest word, in bytes (16, 8, 4, 2 or 1), that divides every chunk, offset and pitch, and every one of
    `addresses`, where the views start."""
    bits = 16
    for address in addresses:
        bits |= address
    for strip in strips:
        bits |= strip.chunk | strip.source_offset | strip.destination_offset
        bits |= strip.source_pitch | strip.destination_pitch
    return bits & -bits
