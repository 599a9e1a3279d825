"""Which KV rows go where in a switch: from the places of all requests to the rows of each rank's pools."""

from collections.abc import Sequence

import torch

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import RowMove
from moebius_engine.sglang import kv_rows
from moebius_engine.sglang.kv_rows import Occupied
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Place


def by_ep_rank(places: Sequence[Place], ranks: int) -> list[list[Place]]:
    """The places in TP by the EP rank that their KV comes from."""
    return [[place for place in places if place.source == owner] for owner in range(ranks)]


def to_tp(source: LayoutState, places: Sequence[Sequence[Place]], occupied: Occupied, rank: int) -> list[RowMove]:
    """KV rows that each EP rank sends. source: EP's state of this rank. places: by EP rank. occupied: the union's."""
    tokens = [sum(place.moved for place in part) for part in places]
    tp_rows = occupied.moved([place for part in places for place in part]).split(tokens)
    mine = kv_rows.moved_rows(source, places[rank])
    return [RowMove(owner, tokens[owner], mine if owner == rank else None, rows) for owner, rows in enumerate(tp_rows)]


def to_ep(
    source: LayoutState, places: Sequence[Sequence[Place]], new_rows: Sequence[torch.Tensor | None]
) -> list[RowMove]:
    """KV rows that each EP rank receives. source: TP's state. places, new_rows: by EP rank."""
    tokens = [sum(place.moved for place in part) for part in places]
    tp_rows = kv_rows.moved_rows(source, [place for part in places for place in part]).split(tokens)
    return [RowMove(rank, tokens[rank], new_rows[rank], tp_rows[rank]) for rank in range(len(places))]


def whole(
    ep: LayoutState, tp: LayoutState, places: Sequence[Sequence[Place]], slots: dict[Layout, dict[int, int]], rank: int
) -> list[RowMove]:
    """Every row of the places, also those that another place shares. places: by EP rank. slots: request slot of a
    place, by its id; in EP those of this rank's places."""
    moves = []
    for ep_rank, part in enumerate(places):
        in_tp = kv_rows.all_rows(tp, [(slots[Layout.TP][id(place)], place.length) for place in part])
        in_ep = None
        if ep_rank == rank:
            in_ep = kv_rows.all_rows(ep, [(slots[Layout.EP][id(place)], place.length) for place in part])
        moves.append(RowMove(ep_rank, sum(place.length for place in part), in_ep, in_tp))
    return moves
