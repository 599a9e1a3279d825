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
    peers = Peers(memory, group, timeout_s)
    try:
        with peers.together():
            area = memory.take(PROBE_TAG, (2, peers.ranks, _NUMEL), torch.int32)
        transfer = DirectTransfer(peers, timeout_s)
        with peers.together():  # before a peer writes, this rank has cleared its area
            sent = _fill(area, peers.rank)
        with peers.together():
            _exchange(transfer, area, sent, peers.ranks)
    except RuntimeError as error:  # the driver's, the sockets', a missed deadline: each a reason, none fatal
        peers.disconnect()
        return None, str(error)
    return transfer, f"{peers.ranks} ranks wrote into each other's memory"


def _fill(area: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's numbers into the half that is read. Returns the part of all ranks that differs by rank only."""
    _, ranks, numel = area.shape
    numbers = torch.arange(ranks * numel, dtype=torch.int32, device=area.device).view(ranks, numel)
    area[0] = numbers + 1_000_003 * (rank + 1)
    area[1] = -1
    torch.cuda.synchronize(area.device)
    return numbers[rank]


def _exchange(transfer: DirectTransfer, area: torch.Tensor, sent: torch.Tensor, ranks: int) -> None:
    """Every rank sends every rank its own numbers. Raises RuntimeError if others arrive."""
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
    wrong = [peer for peer in range(ranks) if not torch.equal(area[1, peer], sent + 1_000_003 * (peer + 1))]
    if wrong:
        raise RuntimeError(f"wrong bytes from ranks {wrong}")
