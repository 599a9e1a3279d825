"""Strips cut into tiles, the tables that the copy kernel reads (copy.cu): pure arithmetic in numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moebius_engine.transfer.strips import Strip

# As `struct Strip` and `struct Tile` in copy.cu.
STRIP = np.dtype(
    [
        ("destination", np.uint32),
        ("units", np.uint32),
        ("units_per_chunk", np.uint32),
        ("magic", np.uint32),
        ("shift", np.uint32),
        ("padding", np.uint32),
        ("source_offset", np.uint64),
        ("destination_offset", np.uint64),
        ("source_pitch", np.uint64),
        ("destination_pitch", np.uint64),
        ("source_rows", np.uint64),
        ("destination_rows", np.uint64),
    ]
)
TILE = np.dtype([("strip", np.uint32), ("unit", np.uint32)])
LARGEST = 2**31  # units of a strip: the kernel's division is exact below


class Tables(NamedTuple):
    """strips: (S,) STRIP. tiles: (N,) TILE, those of one tensor together. counts: tiles of each tensor, in order."""

    strips: np.ndarray
    tiles: np.ndarray
    counts: tuple[int, ...]


def tables(strips: Sequence[Strip], tensors: Sequence[str], rank: int, ranks: int, word: int, tile: int = 1) -> Tables:
    """The kernel's tables.

    tensors: names, in the order in which a layer is moved. word: bytes of one access (a unit). tile: units of a tile.

    Tiles of the strips of one tensor alternate, so that all peers' links are busy at any time; each rank begins with
    the peer after it, so that not all write to the same one. Raises ValueError if a strip is too long.
    """
    table = np.zeros(len(strips), STRIP)
    for row, strip in zip(table, strips, strict=True):
        units = strip.nbytes // word
        if units >= LARGEST:
            raise ValueError(f"a strip of {strip.nbytes} bytes in words of {word}: fewer than {LARGEST} words fit")
        magic, shift = divider(strip.chunk // word)
        row["destination"], row["units"], row["units_per_chunk"] = strip.destination, units, strip.chunk // word
        row["magic"], row["shift"] = magic, shift
        for name in ("source_offset", "destination_offset", "source_pitch", "destination_pitch"):
            row[name] = getattr(strip, name)
        for name in ("source_rows", "destination_rows"):
            rows = getattr(strip, name)
            row[name] = 0 if rows is None else rows.data_ptr()
    parts = [_interleaved(strips, table, name, rank, ranks, tile) for name in tensors]
    return Tables(table, np.concatenate([np.empty(0, TILE), *parts]), tuple(len(part) for part in parts))


def _interleaved(strips: Sequence[Strip], table: np.ndarray, name: str, rank: int, ranks: int, tile: int) -> np.ndarray:
    own = [i for i, strip in enumerate(strips) if strip.tensor == name]
    own.sort(key=lambda i: (strips[i].destination - rank - 1) % ranks)
    if not own:
        return np.empty(0, TILE)
    counts = [-(-int(table[i]["units"]) // tile) for i in own]
    parts = np.empty(sum(counts), TILE)
    parts["strip"] = np.repeat(own, counts)
    ordinal = np.concatenate([np.arange(count) for count in counts])
    parts["unit"] = ordinal * tile
    # How far along its strip a tile lies: strips of any length end together.
    progress = (ordinal + 0.5) / np.repeat(counts, counts)
    return parts[np.argsort(progress, kind="stable")]


def divider(by: int) -> tuple[int, int]:
    """(magic, shift) such that n // by == (high 32 bits of n · magic + n) >> shift for 0 <= n < 2³¹.

    Granlund and Montgomery's division by an invariant integer; the sum stays below 2³² for such n.
    """
    shift = (by - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - by)) // by + 1, shift
