"""What a layer's sums notice over real gloo processes, and that a mover undoes the layers that have moved."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout, other
from moebius_engine.layout.plan import expert_blocks, kv_blocks
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.transfer.base import Corrupted, LayerMove
from moebius_engine.transfer.checks import EVERY, Checks, sums
from moebius_engine.transfer.journal import Journal
from moebius_engine.transfer.mover import Mover
from tests.unit.ranks import run_ranks
from tests.unit.transfer_cases import cut_experts, kv_case, model_shape, random_experts

LAYERS, RANKS = 4, 2


# ---- Sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", Layout)
def test_ranks_agree_on_the_sums_of_experts(target, dtype):
    shape = model_shape(experts=4, intermediate=6)
    full = {name: tensor.to(dtype) for name, tensor in random_experts(shape).items()}
    source, arrived = cut_experts(full, other(target), RANKS), cut_experts(full, target, RANKS)
    check_sums(expert_blocks(shape, RANKS, target), source, arrived)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("target", Layout)
def test_ranks_agree_on_the_sums_of_kv(target, kv_heads):
    case = kv_case(RANKS, kv_heads, 3, [5, 2], seed=1)
    source, arrived = case.pools(other(target), True), case.pools(target, True)
    check_sums(kv_blocks(case.shape, RANKS, target, case.moves()), source, arrived)


def check_sums(blocks, source, arrived) -> None:
    moves = [LayerMove(0, source[rank], arrived[rank]) for rank in range(RANKS)]

    def matrix(sent: bool):
        return torch.stack([sums(blocks, rank, RANKS, moves[rank], sent=sent) for rank in range(RANKS)])

    assert torch.equal(matrix(True), matrix(False).T)
    # Control: one byte of one rank.
    block = next(block for block in blocks if block.destination == 1)
    view = arrived[1][block.tensor]
    taken = view[block.destination_index].clone()
    taken.view(-1)[:1].view(torch.uint8)[0] ^= 1
    view[block.destination_index] = taken
    wrong = (matrix(True) != matrix(False).T).nonzero().tolist()
    assert wrong == [[block.source, 1]]


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_layer_has_its_turn(layers, switches):
    """Over many switches each layer of a model is compared about as often, whatever their number."""
    due, checks = [0] * layers, Checks(None, EVERY)  # type: ignore[arg-type]
    for _ in range(switches):
        for layer in range(layers):
            due[layer] += checks.next_is_due()
    assert sum(due) == layers * switches // EVERY
    if layers % EVERY:
        assert max(due) - min(due) <= 1


# ---- Journal


def test_the_journal_gives_back_what_has_moved():
    def moves(layers):
        return [LayerMove(layer, {}, {}) for layer in layers]

    journal = Journal()
    journal.write("weights", moves([0, 1]))
    journal.write("weights", moves([2, 3]))
    journal.strike("weights", moves([3])[0])
    assert journal.holds("weights") and not journal.holds("kv")
    assert [move.layer for move in journal.undo("weights", moves([4, 3, 2, 1, 0]))] == [2, 1, 0]
    assert not journal.holds("weights") and journal.undo("weights", moves([2, 1, 0])) == []


# ---- A mover over them


@pytest.mark.parametrize("kind", ["corrupt", "drop"])
@pytest.mark.parametrize("target", Layout)
def test_a_mover_finds_a_bad_layer_and_takes_back_the_others(tmp_path, kind, target):
    """In every layer: all ranks name the same ranks, and after the way back every expert is where it was."""
    run_ranks(spoil_each_layer, RANKS, tmp_path, kind, target)


def spoil_each_layer(rank: int, kind: str, target: Layout) -> None:
    mover, arena = make_mover(SwitchConfig(check_bytes=True, inject_faults=True))
    if target == Layout.EP:
        mover.move_experts(Layout.TP)
        mover.journal.clear()
    expected = snapshot(arena, other(target))
    for layer in range(LAYERS):
        for view in arena.experts(target, layer_order(target, LAYERS)[0]):
            view.zero_()  # the spare slot may still hold the very bytes that are to arrive there
        if rank == 1:
            mover.spoil(kind, layer)
        with pytest.raises(Corrupted, match=rf"w13/w2 of layer {layer} .*, rank .* to 1$"):
            mover.move_experts(target)
        mover.return_experts(other(target))
        mover.finish()
        returned = snapshot(arena, other(target))
        assert all(torch.equal(now, before) for now, before in zip(returned, expected, strict=True))
    mover.move_experts(target)  # and it goes when nothing is in its way
    assert mover.finish()["checks"] > 0


@pytest.mark.parametrize("kind", ["corrupt", "drop"])
def test_without_check_bytes_a_bad_layer_is_found_in_its_turn_only(tmp_path, kind):
    """Control: what the check finds is there without it."""
    run_ranks(spoil_unseen, RANKS, tmp_path, kind)


def spoil_unseen(rank: int, kind: str) -> None:
    mover, arena = make_mover(SwitchConfig(inject_faults=True))
    mover.move_experts(Layout.TP)
    expected = snapshot(arena, Layout.TP)
    mover.move_experts(Layout.EP)
    if rank == 1:
        mover.spoil(kind, 2)
    mover.move_experts(Layout.TP)
    wrong = {
        index // 2  # two views a layer
        for index, (now, before) in enumerate(zip(snapshot(arena, Layout.TP), expected, strict=True))
        if not torch.equal(now, before)
    }
    assert wrong == ({2} if rank == 1 else set())


def make_mover(config: SwitchConfig) -> tuple[Mover, Arena]:
    shape = model_shape(experts=4, intermediate=6, layers=LAYERS)
    arena = Arena(shape, RANKS, torch.float32, "cpu")
    arena.allocate_kv(16, torch.float32)
    torch.manual_seed(dist.get_rank())
    for layer in range(LAYERS):
        for view in arena.experts(Layout.EP, layer):
            view.normal_()
    return Mover(arena, dist.group.WORLD, dist.group.WORLD, config), arena


def snapshot(arena: Arena, layout: Layout) -> list[torch.Tensor]:
    return [view.clone() for layer in layer_order(layout, LAYERS) for view in arena.experts(layout, layer)]
