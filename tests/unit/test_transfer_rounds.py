"""A move in rounds equals the move at once, within the limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks, kv_blocks
from moebius_engine.transfer.local import move_locally
from moebius_engine.transfer.rounds import loads, rounds
from tests.unit.transfer_cases import cut_experts, expert_cases, kv_cases, model_shape, other, random_experts


def check(blocks, ranks, sources, expected, blank, part) -> None:
    """part: of the largest load, the limit; never below one entry of every block."""
    entries = [block._replace(shape=(1, *block.shape[1:])) for block in blocks]
    limit = max(1, max(loads(blocks, ranks)) // part, max(loads(entries, ranks)))
    turns = rounds(blocks, ranks, limit)
    assert all(max(loads(turn, ranks)) <= limit for turn in turns)
    assert len(turns) == 1 or max(loads(blocks, ranks)) > limit
    for turn in turns:
        move_locally(turn, sources, blank)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(blank, expected, strict=True) for name in b)


@pytest.mark.parametrize("target", Layout)
@given(case=expert_cases(), part=st.integers(1, 5))
def test_experts_in_rounds(target, case, part):
    shape, ranks = case
    full = random_experts(shape)
    expected = cut_experts(full, target, ranks)
    blank = [{name: torch.full_like(tensor, -1) for name, tensor in each.items()} for each in expected]
    check(expert_blocks(shape, ranks, target), ranks, cut_experts(full, other(target), ranks), expected, blank, part)


@pytest.mark.parametrize("target", Layout)
@given(case=kv_cases(), part=st.integers(1, 5))
def test_kv_in_rounds(target, case, part):
    blocks = kv_blocks(case.shape, case.ranks, target, case.moves())
    check(
        blocks, case.ranks, case.pools(other(target), True), case.pools(target, True), case.pools(target, False), part
    )


def test_too_small_a_limit_is_refused():
    with pytest.raises(ValueError, match="no rounds of at most 1 elements a rank"):
        rounds(expert_blocks(model_shape(), 2, Layout.TP), 2, 1)
