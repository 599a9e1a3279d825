"""Direct transfers between real ranks equal the plan done in one process; a missing peer becomes an error in time."""

import logging
import time

import pytest
import torch
import torch.distributed as dist

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks, kv_blocks
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.transfer import pick
from moebius_engine.transfer.base import LayerMove, TransferError
from moebius_engine.transfer.direct import DirectTransfer
from tests.gpu.ranks import TIMEOUT_S, check, direct, place, run_ranks
from tests.unit.transfer_cases import cut_experts, kv_case, model_shape, other, random_experts

pytestmark = pytest.mark.gpu
# K and head_dim: K < P, = P, > P; words of 16 bytes down to 2.
KV_HEADS = {2: [(1, 8), (2, 3), (4, 128)], 4: [(2, 128), (4, 5), (8, 64)], 8: [(2, 64), (4, 128), (8, 1)]}


def blank(tensors):
    return [{name: torch.full_like(tensor, -1) for name, tensor in rank.items()} for rank in tensors]


def move_everything(rank: int, ranks: int, memory) -> None:
    transfer = direct(memory)
    torch.manual_seed(0)
    # Experts, intermediate, hidden: aligned, odd, and larger than all blocks' tiles together.
    for sizes in [(ranks, 8 * ranks, 16), (3 * ranks, 3 * ranks, 5), (2 * ranks, 32 * ranks, 512)]:
        full = random_experts(model_shape(*sizes))
        for dtype in (torch.float32, torch.bfloat16):
            typed = {name: tensor.to(dtype) for name, tensor in full.items()}
            for target in Layout:
                blocks = expert_blocks(model_shape(*sizes), ranks, target)
                sources, empty = cut_experts(typed, other(target), ranks), blank(cut_experts(typed, target, ranks))
                assert check(transfer, memory, blocks, sources, empty), (sizes, dtype, target)
    # Control: with one block read from its neighbour's place, the comparison must fail where it arrives.
    broken = list(blocks)
    broken[0] = blocks[0]._replace(source_index=blocks[1].source_index)
    arrives_here = blocks[0].destination == rank
    assert check(transfer, memory, blocks, sources, empty, carried_out=broken) != arrives_here
    for kv_heads, head_dim in KV_HEADS[ranks]:
        for counts in ([41 + 17 * owner for owner in range(ranks)], [5, *[0] * (ranks - 1)], [0] * ranks):
            case = kv_case(ranks, kv_heads, head_dim, counts, seed=kv_heads)
            for target in Layout:
                for dtype in (torch.float32, torch.bfloat16):
                    sources, empty = (
                        [{name: tensor.to(dtype) for name, tensor in each.items()} for each in pools]
                        for pools in (case.pools(other(target), True), case.pools(target, False))
                    )
                    moves = [
                        move._replace(ep_rows=move.ep_rows.cuda(), tp_rows=move.tp_rows.cuda()) for move in case.moves()
                    ]
                    blocks = kv_blocks(case.shape, ranks, target, moves)
                    local = kv_blocks(case.shape, ranks, target, case.moves())
                    assert check(transfer, memory, local, sources, empty, carried_out=blocks), (
                        kv_heads,
                        counts,
                        target,
                    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_direct_equals_local(ranks, tmp_path):
    run_ranks(move_everything, ranks, tmp_path)


def switch_back_and_forth(rank: int, ranks: int, memory) -> None:
    shape = model_shape(2 * ranks, 16 * ranks, hidden=64, layers=5)
    arena = Arena(shape, ranks, torch.bfloat16, "cuda", memory)
    torch.manual_seed(1)
    full = [{name: t.bfloat16() for name, t in random_experts(shape).items()} for _ in range(shape.layers)]

    def views(layout, layer):
        return dict(zip(("w13", "w2"), arena.experts(layout, layer), strict=True))

    for layer in range(shape.layers):
        for name, tensor in cut_experts(full[layer], Layout.EP, ranks)[rank].items():
            views(Layout.EP, layer)[name].copy_(tensor)
    transfer = direct(memory)
    plans = {
        target: (
            expert_blocks(shape, ranks, target),
            [
                LayerMove(layer, views(other(target), layer), views(target, layer))
                for layer in layer_order(target, shape.layers)
            ],
        )
        for target in Layout
    }
    for blocks, moves in plans.values():
        transfer.prepare(blocks, moves)
    transfer.finish()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    for round_ in range(10):  # twenty switches in a row, without a host wait; the last of them layer by layer
        for target in (Layout.TP, Layout.EP):
            blocks, moves = plans[target]
            if round_ < 9:
                transfer.move_layers(blocks, moves)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == taken, "a switch took memory"
    blocks, moves = plans[Layout.TP]
    for _, source, destination in moves:
        transfer.move(blocks, source, destination)
    transfer.finish()
    for layer in range(shape.layers):
        expected = cut_experts(full[layer], Layout.TP, ranks)[rank]
        assert all(torch.equal(views(Layout.TP, layer)[name].cpu(), expected[name]) for name in expected), layer
    with pytest.raises(ValueError, match="writes memory that phase"):
        transfer.move_layers(blocks, moves[::-1])  # the wrong order would overwrite what is still to be read


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layers_in_overlapping_slots_survive_a_chain_of_switches(ranks, tmp_path):
    run_ranks(switch_back_and_forth, ranks, tmp_path)


def lose_a_rank(rank: int, ranks: int, memory, dies_at: int) -> None:
    """The last rank stops after `dies_at` layers."""
    shape, layers, deadline_s = model_shape(2 * ranks, 4 * ranks, hidden=8), 4, 3.0
    transfer = direct(memory, deadline_s)
    full = random_experts(shape)
    moves = [
        LayerMove(
            10 + layer,
            place(memory, cut_experts(full, Layout.EP, ranks)[rank]),
            place(memory, blank(cut_experts(full, Layout.TP, ranks))[rank]),
        )
        for layer in range(layers)
    ]
    blocks = expert_blocks(shape, ranks, Layout.TP)
    transfer.peers.connect()
    if rank == ranks - 1:
        if dies_at:
            transfer.move_layers(blocks, moves[:dies_at])
            transfer.finish()
    else:
        began = time.monotonic()
        transfer.move_layers(blocks, moves)
        transfer.move_layers(blocks, moves)  # must do nothing: a deadline was missed before it
        name = rf"rank {rank}: rank {ranks - 1} did not finish "
        what = rf"w13 of layer {10 + dies_at}" if dies_at else r"entering the move of layers \[10, 11, 12, 13\]"
        with pytest.raises(TransferError, match=name + what + r" within 3\.0 s"):
            transfer.finish()
        assert time.monotonic() - began < 3 * deadline_s
        untouched = moves[-1].destination["w2"]
        assert torch.all(untouched == -1), "the last layer was written although a rank was missing"
    dist.barrier()


@pytest.mark.parametrize(("ranks", "dies_at"), [(2, 0), (2, 2), (4, 1)])
def test_a_missing_rank_is_named_within_the_deadline(ranks, dies_at, tmp_path):
    run_ranks(lose_a_rank, ranks, tmp_path, dies_at)


def pick_and_say(rank: int, ranks: int, memory) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("moebius_engine.transfer")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    world = dist.group.WORLD
    assert isinstance(pick("auto", world, memory, world, TIMEOUT_S), DirectTransfer)
    assert [line for line in lines if line.startswith("transfer:")] == [
        f"transfer: direct ({ranks} ranks wrote into each other's memory)"
    ]
    lines.clear()
    memory.take("unequal", (1 + rank * (1 << 22),), torch.uint8)  # now the ranks' memories differ
    assert not isinstance(pick("auto", world, memory, world, TIMEOUT_S), DirectTransfer)
    why = f"rank {1 - rank} has segments "
    assert any(line.startswith(f"transfer: collective over gloo ({why}") for line in lines), lines
    with pytest.raises(RuntimeError, match=f"transfer='direct' does not work here: {why}"):
        pick("direct", world, memory, world, TIMEOUT_S)


def test_pick_probes_and_falls_back(tmp_path):
    run_ranks(pick_and_say, 2, tmp_path)
