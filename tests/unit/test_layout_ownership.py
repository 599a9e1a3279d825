"""Who owns which expert, column, KV head and slot."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.experts import ep_experts, tp_columns
from moebius_engine.layout.heads import holders_per_head, kv_heads_of_rank, kv_heads_per_rank
from moebius_engine.layout.slots import layer_order, slot_of

RANKS = st.integers(2, 16)


@given(RANKS, st.integers(1, 12))
def test_experts_and_columns_are_cut_without_gap_or_overlap(ranks, each):
    for owned in (ep_experts, tp_columns):
        parts = [owned(rank, ranks * each, ranks) for rank in range(ranks)]
        assert [item for part in parts for item in part] == list(range(ranks * each))
        assert {len(part) for part in parts} == {each}


@given(st.sampled_from([(k, p) for k in range(1, 33) for p in range(2, 33) if k % p == 0 or p % k == 0]))
def test_every_kv_head_has_the_same_number_of_consecutive_holders(sizes):
    kv_heads, ranks = sizes
    owned = [kv_heads_of_rank(kv_heads, ranks, rank) for rank in range(ranks)]
    assert {len(heads) for heads in owned} == {kv_heads_per_rank(kv_heads, ranks)}
    held = [head for heads in owned for head in heads]
    assert held == sorted(held)
    assert Counter(held) == dict.fromkeys(range(kv_heads), holders_per_head(kv_heads, ranks))


def test_four_heads_on_eight_ranks():
    assert [list(kv_heads_of_rank(4, 8, rank)) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize("target", Layout)
@given(layers=st.integers(1, 100))
def test_no_slot_is_written_before_it_is_read(target, layers):
    source = Layout.EP if target == Layout.TP else Layout.TP
    unread = {slot_of(source, layer) for layer in range(layers)}
    assert len(unread) == layers and unread <= set(range(layers + 1))
    for layer in layer_order(target, layers):
        unread.discard(slot_of(source, layer))
        assert slot_of(target, layer) not in unread
        assert slot_of(target, layer) in range(layers + 1)
    assert sorted(layer_order(target, layers)) == list(range(layers))
