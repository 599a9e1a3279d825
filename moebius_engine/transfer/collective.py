"""Transfer by all-to-all: NCCL on GPUs, gloo on a CPU. Staged: one contiguous buffer out, one in."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from moebius_engine.layout.plan import Block
from moebius_engine.transfer.base import Tensors


class CollectiveTransfer:
    """group: process group of all ranks, in rank order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device | str) -> None:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.shape[1] < numel:
            self._scratch[dtype] = torch.empty(2, numel, dtype=dtype, device=device)

    def move(self, blocks: Sequence[Block], source: Tensors, destination: Tensors) -> None:
        outgoing = self._by_peer(blocks, sending=True)
        incoming = self._by_peer(blocks, sending=False)
        out_sizes = [sum(block.numel for block in peer) for peer in outgoing]
        in_sizes = [sum(block.numel for block in peer) for peer in incoming]
        sample = next(iter(source.values()))
        self.reserve(max(sum(out_sizes), sum(in_sizes)), sample.dtype, sample.device)
        out, into = self._scratch[sample.dtype]
        start = 0
        for block in (block for peer in outgoing for block in peer):
            out[start : start + block.numel].view(block.shape).copy_(source[block.tensor][block.source_index])
            start += block.numel
        dist.all_to_all_single(into[: sum(in_sizes)], out[: sum(out_sizes)], in_sizes, out_sizes, group=self._group)
        start = 0
        for block in (block for peer in incoming for block in peer):
            destination[block.tensor][block.destination_index] = into[start : start + block.numel].view(block.shape)
            start += block.numel

    def _by_peer(self, blocks: Sequence[Block], sending: bool) -> list[list[Block]]:
        """This rank's blocks by the rank at the other end, in the order of `blocks`, which both ends share."""
        peers: list[list[Block]] = [[] for _ in range(self._ranks)]
        for block in blocks:
            if sending and block.source == self._rank:
                peers[block.destination].append(block)
            elif not sending and block.destination == self._rank:
                peers[block.source].append(block)
        return peers
