"""Checking moved KV byte for byte, independently of the plan that moved it: by request and position."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from moebius_engine.layout import Layout
from moebius_engine.layout.heads import kv_heads_of_rank
from moebius_engine.layout.shape import ModelShape
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Place

Digests = dict[tuple[str, int], str]
"""(request id, KV head) → digest of that head's K and V of the moved tokens over all layers."""


def kv_digests(
    state: LayoutState, placed: Iterable[tuple[Place, int]], rank: int, ranks: int, shape: ModelShape
) -> Digests:
    """Digest what a rank holds of each place's moved tokens, in the rows that its request table names.

    placed: (place, request slot in `state`). A prefix that another place provides is that place's to check.
    Legend: T tokens, K KV heads, D head dimension.
    """
    first = kv_heads_of_rank(shape.kv_heads, ranks, rank).start if state.layout == Layout.TP else 0
    pool, table = state.runner.token_to_kv_pool, state.requests.req_to_token
    found: Digests = {}
    for place, slot in placed:
        rows = table[slot, place.shared : place.length].to(torch.int64)
        hashes: dict[int, hashlib.blake2b] = {}
        for buffer_TKD in (*pool.k_buffer, *pool.v_buffer):
            live_KTD = buffer_TKD[rows].movedim(1, 0).contiguous().cpu()
            for head, live_TD in enumerate(live_KTD):
                made = hashes.setdefault(first + head, hashlib.blake2b(digest_size=16))
                made.update(live_TD.view(torch.uint8).numpy().tobytes())
        found |= {(place.req.rid, head): made.hexdigest() for head, made in hashes.items()}
    return found


def differences(before: Sequence[Digests], after: Sequence[Digests]) -> list[tuple[str, int]]:
    """(request id, head) whose KV is not the same for every holder before and after, or has got lost.

    before, after: one entry a rank.
    """
    seen: dict[tuple[str, int], set[str]] = {}
    for rank in (*before, *after):
        for key, value in rank.items():
            seen.setdefault(key, set()).add(value)
    arrived = {key for rank in after for key in rank}
    return sorted(key for key, values in seen.items() if len(values) > 1 or key not in arrived)
