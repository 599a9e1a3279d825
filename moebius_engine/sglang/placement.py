"""Where requests with KV land in a layout's pools: slots, KV rows, prefix tree.

Every rank computes the same places for every destination from the requests' metadata, so source and destination of
each KV row agree without a message.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from moebius_engine.layout.prefix import shared_prefixes
from moebius_engine.sglang.layout_state import LayoutState


class Place(NamedTuple):
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
            req, source = requests[members[entry.request]]
            places.append(Place(req, source, req.kv_committed_len, entry.shared, base + entry.sharer))
    return places


def rows_needed(places: Sequence[Place], page_size: int) -> int:
    """KV rows that the places take, in whole pages."""
    return sum(-(-place.moved // page_size) * page_size for place in places)


def _cached_prefix(req: Req) -> array:
    """The tokens whose KV rows the prefix tree owns: only these can be shared between requests. int32."""
    length = req.cache_protected_len
    tokens = req.origin_input_ids[:length]
    if length > len(tokens):
        tokens = tokens + req.output_ids[: length - len(tokens)]
    return array("i", tokens)


@dataclass(frozen=True)
class Occupied:
    """slots: request slot of each place. table_RT: its KV rows (place, position), int64, on the pools' device."""

    slots: list[int]
    table_RT: torch.Tensor

    def moved_rows(self, places: Sequence[Place]) -> torch.Tensor:
        """Destination rows of all moved tokens, in order of places."""
        return self.table_RT[_positions([(row, place.shared, place.length) for row, place in enumerate(places)])]


def occupy(state: LayoutState, places: Sequence[Place], page_size: int) -> Occupied:
    """Take slots and KV rows for the places in an empty layout.

    Raises RuntimeError if they do not fit, which a checked plan rules out.
    """
    total = rows_needed(places, page_size)
    rows = state.allocator.alloc(total) if total else torch.empty(0, dtype=torch.int64)
    free = state.requests.free_slots
    if rows is None or len(places) > len(free):
        raise RuntimeError(
            f"{len(places)} requests with {total} KV rows do not fit into {state.layout}: "
            f"{len(free)} slots, {state.allocator.available_size()} rows free"
        )
    slots, state.requests.free_slots = free[: len(places)], free[len(places) :]
    # Built on the host and written with one copy: per-request writes would cost a launch each.
    width = max((place.length for place in places), default=0)
    table_RT = np.zeros((len(places), width), dtype=np.int64)
    host, start = rows.cpu().numpy(), 0
    for row, place in enumerate(places):
        own = host[start : start + place.moved]
        if place.shared:
            table_RT[row, : place.shared] = table_RT[place.sharer, : place.shared]
        table_RT[row, place.shared : place.length] = own
        start += -(-place.moved // page_size) * page_size
    table = torch.from_numpy(table_RT).to(rows.device)
    state.requests.req_to_token[torch.tensor(slots, dtype=torch.int64), :width] = table.to(torch.int32)
    return Occupied(slots, table)


def moved_rows(state: LayoutState, places: Sequence[Place]) -> torch.Tensor:
    """Rows, in the layout that the requests leave, of all tokens that are moved for `places`, in their order."""
    spans = [(place.req.req_pool_idx, place.shared, place.length) for place in places]
    return state.requests.req_to_token[_positions(spans)].to(torch.int64)


def all_rows(state: LayoutState, placed: Sequence[tuple[Place, int]]) -> torch.Tensor:
    """Rows of all tokens, shared ones as often as they are shared. placed: (place, its request slot in `state`)."""
    spans = [(slot, 0, place.length) for place, slot in placed]
    return state.requests.req_to_token[_positions(spans)].to(torch.int64)


def _positions(spans: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of table[row, first:last] for each span (row, first, last), one after the other."""
    rows, firsts, lasts = (np.array(part, dtype=np.int64) for part in (zip(*spans, strict=True) if spans else [()] * 3))
    lengths = lasts - firsts
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    return torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(columns)


def settle_in(state: LayoutState, places: Sequence[Place], occupied: Occupied, prefilling: Sequence[Req] = ()) -> None:
    """Hand the places to their requests and put shared prefixes into the layout's tree, locked by their users.

    prefilling: the half-prefilled ones among them, which go on after the rows that they have.
    """
    nodes: list = []
    unfinished = {id(req) for req in prefilling}
    nothing = torch.empty(0, dtype=torch.int64)
    cached = [place.req.cache_protected_len for place in places]
    for index, (place, slot, row_T) in enumerate(zip(places, occupied.slots, occupied.table_RT.unbind(), strict=True)):
        req = place.req
        req.req_pool_idx = slot
        req.prefix_indices = row_T[: place.length] if id(req) in unfinished else nothing
        if state.tree.disable:
            node, req.cache_protected_len = None, 0
        elif place.shared == cached[index] == cached[place.sharer] and place.sharer != index:
            node = nodes[place.sharer]  # the same prefix to the last token
        else:
            node = _insert(state, req, row_T[: cached[index]])
        nodes.append(node)
        if node is not None:
            state.tree.inc_lock_ref(node)
        req.last_node = req.last_host_node = req.best_match_node = node


def _insert(state: LayoutState, req: Req, rows: torch.Tensor):
    key = RadixKey(_cached_prefix(req).tolist(), req.extra_key)
    state.tree.insert(InsertParams(key=key, value=rows.clone(), priority=req.priority or 0))
    match = state.tree.match_prefix(MatchPrefixParams(key=key))
    if not torch.equal(match.device_indices, rows):
        raise RuntimeError(f"request {req.rid}: the prefix tree holds other rows than were placed for its prefix")
    return match.last_device_node
