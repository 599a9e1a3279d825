"""Real ranks for GPU tests: one process each, all on as many GPUs as there are."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moebius_engine.layout.plan import Block
from moebius_engine.memory.exportable import Memory, open_memory
from moebius_engine.memory.peers import Peers
from moebius_engine.transfer.base import Tensors
from moebius_engine.transfer.direct import DirectTransfer
from moebius_engine.transfer.local import move_locally

TIMEOUT_S = 60.0


def run_ranks(body: Callable, ranks: int, tmp_path: Path, *arguments) -> None:
    """Run body(rank, ranks, memory, *arguments) in `ranks` processes; raises what a rank raised."""
    mp.spawn(_run, args=(body, ranks, str(tmp_path / "store"), arguments), nprocs=ranks)


def _run(rank: int, body: Callable, ranks: int, store: str, arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        body(rank, ranks, open_memory(torch.cuda.current_device()), *arguments)
    except BaseException:
        # Let the others leave their waits by themselves: a process killed amid a kernel can take MPS down with it.
        traceback.print_exc()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def direct(memory: Memory, timeout_s: float = TIMEOUT_S) -> DirectTransfer:
    return DirectTransfer(Peers(memory, dist.group.WORLD, timeout_s), timeout_s)


def place(memory: Memory, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Copies of CPU tensors in the shared memory, at the same offset on every rank."""
    return {name: memory.take("test", tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in tensors.items()}


def check(
    transfer: DirectTransfer,
    memory: Memory,
    blocks: list[Block],
    sources: list[Tensors],
    blank: list[Tensors],
    carried_out: list[Block] | None = None,
) -> bool:
    """Move `sources` by `carried_out` (by `blocks` unless given) and say whether this rank holds what transfer/local.py
    leaves by `blocks`, byte for byte, untouched places included. sources, blank: one mapping a rank, on the CPU."""
    rank = transfer.peers.rank
    source, arrived = place(memory, sources[rank]), place(memory, blank[rank])
    transfer.peers.connect()
    transfer.move(blocks if carried_out is None else carried_out, source, arrived)
    transfer.finish()
    expected = [{name: tensor.clone() for name, tensor in each.items()} for each in blank]
    move_locally(blocks, sources, expected)
    return all(torch.equal(arrived[name].cpu(), tensor) for name, tensor in expected[rank].items())
