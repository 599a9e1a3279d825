"""KV rows of placed requests in a layout's pools.

Built on the pools' device from a few numbers a request: on a GPU, rows that pass through the host would stop the
switch once for each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Place, rows_needed, segments


@dataclass(frozen=True)
class Occupied:
    """slots: request slot of each place. rows_T: the KV rows taken for all places, int64, on the pools' device."""

    slots: list[int]
    rows_T: torch.Tensor

    def moved(self, places: Sequence[Place]) -> torch.Tensor:
        """Rows of the moved tokens of any of the places, in their order."""
        (index_T,) = _spans([place.moved for place in places], [place.start for place in places], like=self.rows_T)
        return self.rows_T[index_T]


def occupy(state: LayoutState, places: Sequence[Place], page_size: int) -> Occupied:
    """Take slots and KV rows for the places in an empty layout, and write them into its request table.

    Raises RuntimeError if they do not fit, which a checked plan rules out.
    """
    rows_T, free = _take(state, places, page_size), state.requests.free_slots
    if rows_T is None or len(places) > len(free):
        raise RuntimeError(
            f"{len(places)} requests with {rows_needed(places, page_size)} KV rows do not fit into {state.layout}: "
            f"{len(free)} slots, {state.allocator.available_size()} rows free"
        )
    slots, state.requests.free_slots = free[: len(places)], free[len(places) :]
    table_RC = state.requests.req_to_token
    parts = segments(places)
    into_T, of_T = _spans(
        [part.length for part in parts],
        [slots[part.place] * table_RC.shape[1] + part.position for part in parts],
        [part.start for part in parts],
        like=table_RC,
    )
    table_RC.view(-1)[into_T] = rows_T[of_T].to(table_RC.dtype)
    return Occupied(slots, rows_T)


def moved_elsewhere(state: LayoutState, places: Sequence[Place], page_size: int) -> torch.Tensor | None:
    """Rows of the moved tokens where another rank takes these places in its own pool of this layout.

    All ranks' pools are alike and, before a switch, empty: so they hand out the same rows. None if they do not fit:
    that rank then refuses the switch itself.
    """
    rows_T = _take(state, places, page_size)
    state.allocator.clear()
    return None if rows_T is None else Occupied([], rows_T).moved(places)


def moved_rows(state: LayoutState, places: Sequence[Place]) -> torch.Tensor:
    """Rows, in the layout that the requests leave, of all tokens that are moved for `places`, in their order."""
    return _table_rows(state, [(place.req.req_pool_idx, place.shared, place.length) for place in places])


def all_rows(state: LayoutState, placed: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rows of leading tokens, one request after the other. placed: (request slot in `state`, tokens) of each."""
    return _table_rows(state, [(slot, 0, tokens) for slot, tokens in placed])


def _take(state: LayoutState, places: Sequence[Place], page_size: int) -> torch.Tensor | None:
    total = rows_needed(places, page_size)
    if not total:
        return torch.empty(0, dtype=torch.int64, device=state.requests.req_to_token.device)
    return state.allocator.alloc(total)


def _table_rows(state: LayoutState, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Rows of tokens first to last (exclusive) of each (slot, first, last), int64."""
    table_RC = state.requests.req_to_token
    lengths = [last - first for _, first, last in spans]
    (index_T,) = _spans(lengths, [slot * table_RC.shape[1] + first for slot, first, _ in spans], like=table_RC)
    return table_RC.view(-1)[index_T].to(torch.int64)


def _spans(lengths: Sequence[int], *firsts: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
    """For each of `firsts`: first, first + 1, ... of every span, one span after the other, on the device of `like`."""
    # Pinned, so that the host need not wait for the copy, which may come behind weights that move.
    numbers = torch.tensor([lengths, *firsts], dtype=torch.int64, pin_memory=like.is_cuda)
    lengths_S = numbers[0]
    starts_S = lengths_S.cumsum(0) - lengths_S
    numbers[1:] -= starts_S
    total = int(lengths_S.sum())
    on_device = numbers.to(like.device, non_blocking=True)
    counted_T = torch.arange(total, device=like.device)
    return [torch.repeat_interleave(shift_S, on_device[0], output_size=total) + counted_T for shift_S in on_device[1:]]
