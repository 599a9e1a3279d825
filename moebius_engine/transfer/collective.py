"""Transfer by all-to-all: NCCL on GPUs, gloo on a CPU. Staged, in rounds that fit the reserved scratch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from moebius_engine.layout.plan import Block
from moebius_engine.memory.peers import Peers
from moebius_engine.transfer.base import LayerMove, Tensors
from moebius_engine.transfer.order import check_order, extent
from moebius_engine.transfer.rounds import loads, rounds


class CollectiveTransfer:
    """group: process group of all ranks, in rank order."""

    peers: Peers | None = None

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, numel: int, most: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Scratch of `numel` elements in all, half to send and half to receive: one spare layer, not two. A move of
        more than fits goes in several rounds."""
        scratch = self._scratch.get(dtype)
        half = -(-numel // 2)
        if scratch is None or scratch.shape[1] < half:
            self._scratch[dtype] = torch.empty(2, half, dtype=dtype, device=device)

    def move(self, blocks: Sequence[Block], source: Tensors, destination: Tensors) -> None:
        """As Transfer says. `source` and `destination` may overlap in memory only if the move fits in one round; else
        it raises ValueError."""
        sample = next(iter(source.values()))
        if sample.dtype not in self._scratch:
            largest = max(loads(blocks, self._ranks))
            self.reserve(2 * max(1, largest), largest, sample.dtype, sample.device)
        out, into = self._scratch[sample.dtype]
        turns = rounds(blocks, self._ranks, len(out))
        if len(turns) > 1:
            check_order([extent(source[n]) for n in source], [extent(destination[n]) for n in source], len(source))
        for turn in turns:
            self._exchange(turn, source, destination, out, into)

    def _exchange(
        self, blocks: Sequence[Block], source: Tensors, destination: Tensors, out: torch.Tensor, into: torch.Tensor
    ) -> None:
        outgoing = self._by_peer(blocks, sending=True)
        incoming = self._by_peer(blocks, sending=False)
        out_sizes = [sum(block.numel for block in peer) for peer in outgoing]
        in_sizes = [sum(block.numel for block in peer) for peer in incoming]
        start = 0
        for block in (block for peer in outgoing for block in peer):
            out[start : start + block.numel].view(block.shape).copy_(source[block.tensor][block.source_index])
            start += block.numel
        dist.all_to_all_single(into[: sum(in_sizes)], out[: sum(out_sizes)], in_sizes, out_sizes, group=self._group)
        start = 0
        for block in (block for peer in incoming for block in peer):
            destination[block.tensor][block.destination_index] = into[start : start + block.numel].view(block.shape)
            start += block.numel

    def move_layers(self, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> None:
        for _, source, destination in moves:
            self.move(blocks, source, destination)

    def prepare(self, blocks: Sequence[Block], moves: Sequence[LayerMove], keep: bool = True) -> None:
        """Nothing can be computed ahead."""

    def finish(self) -> None:
        """Wait for the device; the process group's own timeout ends a wait for a lost rank."""
        if any(scratch.is_cuda for scratch in self._scratch.values()):
            torch.cuda.current_stream().synchronize()

    def _by_peer(self, blocks: Sequence[Block], sending: bool) -> list[list[Block]]:
        """This rank's blocks by the rank at the other end, in the order of `blocks`, which both ends share."""
        peers: list[list[Block]] = [[] for _ in range(self._ranks)]
        for block in blocks:
            if sending and block.source == self._rank:
                peers[block.destination].append(block)
            elif not sending and block.destination == self._rank:
                peers[block.source].append(block)
        return peers
