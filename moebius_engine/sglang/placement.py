"""Where requests with KV land in a layout's pools: slots, KV rows, prefix tree.

Every rank computes the same places for every destination from the requests' metadata, so source and destination of
each KV row agree without a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from moebius_engine.layout.prefix import shared_prefixes
from moebius_engine.sglang.layout_state import LayoutState


@dataclass(frozen=True)
class Place:
    """One request's KV at its destination.

    source: the rank that holds it in EP (in TP all do). length: KV tokens. shared: its leading tokens that are
    another request's rows already (`sharer`, an index into the same list), so they are not moved.
    """

    req: Req
    source: int
    length: int
    shared: int
    sharer: int

    @property
    def moved(self) -> int:
        """KV tokens that are moved for it."""
        return self.length - self.shared


def plan_places(requests: Sequence[tuple[Req, int]], page_size: int) -> list[Place]:
    """Order one destination's requests so that shared prefixes are placed once.

    requests: (request, source rank). Pure and deterministic: every rank gets the same places.
    """
    cached = [_cached_prefix(req) for req, _ in requests]
    places: list[Place] = []
    # Prefixes are shared only within one namespace (SGLang's extra_key).
    for namespace in sorted({req.extra_key or "" for req, _ in requests}):
        members = [i for i, (req, _) in enumerate(requests) if (req.extra_key or "") == namespace]
        base = len(places)
        for entry in shared_prefixes([cached[i] for i in members], page_size):
            req, source = requests[members[entry.index]]
            places.append(Place(req, source, req.kv_committed_len, entry.shared, base + entry.sharer))
    return places


def rows_needed(places: Sequence[Place], page_size: int) -> int:
    """KV rows that the places take, in whole pages."""
    return sum(-(-place.moved // page_size) * page_size for place in places)


def _cached_prefix(req: Req) -> np.ndarray:
    """The tokens whose KV rows the prefix tree owns: only these can be shared between requests."""
    length = req.cache_protected_len
    tokens = req.origin_input_ids[:length]
    if length > len(tokens):
        tokens = tokens + req.output_ids[: length - len(tokens)]
    return np.asarray(tokens, dtype=np.int32)


def occupy(state: LayoutState, places: Sequence[Place], page_size: int) -> tuple[list[int], torch.Tensor]:
    """Take slots and KV rows for the places in an empty layout.

    Returns: request slot of each place, and the destination rows of all moved tokens, in order of places.
    Raises RuntimeError if they do not fit, which a checked plan rules out.
    """
    total = rows_needed(places, page_size)
    rows = state.allocator.alloc(total) if total else torch.empty(0, dtype=torch.int64)
    if rows is None or len(places) > len(state.requests.free_slots):
        raise RuntimeError(
            f"{len(places)} requests with {total} KV rows do not fit into {state.layout}: "
            f"{len(state.requests.free_slots)} slots, {state.allocator.available_size()} rows free"
        )
    slots, state.requests.free_slots = (
        state.requests.free_slots[: len(places)],
        state.requests.free_slots[len(places) :],
    )
    if not places:
        return slots, rows
    # Built on the host and written with one copy: per-request writes would cost a launch each.
    width = max(place.length for place in places)
    table_RT = np.zeros((len(places), width), dtype=np.int32)
    host, moved, start = rows.cpu().numpy(), [], 0
    for row, place in enumerate(places):
        pages = -(-place.moved // page_size) * page_size
        own = host[start : start + place.moved]
        table_RT[row, : place.shared] = table_RT[place.sharer, : place.shared]
        table_RT[row, place.shared : place.length] = own
        moved.append(own)
        start += pages
    state.requests.req_to_token[torch.tensor(slots), :width] = torch.from_numpy(table_RT).to(rows.device)
    return slots, torch.from_numpy(np.concatenate(moved)).to(rows.device)


def source_rows(state: LayoutState, places: Sequence[Place]) -> torch.Tensor:
    """Rows, in the layout that the requests leave, of all tokens that are moved for `places`, in their order."""
    table = state.requests.req_to_token
    parts = [table[place.req.req_pool_idx, place.shared : place.length] for place in places]
    return torch.cat(parts or [table[0, :0]]).to(torch.int64)


def all_rows(state: LayoutState, placed: Sequence[tuple[Place, int]]) -> torch.Tensor:
    """Rows of all tokens, shared ones as often as they are shared. placed: (place, its request slot in `state`)."""
    table = state.requests.req_to_token
    parts = [table[slot, : place.length] for place, slot in placed]
    return torch.cat(parts or [table[0, :0]]).to(torch.int64)


def settle_in(state: LayoutState, places: Sequence[Place], slots: Sequence[int]) -> None:
    """Hand the places to their requests and put shared prefixes into the layout's tree, locked by their users."""
    nodes: list = []
    for place, slot in zip(places, slots, strict=True):
        req, cached = place.req, place.req.cache_protected_len
        req.req_pool_idx = slot
        rows = state.requests.req_to_token[slot, : place.length].to(torch.int64)
        if state.tree.disable:
            node, cached = None, 0
        elif place.shared == cached and cached and places[place.sharer].req.cache_protected_len == cached:
            node = nodes[place.sharer]  # the same prefix to the last token
        else:
            node = _insert(state, req, rows[:cached])
        nodes.append(node)
        if node is not None:
            state.tree.inc_lock_ref(node)
        req.last_node = req.last_host_node = req.best_match_node = node
        req.cache_protected_len = cached
        req.prefix_indices = rows  # where a half-prefilled request goes on


def _insert(state: LayoutState, req: Req, rows: torch.Tensor):
    key = RadixKey(_cached_prefix(req).tolist(), req.extra_key)
    state.tree.insert(InsertParams(key=key, value=rows.clone(), priority=req.priority or 0))
    match = state.tree.match_prefix(MatchPrefixParams(key=key))
    if not torch.equal(match.device_indices, rows):
        raise RuntimeError(f"request {req.rid}: the prefix tree holds other rows than were placed for its prefix")
    return match.last_device_node
