"""What one rank of scripts/bench_transfer.py measures: milliseconds of every move, direct and staged, and what arrived.

Legend: E experts, P ranks, H hidden, I expert intermediate, L layers, T KV rows, K KV heads, D head dimension.
"""

import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moebius_engine.layout import Layout, other
from moebius_engine.layout.heads import holders_per_head, kv_heads_per_rank
from moebius_engine.layout.plan import Block, RowMove, expert_blocks, kv_blocks
from moebius_engine.layout.shape import ModelShape
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.memory.exportable import Memory, open_memory
from moebius_engine.memory.presets import PRESETS
from moebius_engine.transfer import pick
from moebius_engine.transfer.base import LayerMove, Transfer
from moebius_engine.transfer.collective import CollectiveTransfer

TIMEOUT_S = 60.0
WARM_UP = 2
Times = dict[str, list[float]]


class Sizes(NamedTuple):
    layers: int
    experts: int
    tokens: int  # live, over all ranks
    repeats: int
    nccl: bool

    def shape(self) -> ModelShape:
        """Qwen3-30B-A3B's, H 2048, I 768, K 4, D 128, but for the numbers of layers and experts."""
        changes = {"num_hidden_layers": self.layers, "num_experts": self.experts}
        return ModelShape.from_hf_config(PRESETS["Qwen3-30B-A3B"] | changes)


class Job(NamedTuple):
    """One switch of one kind of bytes."""

    blocks: list[Block]
    moves: list[LayerMove]


def run_rank(rank: int, ranks: int, store: str, sizes: Sizes, folder: str) -> None:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if sizes.nccl else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    result = measure(rank, ranks, sizes)
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.barrier(group=dist.new_group(backend="gloo"))
    os._exit(0)  # NCCL's own teardown can hang where ranks share a GPU


def measure(rank: int, ranks: int, sizes: Sizes) -> dict[str, Any]:
    cpu = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    memory = open_memory(torch.cuda.current_device())
    arena = filled_arena(rank, ranks, sizes, memory)
    jobs = {"weights": expert_jobs(arena), "kv": kv_jobs(arena, rank, sizes.tokens)}
    result: dict[str, Any] = {"times_ms": {}, "bytes": {what: moved(job, arena) for what, job in jobs.items()}}
    result["link_bytes"] = {what: to_peers(job, rank) for what, job in jobs.items()}
    direct = pick("direct", dist.group.WORLD, memory, cpu, TIMEOUT_S)
    began = time.perf_counter()
    for job in jobs["kv"].values():
        direct.prepare(*job)
    result["kv_plan_ms"] = 500 * (time.perf_counter() - began)
    for job in jobs["weights"].values():
        direct.prepare(*job)
    rivals: dict[str, Transfer] = {"direct": direct}
    if sizes.nccl:
        rivals["nccl"] = CollectiveTransfer(dist.group.WORLD)
    for name, transfer in rivals.items():
        for what, job in jobs.items():
            result["times_ms"][f"{name} {what}"] = times(transfer, job, sizes.repeats, cpu, chained=name == "direct")
    if sizes.nccl:
        for what, job in jobs.items():
            compare(rivals["direct"], rivals["nccl"], job, what)
    return result


def filled_arena(rank: int, ranks: int, sizes: Sizes, memory: Memory) -> Arena:
    """A rank's arena, of bytes of which no two neighbours or ranks are alike."""
    shape = sizes.shape()
    arena = Arena(shape, ranks, torch.bfloat16, "cuda", memory)
    heads, per_rank = shape.kv_heads, kv_heads_per_rank(shape.kv_heads, ranks)
    # Room for the live tokens in both layouts, and as much again, so that their slots are spread.
    arena.allocate_kv(max(2 * sizes.tokens // ranks, 2 * sizes.tokens * per_rank // heads) + 1, torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(rank)
    for layer in range(shape.layers):
        for view in (*arena.experts(Layout.EP, layer), *arena.kv(Layout.EP, layer)):
            view.view(torch.int16).random_(-(2**15), 2**15, generator=generator)
    return arena


def expert_jobs(arena: Arena) -> dict[Layout, Job]:
    def views(layout: Layout, layer: int) -> dict[str, torch.Tensor]:
        return dict(zip(("w13", "w2"), arena.experts(layout, layer), strict=True))

    return {
        target: Job(expert_blocks(arena.shape, arena.ranks, target), _moves(arena, target, views)) for target in Layout
    }


def kv_jobs(arena: Arena, rank: int, tokens: int) -> dict[Layout, Job]:
    """Every token at a random slot of its own, in both layouts: page size 1."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    owned = tokens // arena.ranks
    ep_rows, tp_rows = arena.kv_rows(Layout.EP), arena.kv_rows(Layout.TP)
    tp = (1 + torch.randperm(tp_rows - 1, generator=generator)[: owned * arena.ranks]).cuda().split(owned)
    ep = [(1 + torch.randperm(ep_rows - 1, generator=generator)[:owned]).cuda() for _ in range(arena.ranks)]
    moves = [RowMove(owner, owned, ep[owner], tp[owner]) for owner in range(arena.ranks)]

    def views(layout: Layout, layer: int) -> dict[str, torch.Tensor]:
        return dict(zip(("k", "v"), arena.kv(layout, layer), strict=True))

    return {
        target: Job(kv_blocks(arena.shape, arena.ranks, target, moves), _moves(arena, target, views))
        for target in Layout
    }


def _moves(arena: Arena, target: Layout, views) -> list[LayerMove]:
    return [
        LayerMove(layer, views(other(target), layer), views(target, layer))
        for layer in layer_order(target, arena.shape.layers)
    ]


def moved(job: dict[Layout, Job], arena: Arena) -> dict[str, int]:
    """Bytes read plus bytes written by all ranks, each byte read once though several ranks receive it."""
    holders = holders_per_head(arena.shape.kv_heads, arena.ranks)
    result = {}
    for target, (blocks, moves) in job.items():
        written = 2 * len(moves) * sum(block.numel for block in blocks)
        shared = holders if target == Layout.TP and blocks[0].tensor in ("k", "v") else 1
        result[target.value] = written + written // shared
    return result


def to_peers(job: dict[Layout, Job], rank: int) -> dict[str, int]:
    """Bytes that this rank writes to others, all layers, by the target layout."""
    return {
        target.value: 2 * len(moves) * sum(b.numel for b in blocks if b.source == rank != b.destination)
        for target, (blocks, moves) in job.items()
    }


def times(transfer: Transfer, jobs: dict[Layout, Job], repeats: int, cpu: dist.ProcessGroup, chained: bool) -> Times:
    """Milliseconds of each switch, by the device's clock. chained: without a host wait in between, which a transfer
    that ends in a fence allows: all ranks then start together."""
    marks: list[tuple[Layout, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(WARM_UP + repeats):
        for target in (Layout.TP, Layout.EP):
            if not chained:
                torch.cuda.synchronize()
                dist.barrier(group=cpu)
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            transfer.move_layers(*jobs[target])
            ended.record()
            marks.append((target, began, ended))
    transfer.finish()
    torch.cuda.synchronize()
    result: Times = {layout.value: [] for layout in Layout}
    for target, began, ended in marks[2 * WARM_UP :]:
        result[target.value].append(began.elapsed_time(ended))
    return result


def compare(direct: Transfer, staged: Transfer, jobs: dict[Layout, Job], what: str) -> None:
    """Raise RuntimeError unless both leave the same bytes in the first and last layer, and going back restores them."""
    rank = dist.get_rank()
    before, found = arrived(jobs[Layout.EP], rank), []
    for transfer in (direct, staged):
        transfer.move_layers(*jobs[Layout.TP])
        transfer.finish()
        found.append(arrived(jobs[Layout.TP], rank))
        transfer.move_layers(*jobs[Layout.EP])
        transfer.finish()
        if not same(arrived(jobs[Layout.EP], rank), before):
            raise RuntimeError(f"{what}: there and back by {type(transfer).__name__} changed bytes")
    if not same(*found):
        raise RuntimeError(f"{what}: direct and staged transfers differ")


def arrived(job: Job, rank: int) -> list[torch.Tensor]:
    """Copies of what the job leaves on a rank in the first and the last layer, as integers: bytes may be NaNs."""
    return [
        move.destination[block.tensor][block.destination_index].contiguous().view(torch.int16).clone()
        for move in (job.moves[0], job.moves[-1])
        for block in job.blocks
        if block.destination == rank
    ]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return bool(left) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
