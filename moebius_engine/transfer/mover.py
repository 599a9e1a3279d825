"""Moves a rank's experts and KV from one layout into the other, all layers, by the transfer that works here."""

from collections.abc import Sequence

import torch.distributed as dist

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout, other
from moebius_engine.layout.plan import Block, expert_blocks
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.transfer import pick
from moebius_engine.transfer.base import LayerMove


class Mover:
    """arena: with its KV allocated. group: of all ranks, for a collective transfer; cpu_group: the same over gloo.

    Collective, and so are its methods. Raises what transfer.pick does.
    """

    def __init__(self, arena: Arena, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, config: SwitchConfig):
        self._arena, self._shape = arena, arena.shape
        self._transfer = pick(config.transfer, group, arena.memory, cpu_group, config.timeout_s)
        w13_EIH, w2_EHI = arena.experts(Layout.EP, 0)
        self._transfer.reserve(w13_EIH.numel() + w2_EHI.numel(), w13_EIH.dtype, w13_EIH.device)
        # The experts' blocks never change, so what a transfer derives from them is kept.
        self._experts = {target: expert_blocks(self._shape, arena.ranks, target) for target in Layout}
        for target, blocks in self._experts.items():
            self._transfer.prepare(blocks, self._expert_moves(target))

    def move_experts(self, target: Layout) -> int:
        """Reshard every layer's experts into `target`. Returns: bytes that all ranks have sent, own shares included.

        Raises TransferError if a rank failed; then the memory of both layouts is undefined.
        """
        return self._move(self._experts[target], self._expert_moves(target))

    def move_kv(self, blocks: Sequence[Block], target: Layout) -> int:
        """Move the KV that `blocks` list (plan.kv_blocks) into `target`. Returns and raises as move_experts."""
        if not blocks:
            return 0
        names = ("k", "v")
        moves = [
            LayerMove(
                layer,
                dict(zip(names, self._arena.kv(other(target), layer), strict=True)),
                dict(zip(names, self._arena.kv(target, layer), strict=True)),
            )
            for layer in layer_order(target, self._shape.layers)
        ]
        return self._move(blocks, moves)

    def _expert_moves(self, target: Layout) -> list[LayerMove]:
        names = ("w13", "w2")
        return [
            LayerMove(
                layer,
                dict(zip(names, self._arena.experts(other(target), layer), strict=True)),
                dict(zip(names, self._arena.experts(target, layer), strict=True)),
            )
            for layer in layer_order(target, self._shape.layers)
        ]

    def _move(self, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> int:
        self._transfer.move_layers(blocks, moves)
        self._transfer.finish()
        size = next(iter(moves[0].source.values())).element_size()
        return len(moves) * size * sum(block.numel for block in blocks)
