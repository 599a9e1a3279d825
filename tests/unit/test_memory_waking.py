"""Memory wakes on all ranks or on none. A rank's memory stands in here; tests/gpu/test_memory.py has the real one."""

import pytest
import torch.distributed as dist

from moebius_engine.memory.peers import wake_all
from tests.unit.ranks import run_ranks


class Memory:
    def __init__(self, has_room: bool):
        self.has_room, self.awake = has_room, False

    def wake(self, tags) -> None:
        if not self.has_room:
            raise MemoryError(f"allocate 7 bytes for {tags}")
        self.awake = True

    def sleep(self, tags) -> None:
        self.awake = False


def run_rank(rank: int) -> None:
    memory = Memory(has_room=rank != 1)
    with pytest.raises(MemoryError, match=r"^rank 1: allocate 7 bytes for \['weights'\]$"):
        wake_all(memory, iter(["weights"]), dist.group.WORLD)
    assert not memory.awake
    memory.has_room = True
    wake_all(memory, ["weights"], dist.group.WORLD)
    assert memory.awake


def test_without_room_on_one_rank_none_wakes_and_later_all_do(tmp_path):
    run_ranks(run_rank, 3, tmp_path)
