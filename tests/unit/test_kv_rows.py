"""KV rows of placed requests: real SGLang pools, any mix of shared prefixes, both page sizes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from moebius_engine.layout import Layout
from moebius_engine.sglang import kv_rows
from moebius_engine.sglang.layout_state import LayoutState
from moebius_engine.sglang.placement import Held, Place, plan_places, rows_needed, segments

ROWS, SLOTS, CONTEXT = 512, 16, 64


def layout_state(page_size: int) -> LayoutState:
    pool = ReqToTokenPool(SLOTS, CONTEXT, "cpu", False)
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(ROWS, torch.float32, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(ROWS, page_size, torch.float32, "cpu", None, False)
    runner = SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool_allocator=allocator)
    return LayoutState(Layout.TP, runner, None, None)


def request(prompt: list[int], cached: int, output: int):
    return SimpleNamespace(
        origin_input_ids=prompt,
        output_ids=[0] * output,
        cache_protected_len=cached,
        kv_committed_len=len(prompt) + output,
        extra_key=None,
        req_pool_idx=None,
    )


@st.composite
def placed(draw) -> tuple[int, list[Place]]:
    page = draw(st.sampled_from([1, 4]))
    held = []
    for number in range(draw(st.integers(0, 10))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
        cached = draw(st.integers(0, len(prompt))) // page * page
        held.append(Held(request(prompt, cached, draw(st.integers(0, 9))), number % 2, number))
    return page, plan_places(held, page)


@given(placed(), st.randoms())
def test_every_token_has_its_own_row_or_the_sharers(case, random):
    page, places = case
    state = layout_state(page)
    elsewhere = kv_rows.moved_elsewhere(state, places, page)
    occupied = kv_rows.occupy(state, places, page)
    table = state.requests.req_to_token
    rows = [table[slot, : place.length].tolist() for slot, place in zip(occupied.slots, places, strict=True)]
    for index, place in enumerate(places):
        assert rows[index][: place.shared] == rows[place.sharer][: place.shared]
    own = [rows[index][place.shared :] for index, place in enumerate(places)]
    moved = [row for part in own for row in part]
    assert len(set(moved)) == len(moved) and 0 not in moved
    assert len(occupied.rows_T) == rows_needed(places, page)
    assert state.allocator.available_size() == ROWS - rows_needed(places, page)
    assert elsewhere.tolist() == moved, "another rank with the same empty pool takes the same rows"
    some = random.sample(range(len(places)), random.randint(0, len(places)))
    assert occupied.moved([places[index] for index in some]).tolist() == [row for index in some for row in own[index]]
    for slot, place in zip(occupied.slots, places, strict=True):
        place.req.req_pool_idx = slot
    assert kv_rows.moved_rows(state, places).tolist() == moved
    lengths = [(slot, place.length) for slot, place in zip(occupied.slots, places, strict=True)]
    assert kv_rows.all_rows(state, lengths).tolist() == [row for part in rows for row in part]


def test_a_prefix_shared_through_several_lies_in_several_segments():
    """The third shares four tokens with the second, of which two are the first's."""
    prompts = ([7, 7], [7, 7, 8, 8], [7, 7, 8, 8, 9])
    places = plan_places([Held(request(p, len(p), 1), 0, n) for n, p in enumerate(prompts)], 1)
    assert [(place.shared, place.start) for place in places] == [(0, 0), (2, 3), (4, 6)]
    parts = [(part.position, part.start, part.length) for part in segments(places) if part.place == 2]
    assert parts == [(0, 0, 2), (2, 3, 2), (4, 6, 2)]


def test_prefixes_are_shared_within_a_namespace_only():
    """SGLang's prefix tree tells an empty extra_key from none."""
    reqs = [request([7, 7], 2, 1) for _ in range(3)]
    reqs[1].extra_key, reqs[2].extra_key = "", "a"
    assert [place.shared for place in plan_places([Held(req, 0, n) for n, req in enumerate(reqs)], 1)] == [0, 0, 0]


def test_what_does_not_fit():
    places = plan_places([Held(request([1] * 30, 0, 1), 0, n) for n in range(17)], 1)
    state = layout_state(1)
    assert kv_rows.moved_elsewhere(state, places, 1) is None
    with pytest.raises(RuntimeError, match="17 requests with 527 KV rows do not fit into tp: 16 slots, 512 rows free"):
        kv_rows.occupy(state, places, 1)
