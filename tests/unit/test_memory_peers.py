"""Peers connect on all ranks or on none, and a probe that fails on one of them fails at once on all.

A rank's memory stands in here, with descriptors of its own; tests/gpu has the real one.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist

from moebius_engine.memory import peers as peers_module
from moebius_engine.memory.peers import Peers
from moebius_engine.memory.segments import SegmentTable
from tests.unit.ranks import run_ranks

RANKS, TIMEOUT_S = 3, 120.0


class Memory:
    device, can_sleep = 0, True

    def __init__(self):
        self.table, self.mapped, self.broken = SegmentTable(1 << 20, 1 << 10), {}, ""

    def take(self, tag, shape, dtype):
        if self.broken == tag:
            raise RuntimeError(f"no memory for {tag}")
        self.table.add(tag, torch.Size(shape).numel() * dtype.itemsize)
        return torch.zeros(shape, dtype=dtype)

    def is_awake(self, segment) -> bool:
        return True

    def export(self, segment) -> int:
        if self.broken == "export":
            raise RuntimeError("refused to export")
        return os.memfd_create("segment")

    def open_peer(self, rank, segment, handle) -> None:
        os.close(handle)
        if self.broken == "map":
            raise RuntimeError(f"cannot map rank {rank}")
        self.mapped[rank, segment.number] = True

    def close_peer(self, rank, segment) -> None:
        self.mapped.pop((rank, segment.number), None)


def together_at() -> float:
    """Seconds at which all ranks are here: one may still have been importing."""
    dist.barrier()
    return time.monotonic()


def a_rank_that_cannot_map(rank: int) -> None:
    memory = Memory()
    memory.take("weights", (7,), torch.uint8)
    peers = Peers(memory, dist.group.WORLD, TIMEOUT_S)
    memory.broken, began = "map" if rank == 1 else "", together_at()
    with pytest.raises(RuntimeError, match=r"^rank 1: RuntimeError: cannot map rank [02]$"):
        peers.connect()
    assert time.monotonic() - began < TIMEOUT_S / 4
    assert bool(memory.mapped) == (rank != 1)
    peers.disconnect()
    assert not memory.mapped
    memory.broken = ""
    peers.connect()
    assert len(memory.mapped) == RANKS - 1


def a_rank_that_cannot_be_probed(rank: int) -> None:
    from moebius_engine.transfer import probe as module

    class NeverReached:
        def __init__(self, peers, timeout_s):
            raise AssertionError("a transfer was made")

    module.DirectTransfer, began = NeverReached, together_at()
    memory = Memory()
    memory.broken = "probe" if rank == 2 else ""
    found = module.probe(memory, dist.group.WORLD, TIMEOUT_S)
    assert found == (None, "rank 2: RuntimeError: no memory for probe")
    assert time.monotonic() - began < TIMEOUT_S / 4


def a_rank_whose_transfer_cannot_be_made(rank: int) -> None:
    """Its peers stayed mapped, so that sleep freed nothing, and the other ranks waited for it until the deadline."""
    from moebius_engine.transfer import probe as module

    class Connected:
        def __init__(self, peers, timeout_s):
            peers.connect()
            with peers.together():
                if rank == 0:
                    raise OSError("no compiler")

    module.DirectTransfer, memory = Connected, Memory()
    assert module.probe(memory, dist.group.WORLD, TIMEOUT_S) == (None, "rank 0: OSError: no compiler")
    assert not memory.mapped


def run_rank(rank: int) -> None:
    peers_module._gpu = lambda device: "one"
    a_rank_that_cannot_map(rank)
    a_rank_that_cannot_be_probed(rank)
    a_rank_whose_transfer_cannot_be_made(rank)


def test_all_ranks_or_none(tmp_path):
    run_ranks(run_rank, RANKS, tmp_path, timeout_s=TIMEOUT_S)
