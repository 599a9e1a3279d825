"""Whether peers can write into each other's memory here: found out with one small real transfer at start."""

import torch
import torch.distributed as dist

from moebius_engine.layout.plan import Block
from moebius_engine.memory.exportable import Memory
from moebius_engine.memory.peers import Peers
from moebius_engine.transfer.direct import DirectTransfer

PROBE_TAG = "probe"
_NUMEL = 1 << 14


def probe(memory: Memory, group: dist.ProcessGroup, timeout_s: float) -> tuple[DirectTransfer | None, str]:
    """Connect to the peers and exchange a few kilobytes with each. Collective.

    group: with a CPU back end, in rank order. timeout_s: deadline of every wait.

    Returns the transfer, or None if it does not work on every rank, and the reasons in words.
    """
    ranks = dist.get_world_size(group)
    transfer, refusal = None, ""
    try:
        area = memory.take(PROBE_TAG, (2, ranks, _NUMEL), torch.int32)
        transfer = DirectTransfer(Peers(memory, group, timeout_s), timeout_s)
        refusal = _exchange(transfer, area, group)
    except (RuntimeError, OSError) as error:  # the driver's, the sockets', a missed deadline: each a reason, none fatal
        refusal = f"{type(error).__name__}: {error}"
    told: list[str] = [""] * ranks
    dist.all_gather_object(told, refusal, group=group)
    refusals = [f"rank {number}: {why}" for number, why in enumerate(told) if why]
    if refusals:
        return None, "; ".join(refusals)
    return transfer, f"{ranks} ranks wrote into each other's memory"


def _exchange(transfer: DirectTransfer, area: torch.Tensor, group: dist.ProcessGroup) -> str:
    """Every rank sends every rank its own numbers. Returns what arrived wrong, in words."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    device, numbers = area.device, torch.arange(ranks * _NUMEL, dtype=torch.int32, device=area.device)
    area[0] = numbers.view(ranks, _NUMEL) + 1_000_003 * (rank + 1)
    area[1] = -1
    torch.cuda.synchronize(device)
    dist.barrier(group)  # before a peer writes, this rank has cleared its area
    blocks = [
        Block(
            source,
            destination,
            "probe",
            (slice(destination, destination + 1),),
            (slice(source, source + 1),),
            (1, _NUMEL),
        )
        for source in range(ranks)
        for destination in range(ranks)
    ]
    transfer.move(blocks, {"probe": area[0]}, {"probe": area[1]})
    transfer.finish()
    sent = numbers[rank * _NUMEL : (rank + 1) * _NUMEL]
    wrong = [peer for peer in range(ranks) if not torch.equal(area[1, peer], sent + 1_000_003 * (peer + 1))]
    return f"wrong bytes from ranks {wrong}" if wrong else ""
