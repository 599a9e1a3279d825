"""What a plan moves, in one process: content equals slicing the full model; there and back is bit-identical."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks, kv_blocks
from moebius_engine.layout.slots import layer_order, slot_of
from moebius_engine.transfer.local import move_locally
from tests.unit.transfer_cases import cut_experts, expert_cases, kv_case, kv_cases, other, random_experts


def same(left, right) -> bool:
    return all(torch.equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in b)


def empty_like(tensors):
    return [{name: torch.full_like(tensor, -1) for name, tensor in rank.items()} for rank in tensors]


@pytest.mark.parametrize("target", Layout)
@given(case=expert_cases())
def test_experts_arrive_as_if_cut_from_the_full_model(target, case):
    shape, ranks = case
    full = random_experts(shape)
    arrived = empty_like(cut_experts(full, target, ranks))
    move_locally(expert_blocks(shape, ranks, target), cut_experts(full, other(target), ranks), arrived)
    assert same(arrived, cut_experts(full, target, ranks))


@pytest.mark.parametrize("target", Layout)
@given(case=kv_cases())
def test_kv_arrives_as_if_written_there_and_no_other_row_is_touched(target, case):
    arrived = case.pools(target, filled=False)
    blocks = kv_blocks(case.shape, case.ranks, target, case.moves())
    move_locally(blocks, case.pools(other(target), filled=True), arrived)
    assert same(arrived, case.pools(target, filled=True))


@given(kv_cases())
def test_kv_there_and_back_is_bit_identical(case):
    start, tp, back = case.pools(Layout.EP, True), case.pools(Layout.TP, False), case.pools(Layout.EP, False)
    move_locally(kv_blocks(case.shape, case.ranks, Layout.TP, case.moves()), start, tp)
    move_locally(kv_blocks(case.shape, case.ranks, Layout.EP, case.moves()), tp, back)
    assert same(back, start)


def test_a_swap_of_k_and_v_is_seen():
    """Control: with several tokens a rank the comparison notices the mix-up."""
    case = kv_case(ranks=4, kv_heads=2, head_dim=2, counts=[3, 2, 4, 1], seed=1)
    mixed = [{"k": rank["v"], "v": rank["k"]} for rank in case.pools(Layout.EP, filled=True)]
    arrived = case.pools(Layout.TP, filled=False)
    move_locally(kv_blocks(case.shape, 4, Layout.TP, case.moves()), mixed, arrived)
    assert not same(arrived, case.pools(Layout.TP, filled=True))


class SlotArena:
    """Every rank's experts in L + 1 slots, each slot viewed by both layouts."""

    def __init__(self, shape, ranks):
        self.shape, self.ranks = shape, ranks
        local = shape.experts // ranks * shape.intermediate * shape.hidden
        self.w13 = torch.full((ranks, shape.layers + 1, 2 * local), -1.0)
        self.w2 = torch.full((ranks, shape.layers + 1, local), -1.0)

    def views(self, layout, layer):
        shape, slot = self.shape, slot_of(layout, layer)
        experts, width = shape.experts, shape.intermediate
        if layout == Layout.EP:
            experts //= self.ranks
        else:
            width //= self.ranks
        return [
            {
                "w13": self.w13[rank, slot].view(experts, 2 * width, shape.hidden),
                "w2": self.w2[rank, slot].view(experts, shape.hidden, width),
            }
            for rank in range(self.ranks)
        ]


@given(expert_cases(), st.integers(1, 3))
def test_layers_in_overlapping_slots_survive_there_and_back(case, rounds):
    """L layers in L + 1 slots, both layouts in the same memory: nothing is overwritten before it is read."""
    shape, ranks = case
    arena, full = SlotArena(shape, ranks), [random_experts(shape) for _ in range(shape.layers)]
    for layer in range(shape.layers):
        for view, part in zip(arena.views(Layout.EP, layer), cut_experts(full[layer], Layout.EP, ranks), strict=True):
            for name in part:
                view[name].copy_(part[name])
    for target in [Layout.TP, Layout.EP] * rounds:
        for layer in layer_order(target, shape.layers):
            blocks = expert_blocks(shape, ranks, target)
            move_locally(blocks, arena.views(other(target), layer), arena.views(target, layer))
        for layer in range(shape.layers):
            assert same(arena.views(target, layer), cut_experts(full[layer], target, ranks))


@given(expert_cases())
def test_source_and_destination_may_be_the_same_memory(case):
    shape, ranks = case
    arena, full = SlotArena(shape, ranks), random_experts(shape)
    for view, part in zip(arena.views(Layout.EP, 0), cut_experts(full, Layout.EP, ranks), strict=True):
        for name in part:
            view[name].copy_(part[name])
    # TP layer 1 is the slot of EP layer 0.
    move_locally(expert_blocks(shape, ranks, Layout.TP), arena.views(Layout.EP, 0), arena.views(Layout.TP, 1))
    assert same(arena.views(Layout.TP, 1), cut_experts(full, Layout.TP, ranks))
