"""One number for all parameters of an engine: two engines hold the same weights if theirs are equal."""

import hashlib
from collections.abc import Mapping, Sequence

Digests = Sequence[Mapping[str, tuple[str, int]]]
"""Per rank: parameter name → (digest, bytes), from SwitchingEngine.weight_digests."""


def checksum(digests: Digests) -> str:
    """32 hex digits over every parameter of every rank, in rank order: its name, its size and its bytes' digest.

    The order of the names does not matter. The layout does: each layout cuts the parameters in its own way.
    """
    total = hashlib.blake2b(digest_size=16)
    for rank, parameters in enumerate(digests):
        for name, (digest, size) in sorted(parameters.items()):
            total.update(f"{rank} {name} {size} {digest}\n".encode())
    return total.hexdigest()
