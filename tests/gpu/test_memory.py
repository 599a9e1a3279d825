"""Exportable memory on a GPU: sleep frees pages, wake keeps addresses and graphs, peers see each other's memory."""

import pytest
import torch
import torch.distributed as dist

from moebius_engine.memory.ipc import IpcMemory
from moebius_engine.memory.peers import Peers
from moebius_engine.memory.views import tensor_at
from moebius_engine.memory.vmm import VmmMemory
from tests.gpu.ranks import TIMEOUT_S, run_ranks

pytestmark = pytest.mark.gpu
LARGE = 1 << 30  # bytes


def test_a_graph_replays_right_after_sleep_and_wake():
    memory = VmmMemory(0)
    weights = memory.take("weights", (LARGE // 4,), torch.float32)
    kept, out = memory.take("kv", (1024,), torch.float32), torch.zeros(1024, device="cuda")
    weights.fill_(1.0)
    kept.fill_(5.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(weights[-1024:] + kept)
    address, before = weights.data_ptr(), torch.cuda.mem_get_info()[0]
    memory.sleep(["weights"])
    memory.sleep(["weights"])  # twice is no error
    assert torch.cuda.mem_get_info()[0] - before >= LARGE
    assert torch.all(kept == 5.0)
    memory.wake(["weights"])
    assert torch.cuda.mem_get_info()[0] <= before + (1 << 21)
    weights.fill_(7.0)
    graph.replay()
    assert weights.data_ptr() == address
    assert torch.all(out == 12.0)
    with pytest.raises(ValueError, match=r"tags \['nothing'\] name no segment: there are \['kv', 'weights'\]"):
        memory.sleep(["nothing"])
    del graph
    memory.close()


def write_to_peers(rank: int, peers: Peers, own: torch.Tensor, round_: int) -> list[int]:
    """Every rank writes a number of its own into its row of every rank's tensor. Returns the peers' addresses."""
    own.fill_(-1)
    torch.cuda.synchronize()
    dist.barrier()
    addresses = [peers.address(peer, own.data_ptr()) for peer in range(peers.ranks)]
    for address in addresses:
        tensor_at(address, own.shape, own.dtype, peers.memory.device)[rank].fill_(100 * round_ + rank)
    torch.cuda.synchronize()
    dist.barrier()
    expected = 100 * round_ + torch.arange(peers.ranks, device="cuda").view(-1, 1)
    assert torch.equal(own, expected.expand_as(own).to(own.dtype))
    return addresses


def vmm_ranks(rank: int, ranks: int, memory) -> None:
    assert isinstance(memory, VmmMemory)
    numbers = memory.take("weights", (ranks, 1 << 20), torch.int32)
    kept = memory.take("kv", (ranks, 8), torch.int32)
    memory.take("weights", (LARGE,), torch.uint8)
    peers = Peers(memory, dist.group.WORLD, TIMEOUT_S)
    peers.connect()
    first = write_to_peers(rank, peers, numbers, 1)
    write_to_peers(rank, peers, kept, 2)
    for round_ in (3, 4):
        torch.cuda.synchronize()
        dist.barrier()
        before = torch.cuda.mem_get_info()[0]
        dist.barrier()
        peers.sleep(["weights"])
        dist.barrier()
        # Pages come back only when no rank maps them any more. What else a rank has is small beside them.
        assert torch.cuda.mem_get_info()[0] - before > LARGE - (1 << 26)
        dist.barrier()
        peers.wake(["weights"])
        assert write_to_peers(rank, peers, numbers, round_) == first
    expected = 200 + torch.arange(ranks, device="cuda").view(-1, 1)
    assert torch.equal(kept, expected.expand_as(kept).int()), "what stayed awake is untouched"
    late = memory.take("late", (ranks, 5), torch.int32)  # taken after the first exchange
    peers.connect()
    write_to_peers(rank, peers, late, 5)
    dist.barrier()
    peers.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_write_before_and_after_sleep(ranks, tmp_path):
    run_ranks(vmm_ranks, ranks, tmp_path)


def full_ranks(rank: int, ranks: int, memory) -> None:
    numbers = memory.take("weights", (ranks, 1 << 20), torch.int32)
    memory.take("weights", (LARGE,), torch.uint8)
    peers = Peers(memory, dist.group.WORLD, TIMEOUT_S)
    peers.connect()
    before = write_to_peers(rank, peers, numbers, 1)
    peers.sleep(["weights"])
    dist.barrier()
    if rank == 0:
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free - LARGE // 2, dtype=torch.uint8, device="cuda")
    dist.barrier()
    with pytest.raises(MemoryError, match=r"rank \d: allocate \d+ bytes for 'weights': CUDA_ERROR_OUT_OF_MEMORY"):
        peers.wake(["weights"])
    assert not any(memory.is_awake(segment) for segment in memory.table.tagged(["weights"]))
    if rank == 0:
        del taken
        torch.cuda.empty_cache()
    dist.barrier()
    peers.wake(["weights"])
    assert write_to_peers(rank, peers, numbers, 2) == before
    dist.barrier()
    peers.close()


def test_without_room_no_rank_wakes_and_later_all_do(tmp_path):
    run_ranks(full_ranks, 2, tmp_path)


def ipc_ranks(rank: int, ranks: int, _) -> None:
    memory = IpcMemory(torch.cuda.current_device())
    peers = Peers(memory, dist.group.WORLD, TIMEOUT_S)
    numbers = memory.take("weights", (ranks, 1000), torch.int32)
    other = memory.take("kv", (ranks, 7), torch.int32)
    peers.connect()
    write_to_peers(rank, peers, numbers, 1)
    write_to_peers(rank, peers, other, 2)
    with pytest.raises(RuntimeError, match=r"cannot free \['kv', 'weights'\]: .* run without sleep"):
        peers.sleep(["weights", "kv"])
    dist.barrier()
    peers.close()


def test_without_exportable_pages_cuda_ipc_serves_and_refuses_sleep(tmp_path):
    run_ranks(ipc_ranks, 2, tmp_path)


def unequal_ranks(rank: int, ranks: int, memory) -> None:
    memory.take("weights", (1 + rank * (1 << 21),), torch.uint8)
    peers = Peers(memory, dist.group.WORLD, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="has segments"):
        peers.connect()


def test_ranks_with_unequal_segments_are_refused(tmp_path):
    run_ranks(unequal_ranks, 2, tmp_path)
