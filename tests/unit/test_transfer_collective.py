"""The collective transfer over real gloo processes equals the plan done in one process."""

import logging

import pytest
import torch
import torch.distributed as dist

from moebius_engine.layout import Layout
from moebius_engine.layout.plan import expert_blocks, kv_blocks
from moebius_engine.transfer import pick
from moebius_engine.transfer.collective import CollectiveTransfer
from moebius_engine.transfer.local import move_locally
from tests.unit.ranks import run_ranks
from tests.unit.transfer_cases import cut_experts, kv_case, model_shape, other, random_experts

# Rank 1 owns nothing: exchanges of no elements must match on all ranks too. K < P, = P, > P.
KV_CASES = {2: [(1, [5, 0]), (2, [3, 4]), (4, [0, 0])], 4: [(1, [9, 0, 2, 5]), (2, [1, 0, 7, 3]), (8, [2, 0, 1, 1])]}


def run_rank(rank: int, ranks: int) -> None:
    transfer = CollectiveTransfer(dist.group.WORLD)
    move_experts(transfer, rank, ranks)
    for kv_heads, counts in KV_CASES[ranks]:
        move_kv(transfer, rank, kv_case(ranks, kv_heads, 3, counts, seed=kv_heads))
    check_scratch_is_reused(transfer, rank, ranks)


def move_experts(transfer, rank: int, ranks: int) -> None:
    shape = model_shape(experts=2 * ranks, intermediate=3 * ranks)
    torch.manual_seed(0)
    full = random_experts(shape)
    for dtype in (torch.float32, torch.bfloat16):
        typed = {name: tensor.to(dtype) for name, tensor in full.items()}
        for target in Layout:
            blocks = expert_blocks(shape, ranks, target)
            source, expected = cut_experts(typed, other(target), ranks)[rank], cut_experts(typed, target, ranks)[rank]
            arrived = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
            transfer.move(blocks, source, arrived)
            assert all(torch.equal(arrived[name], expected[name]) for name in expected), (target, dtype)
            # Control: with one block written to the place beside its own, the comparison must fail.
            broken = list(blocks)
            at = next(i for i, block in enumerate(blocks) if block.destination == rank and block.tensor == "w2")
            moved = shifted(blocks[at].destination_index, expected["w2"].shape)
            broken[at] = blocks[at]._replace(destination_index=moved)
            arrived = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
            transfer.move(broken, source, arrived)
            assert not torch.equal(arrived["w2"], expected["w2"])


def shifted(index, shape) -> tuple:
    """The same-sized place next to `index` along the one dimension that it cuts."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    (cut,) = [dim for dim, part in enumerate(index) if part != slice(None)]
    size = index[cut].stop - index[cut].start
    start = (index[cut].start + size) % shape[cut]
    return tuple(slice(start, start + size) if dim == cut else part for dim, part in enumerate(index))


def move_kv(transfer, rank: int, case) -> None:
    for target in Layout:
        source, arrived = case.pools(other(target), True), case.pools(target, False)
        transfer.move(kv_blocks(case.shape, case.ranks, target, case.moves(rank)), source[rank], arrived[rank])
        local = case.pools(target, False)
        move_locally(kv_blocks(case.shape, case.ranks, target, case.moves()), source, local)
        for name in ("k", "v"):
            assert torch.equal(arrived[rank][name], local[rank][name])
            assert torch.equal(arrived[rank][name], case.pools(target, True)[rank][name])


def check_scratch_is_reused(transfer, rank: int, ranks: int) -> None:
    """After reserve, moves of that size and below take no new memory."""
    shape = model_shape(experts=2 * ranks, intermediate=3 * ranks)
    full = random_experts(shape)
    transfer.reserve(10_000, 10_000, torch.float32, "cpu")
    before = transfer._scratch[torch.float32].data_ptr()
    source, arrived = cut_experts(full, Layout.EP, ranks)[rank], cut_experts(full, Layout.TP, ranks)[rank]
    transfer.move(expert_blocks(shape, ranks, Layout.TP), source, arrived)
    assert transfer._scratch[torch.float32].data_ptr() == before


@pytest.mark.parametrize("ranks", [2, 4])
def test_collective_equals_local(ranks, tmp_path):
    run_ranks(run_rank, ranks, tmp_path, ranks)


def test_pick_says_which_and_why(tmp_path, caplog):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.INFO, logger="moebius_engine"):  # an engine of an earlier test has set its level
            assert isinstance(pick("auto", dist.group.WORLD), CollectiveTransfer)
            pick("collective", dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert [record.message for record in caplog.records if record.name == "moebius_engine.transfer"] == [
        "transfer: collective over gloo (the ranks share no device memory)",
        "transfer: collective over gloo (asked for)",
    ]
