"""Plans as such: what is sent by whom, without moving it. (What arrives is tested in test_transfer_local.py.)"""

from collections import Counter

from hypothesis import given

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks, kv_blocks, reverse
from tests.unit.transfer_cases import expert_cases, kv_case, kv_cases, model_shape


@given(expert_cases())
def test_every_rank_sends_and_receives_an_equal_share_of_the_experts(case):
    shape, ranks = case
    layer = 3 * shape.experts * shape.intermediate * shape.hidden
    for target in Layout:
        blocks = expert_blocks(shape, ranks, target)
        between = Counter()
        for block in blocks:
            between[block.source, block.destination] += block.numel
        assert set(between.values()) == {layer // ranks**2}
        assert len(between) == ranks**2


def test_the_way_back_is_the_exact_reverse():
    shape = model_shape()
    assert expert_blocks(shape, 2, Layout.EP) == reverse(expert_blocks(shape, 2, Layout.TP))


def test_gate_and_up_are_two_pieces():
    blocks = expert_blocks(model_shape(experts=4, intermediate=6, hidden=3), 2, Layout.TP)
    pieces = [b for b in blocks if b.tensor == "w13" and (b.source, b.destination) == (0, 1)]
    assert [(b.source_index, b.destination_index) for b in pieces] == [
        ((slice(None), slice(3, 6)), (slice(0, 2), slice(0, 3))),
        ((slice(None), slice(9, 12)), (slice(0, 2), slice(3, 6))),
    ]


@given(kv_cases())
def test_kv_is_sent_once_a_holder_to_tp_and_once_in_all_to_ep(case):
    """With K < P a head lies on P / K ranks in TP, so going there it is sent P / K times, and coming back once."""
    tokens = 2 * sum(map(len, case.tp_rows)) * case.shape.kv_heads * case.shape.head_dim
    copies = max(1, case.ranks // case.shape.kv_heads)
    sent = {
        target: sum(block.numel for block in kv_blocks(case.shape, case.ranks, target, case.moves()))
        for target in Layout
    }
    assert sent == {Layout.TP: copies * tokens, Layout.EP: tokens}


def test_holders_of_a_head_share_its_tokens_evenly():
    case = kv_case(ranks=8, kv_heads=2, head_dim=2, counts=[10] + [0] * 7, seed=0)
    blocks = kv_blocks(case.shape, 8, Layout.EP, case.moves())
    assert [(b.source, b.shape[0]) for b in blocks if b.tensor == "k"] == [
        (rank, tokens) for rank, tokens in enumerate([2, 3, 2, 3, 2, 3, 2, 3])
    ]


@given(kv_cases())
def test_ranks_that_know_only_their_own_rows_make_the_same_plan(case):
    """Same blocks in the same order on every rank, with the rows that a rank needs for its own part."""
    for target in Layout:
        everything = kv_blocks(case.shape, case.ranks, target, case.moves())
        for rank in range(case.ranks):
            known = kv_blocks(case.shape, case.ranks, target, case.moves(rank))
            assert [(b[:3], b.shape) for b in known] == [(b[:3], b.shape) for b in everything]
            assert all(b.source_index is not None for b in known if b.source == rank)
            assert all(b.destination_index is not None for b in known if b.destination == rank)
