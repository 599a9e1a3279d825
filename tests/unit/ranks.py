"""Ranks of tests that need no engine: processes in one gloo group."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(work: Callable[..., None], ranks: int, folder: Path, *arguments, timeout_s: float = 60.0) -> None:
    """work(rank, *arguments) in each of so many processes, in the default group. Raises what one of them raises."""
    mp.spawn(_run, args=(work, ranks, str(folder / "store"), timeout_s, arguments), nprocs=ranks)


def _run(rank: int, work: Callable[..., None], ranks: int, store: str, timeout_s: float, arguments: tuple) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    work(rank, *arguments)
    # Seen once: "terminate called without an active exception" of a process that ended with gloo's threads.
    os._exit(0)
