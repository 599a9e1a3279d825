"""Placed requests on their way into a layout's pools and prefix tree."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from moebius_engine.sglang.kv_rows import Occupied, all_rows
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Place, cached_prefix


class Landing:
    """What can be made ready while bytes move, and apart from it what changes the requests.

    state: the layout that they go to, empty but for what is occupied. places, occupied: their KV there. prefilling:
    the half-prefilled ones, which go on after the rows that they have.
    """

    def __init__(self, state: LayoutState, places: Sequence[Place], occupied: Occupied, prefilling: Sequence[Req]):
        self._tree, self._places, self._slots = state.tree, places, occupied.slots
        self._nodes: list[Any] = [None] * len(places)
        slot_of = {id(place.req): slot for place, slot in zip(places, occupied.slots, strict=True)}
        self._filled = [(req, all_rows(state, [(slot_of[id(req)], req.kv_committed_len)])) for req in prefilling]
        self._nothing = torch.empty(0, dtype=torch.int64, device=occupied.rows_T.device)
        self._distinct: dict[int, torch.Tensor] = {}  # place → rows of its cached prefix, to be inserted
        if not self._tree.disable:
            cached = [place.req.cache_protected_len for place in places]
            # Requests with the same prefix to the last token need one insertion.
            distinct = [
                index
                for index, place in enumerate(places)
                if place.sharer == index or not place.shared == cached[index] == cached[place.sharer]
            ]
            sizes = [cached[index] for index in distinct]
            rows_T = all_rows(state, [(self._slots[index], size) for index, size in zip(distinct, sizes, strict=True)])
            self._distinct = dict(zip(distinct, rows_T.split(sizes) if sizes else (), strict=True))

    def plant(self) -> None:
        """Put cached prefixes into the layout's tree, locked by the requests that use them. The requests do not know
        yet: clearing the layout undoes it."""
        if self._tree.disable:
            return
        for index, place in enumerate(self._places):
            rows_T = self._distinct.get(index)
            node = self._nodes[place.sharer] if rows_T is None else _insert(self._tree, place, rows_T)
            self._nodes[index] = node
        for node, users in Counter(self._nodes).items():
            _lock(self._tree, node, users)

    def settle_in(self) -> None:
        """Hand slots, rows and nodes to the requests."""
        for place, slot, node in zip(self._places, self._slots, self._nodes, strict=True):
            req = place.req
            req.req_pool_idx, req.prefix_indices = slot, self._nothing
            req.last_node = req.last_host_node = req.best_match_node = node
            if self._tree.disable:
                req.cache_protected_len = 0
        for req, rows_T in self._filled:
            req.prefix_indices = rows_T


def _insert(tree, place: Place, rows_T: torch.Tensor):
    """Put a request's cached prefix into the tree. Returns: the node that it ends at."""
    req = place.req
    key = RadixKey(cached_prefix(req), req.extra_key)
    known = tree.insert(InsertParams(key=key, value=rows_T, priority=req.priority or 0)).prefix_len
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
