"""Where requests with KV land in a layout's pools: slots, KV rows, prefix tree.

Every rank computes the same places for every destination from the requests' metadata, so source and destination of
each KV row agree without a message.
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from moebius_engine.layout.prefix import shared_prefixes
from moebius_engine.sglang.layout_state import LayoutState


class Held(NamedTuple):
    """A request with KV. source: the EP rank that owns it, or will. group: equal for requests with the same cached
    prefix, which then need not be compared (requests.prefix_groups)."""

    req: Req
    source: int
    group: Hashable


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


def plan_places(held: Sequence[Held], page_size: int) -> list[Place]:
    """Order one destination's requests so that shared prefixes are placed once.

    Pure and deterministic: every rank gets the same places.
    """
    # Prefixes are shared only within one namespace (SGLang's extra_key).
    namespaces: dict[str, dict[Hashable, list[Held]]] = {}
    for entry in held:
        groups = namespaces.setdefault(entry.req.extra_key or "", {})
        groups.setdefault(entry.group, []).append(entry)
    places: list[Place] = []
    for groups in namespaces.values():
        members = list(groups.values())
        last: list[int] = []  # place of the last member of each group, in order
        for shared in shared_prefixes([array("i", _cached_prefix(group[0].req)) for group in members], page_size):
            common, sharer = shared.shared, last[shared.sharer] if shared.shared else len(places)
            for req, source, _ in members[shared.request]:
                places.append(Place(req, source, req.kv_committed_len, common, sharer if common else len(places)))
                common, sharer = req.cache_protected_len, len(places) - 1
            last.append(len(places) - 1)
    return places


def rows_needed(places: Sequence[Place], page_size: int) -> int:
    """KV rows that the places take, in whole pages."""
    return sum(-(-place.moved // page_size) * page_size for place in places)


def _cached_prefix(req: Req) -> list[int]:
    """The tokens whose KV rows the prefix tree owns: only these can be shared between requests."""
    length = req.cache_protected_len
    tokens = req.origin_input_ids[:length]
    return tokens if length <= len(tokens) else tokens + req.output_ids[: length - len(tokens)]


@dataclass(frozen=True)
class Occupied:
    """slots: request slot of each place. table_RT: its KV rows (place, position), int64, on the pools' device."""

    slots: list[int]
    table_RT: torch.Tensor

    def moved_rows(self, places: Sequence[Place]) -> torch.Tensor:
        """Destination rows of all moved tokens, in order of places."""
        return _rows_at(self.table_RT, [(row, place.shared, place.length) for row, place in enumerate(places)])


def occupy(state: LayoutState, places: Sequence[Place], page_size: int) -> Occupied:
    """Take slots and KV rows for the places in an empty layout.

    Raises RuntimeError if they do not fit, which a checked plan rules out.
    """
    total = rows_needed(places, page_size)
    device = state.requests.req_to_token.device
    rows = state.allocator.alloc(total) if total else torch.empty(0, dtype=torch.int64, device=device)
    free = state.requests.free_slots
    if rows is None or len(places) > len(free):
        raise RuntimeError(
            f"{len(places)} requests with {total} KV rows do not fit into {state.layout}: "
            f"{len(free)} slots, {state.allocator.available_size()} rows free"
        )
    slots, state.requests.free_slots = free[: len(places)], free[len(places) :]
    # Built on the host and written with one copy: per-request writes would cost a launch each.
    table_RT = _table(places, rows.cpu().numpy(), page_size)
    table = torch.from_numpy(table_RT).to(rows.device)
    index = torch.tensor(slots, dtype=torch.int64, device=device)
    state.requests.req_to_token[index, : table.shape[1]] = table.to(torch.int32)
    return Occupied(slots, table)


def rows_elsewhere(state: LayoutState, places: Sequence[Place], page_size: int) -> torch.Tensor:
    """Rows of all moved tokens where another rank takes these places in its own pool of this layout.

    All ranks' pools are alike and, before a switch, empty: so they hand out the same rows.
    """
    total = rows_needed(places, page_size)
    if not total or total > state.allocator.available_size():
        return torch.empty(0, dtype=torch.int64)  # that rank refuses the switch itself
    rows = state.allocator.alloc(total)
    table_RT = torch.from_numpy(_table(places, rows.cpu().numpy(), page_size)).to(rows.device)
    state.allocator.clear()
    return Occupied([], table_RT).moved_rows(places)


def _table(places: Sequence[Place], rows: np.ndarray, page_size: int) -> np.ndarray:
    """KV rows of each place, (place, position): its own whole pages of `rows`, after those that it shares."""
    table_RT = np.zeros((len(places), max((place.length for place in places), default=0)), dtype=np.int64)
    start = 0
    for row_T, place in zip(table_RT, places, strict=True):
        if place.shared:
            row_T[: place.shared] = table_RT[place.sharer, : place.shared]
        row_T[place.shared : place.length] = rows[start : start + place.moved]
        start += -(-place.moved // page_size) * page_size
    return table_RT


def moved_rows(state: LayoutState, places: Sequence[Place]) -> torch.Tensor:
    """Rows, in the layout that the requests leave, of all tokens that are moved for `places`, in their order."""
    spans = [(place.req.req_pool_idx, place.shared, place.length) for place in places]
    return _rows_at(state.requests.req_to_token, spans).to(torch.int64)


def all_rows(state: LayoutState, placed: Sequence[tuple[Place, int]]) -> torch.Tensor:
    """Rows of all tokens, shared ones as often as they are shared. placed: (place, its request slot in `state`)."""
    spans = [(slot, 0, place.length) for place, slot in placed]
    return _rows_at(state.requests.req_to_token, spans).to(torch.int64)


def _rows_at(table: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """table[row, first:last] of each span (row, first, last), one after the other."""
    rows, firsts, lasts = (np.array(part, dtype=np.int64) for part in (zip(*spans, strict=True) if spans else [()] * 3))
    lengths = lasts - firsts
    starts = np.cumsum(lengths) - lengths
    columns = np.arange(lengths.sum()) + np.repeat(firsts - starts, lengths)
    index = torch.from_numpy(np.repeat(rows, lengths)), torch.from_numpy(columns)
    return table[tuple(part.to(table.device) for part in index)]


def settle_in(state: LayoutState, places: Sequence[Place], occupied: Occupied, prefilling: Sequence[Req] = ()) -> None:
    """Hand the places to their requests and put shared prefixes into the layout's tree, locked by their users.

    prefilling: the half-prefilled ones among them, which go on after the rows that they have.
    """
    tree = state.tree
    nodes: list[Any] = []
    unfinished = {id(req) for req in prefilling}
    nothing = torch.empty(0, dtype=torch.int64, device=occupied.table_RT.device)
    cached = [place.req.cache_protected_len for place in places]
    for index, (place, slot) in enumerate(zip(places, occupied.slots, strict=True)):
        req = place.req
        req.req_pool_idx = slot
        req.prefix_indices = occupied.table_RT[index, : place.length] if id(req) in unfinished else nothing
        if tree.disable:
            node, req.cache_protected_len = None, 0
        elif place.shared == cached[index] == cached[place.sharer] and place.sharer != index:
            node = nodes[place.sharer]  # the same prefix to the last token
        else:
            node = _insert(tree, place, occupied.table_RT[index, : cached[index]])
        nodes.append(node)
        req.last_node = req.last_host_node = req.best_match_node = node
    if not tree.disable:
        for node, users in Counter(nodes).items():
            _lock(tree, node, users)


def _insert(tree, place: Place, rows: torch.Tensor):
    """Put a request's cached prefix into the tree. Returns: the node that it ends at."""
    req = place.req
    key = RadixKey(_cached_prefix(req), req.extra_key)
    known = tree.insert(InsertParams(key=key, value=rows, priority=req.priority or 0)).prefix_len
    if known != place.shared:
        raise RuntimeError(
            f"request {req.rid}: the prefix tree held {known} tokens of its prefix already, {place.shared} were placed"
        )
    # Down to the end of what was just inserted: match_prefix would compare all tokens again.
    node = tree.root_node
    while len(key):
        node = node.children[key.child_key(tree.page_size)]
        key = key[len(node.key) :]
    return node


def _lock(tree, node, users: int) -> None:
    """What as many calls of inc_lock_ref do."""
    tree.inc_lock_ref(node)
    while node is not tree.root_node:
        node.lock_ref += users - 1
        node = node.parent
