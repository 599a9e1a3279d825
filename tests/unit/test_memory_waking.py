"""Memory wakes on all ranks or on none. A rank's memory stands in here; tests/gpu/test_memory.py has the real one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moebius_engine.memory.peers import wake_all


class Memory:
    def __init__(self, has_room: bool):
        self.has_room, self.awake = has_room, False

    def wake(self, tags) -> None:
        if not self.has_room:
            raise MemoryError(f"allocate 7 bytes for {tags}")
        self.awake = True

    def sleep(self, tags) -> None:
        self.awake = False


def run_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    memory = Memory(has_room=rank != 1)
    with pytest.raises(MemoryError, match=r"^rank 1: allocate 7 bytes for \['weights'\]$"):
        wake_all(memory, iter(["weights"]), dist.group.WORLD)
    assert not memory.awake
    memory.has_room = True
    wake_all(memory, ["weights"], dist.group.WORLD)
    assert memory.awake
    dist.destroy_process_group()


def test_without_room_on_one_rank_none_wakes_and_later_all_do(tmp_path):
    mp.spawn(run_rank, args=(str(tmp_path / "store"),), nprocs=3)
