"""Moves a rank's experts and KV from one layout into the other, all layers, by the transfer that works here."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout, other
from moebius_engine.layout.plan import Block, expert_blocks
from moebius_engine.layout.slots import layer_order
from moebius_engine.memory.arena import Arena
from moebius_engine.memory.exportable import Memory
from moebius_engine.memory.peers import wake_all
from moebius_engine.transfer import pick
from moebius_engine.transfer.base import Corrupted, LayerMove
from moebius_engine.transfer.checks import EVERY, Checks
from moebius_engine.transfer.faulty import FaultyTransfer
from moebius_engine.transfer.journal import Journal

EXPERTS, KV = ("w13", "w2"), ("k", "v")  # names of a layer's tensors, as blocks name them
Mark = Any  # seconds, or a CUDA event


class Mover:
    """arena: with its KV allocated. group: of all ranks, for a collective transfer; cpu_group: the same over gloo.

    Collective, and so are its methods. Raises what transfer.pick does.
    """

    def __init__(self, arena: Arena, group: dist.ProcessGroup, cpu_group: dist.ProcessGroup, config: SwitchConfig):
        self._arena, self._shape, self._cpu_group = arena, arena.shape, cpu_group
        self.transfer: Any = pick(config.transfer, group, arena.memory, cpu_group, config.timeout_s)
        if config.inject_faults:
            self.transfer = FaultyTransfer(self.transfer, dist.get_rank(cpu_group))
        w13_EIH, w2_EHI = arena.experts(Layout.EP, 0)
        experts = w13_EIH.numel() + w2_EHI.numel()
        # With fewer KV heads than ranks, an EP rank's head goes to several.
        kv = sum(view.numel() for view in arena.kv(Layout.EP, 0)) // self._shape.kv_heads
        most = max(experts, kv * max(self._shape.kv_heads, arena.ranks))
        self.transfer.reserve(experts, most, w13_EIH.dtype, w13_EIH.device)
        # The arena's views and the experts' blocks never change, so both and what a transfer derives are kept.
        self._expert_moves = {target: self._layer_moves(target, EXPERTS) for target in Layout}
        self._kv_moves = {target: self._layer_moves(target, KV) for target in Layout}
        self._experts = {target: expert_blocks(self._shape, arena.ranks, target) for target in Layout}
        for target, blocks in self._experts.items():
            self.transfer.prepare(blocks, self._expert_moves[target])
        self._checks = Checks(cpu_group, 1 if config.check_bytes else EVERY)
        self.journal = Journal()
        self._on_gpu = w13_EIH.is_cuda
        self._marks: list[tuple[str, Any]] = []
        self._checks_ms = 0.0

    def move_experts(self, target: Layout) -> int:
        """Begin to reshard every layer's experts into `target`. Returns: bytes that all ranks send, own shares
        included. Raises Corrupted on all ranks if a layer that was compared has not arrived as it was sent."""
        return self._move("weights", self._experts[target], self._expert_moves[target])

    def prepare_kv(self, blocks: Sequence[Block], target: Layout) -> None:
        """Build what move_kv with these very blocks needs. No other rank is asked."""
        if blocks:
            self.transfer.prepare(blocks, self._kv_moves[target], keep=False)

    def move_kv(self, blocks: Sequence[Block], target: Layout) -> int:
        """Begin to move the KV that `blocks` list (plan.kv_blocks) into `target`, after what was begun before. Returns
        and raises as move_experts."""
        if self._marks:
            self._marks.append(("metadata", self._mark()))
        return self._move("kv", blocks, self._kv_moves[target]) if blocks else 0

    def return_kv(self, blocks: Sequence[Block], source: Layout) -> None:
        """Bring back the layers of KV that the journal holds. blocks: all rows that live requests have in `source`."""
        if moves := self.journal.undo("kv", self._kv_moves[source]):
            self._move("kv", blocks, moves)

    def return_experts(self, source: Layout) -> None:
        """Bring back the layers of experts that the journal holds."""
        if moves := self.journal.undo("weights", self._expert_moves[source]):
            self._move("weights", self._experts[source], moves)

    def finish(self) -> dict[str, float]:
        """Wait until all that was begun has arrived. Returns: milliseconds of each move ("weights", "kv"), of the time
        between the two ("metadata"), and what comparing layers has taken of the moves ("checks").

        Raises TransferError if a rank failed; then the memory of both layouts is undefined.
        """
        self.transfer.finish()
        marks, self._marks = self._marks, []
        times = {name: _ms(before, mark) for (_, before), (name, mark) in itertools.pairwise(marks)}
        return times | {"checks": self._checks_ms}

    def spoil(self, kind: str, layer: int) -> None:
        """FaultyTransfer.arm: needs SwitchConfig(inject_faults=True)."""
        self.transfer.arm(kind, layer)

    def sleep(self, tags: Sequence[str]) -> None:
        """Give back the pages of the arena's memory that these tags name, on all ranks. Nothing may be moving."""
        # Peers that map this rank's memory must let go of it first.
        (self.transfer.peers or self._memory()).sleep(tags)

    def wake(self, tags: Sequence[str]) -> None:
        """Take pages for these tags again, of undefined content, at the same addresses.

        Raises MemoryError on all ranks if one of them has no room; then none has taken any.
        """
        if self.transfer.peers is not None:
            self.transfer.peers.wake(tags)
        else:
            wake_all(self._memory(), tags, self._cpu_group)

    def _memory(self) -> Memory:
        assert self._arena.memory is not None, "only a CUDA device has memory that sleeps"
        return self._arena.memory

    def _layer_moves(self, target: Layout, names: tuple[str, str]) -> list[LayerMove]:
        views = self._arena.experts if names == EXPERTS else self._arena.kv
        return [
            LayerMove(
                layer,
                dict(zip(names, views(other(target), layer), strict=True)),
                dict(zip(names, views(target, layer), strict=True)),
            )
            for layer in layer_order(target, self._shape.layers)
        ]

    def _move(self, what: str, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> int:
        if not self._marks:
            self._marks.append(("begin", self._mark()))
            self._checks_ms = 0.0
        due = [self._checks.next_is_due() for _ in moves]
        begun = 0
        for end, compared in enumerate(due, start=1):
            if compared or end == len(moves):
                self.transfer.move_layers(blocks, moves[begun:end])
                self.journal.write(what, moves[begun:end])
                begun = end
            if compared:
                self._compare(what, blocks, moves[end - 1])
        self._marks.append((what, self._mark()))
        size = next(iter(moves[0].source.values())).element_size()
        return len(moves) * size * sum(block.numel for block in blocks)

    def _compare(self, what: str, blocks: Sequence[Block], move: LayerMove) -> None:
        self.transfer.finish()
        began = time.perf_counter()
        try:
            self._checks.compare(blocks, move)
        except Corrupted:
            self.journal.strike(what, move)
            raise
        self._checks_ms += 1e3 * (time.perf_counter() - began)

    def _mark(self) -> Mark:
        """Now, in the order of what is moved: on a GPU that is when the stream comes here."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _ms(before: Mark, after: Mark) -> float:
    return 1e3 * (after - before) if isinstance(before, float) else before.elapsed_time(after)
