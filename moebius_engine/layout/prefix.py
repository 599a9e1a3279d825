"""Shared prefixes: tokens that several requests hold in the same KV rows are placed, and moved, once."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shared(NamedTuple):
    """request: its index. shared: its leading tokens (whole pages) that `sharer`, an earlier entry, has too."""

    request: int
    shared: int
    sharer: int  # position in the returned order; the entry's own position if nothing is shared


def shared_prefixes(prefixes: Sequence[np.ndarray | array], page_size: int) -> list[Shared]:
    """Order requests so that each shares as much as possible with the one before it.

    prefixes: 4-byte tokens of each request that the prefix tree owns, so that others may hold the same rows.

    In lexicographic order the longest common prefix with any earlier entry is the one with the direct predecessor
    (the entries between two that share a prefix share it as well), so one comparison a request is enough.
    """
    # Ordered by the tokens' bytes: any order of tokens will do, as long as equal prefixes come together.
    keys = [prefix.tobytes() for prefix in prefixes]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    entries: list[Shared] = []
    for position, index in enumerate(order):
        shared = 0
        if position:
            before = order[position - 1]
            equal = keys[before] == keys[index]
            shared = len(prefixes[index]) if equal else _common(keys[before], keys[index])
            shared -= shared % page_size
        entries.append(Shared(index, shared, position - 1 if shared else position))
    return entries


def _common(left: bytes, right: bytes) -> int:
    """Leading 4-byte tokens that both have."""
    length = min(len(left), len(right)) // 4
    differing = np.frombuffer(left, np.int32, length) != np.frombuffer(right, np.int32, length)
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length
