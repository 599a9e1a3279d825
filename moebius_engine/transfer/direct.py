"""Transfer by peer writes: each rank reads its own views and writes every destination rank's final place, with fences
across ranks on the device. No staging, no host round trip between layers."""

import ctypes
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from moebius_engine.layout.plan import Block
from moebius_engine.memory.peers import Peers
from moebius_engine.transfer.base import LayerMove, Tensors, TransferError
from moebius_engine.transfer.kernel import MOST_TENSORS, THREADS, TILE_UNITS, CopyKernel, Task
from moebius_engine.transfer.order import check_order, extent
from moebius_engine.transfer.plan_buffer import PlanBuffer
from moebius_engine.transfer.strips import Strip, strips, word_size
from moebius_engine.transfer.tables import STRIP, TILE, tables

FENCE_TAG = "fence"
_FENCE_BYTES, _MOST_PHASES, _POLL_S = 1 << 16, 4096, 2e-5


class _Plan(NamedTuple):
    blocks: Sequence[Block]
    views: list[tuple[int, int]]  # source and destination addresses, by phase
    tensors: list[str]
    word: int
    listed: bool  # rows are listed
    task: Task
    buffer: PlanBuffer
    strips: list[Strip]  # holds the rows that the kernel reads

    def covers(self, blocks: Sequence[Block], views: list[tuple[int, int]]) -> bool:
        """Whether it has these views, in a row: a part of the layers."""
        if self.blocks is not blocks or views[0] not in self.views:
            return False
        first = self.views.index(views[0])
        return self.views[first : first + len(views)] == views


class _Launch(NamedTuple):
    begun: int
    tensors: list[str]
    layers: list[int]


class DirectTransfer:
    """peers: connected or not; its memory gets one more segment, tagged FENCE_TAG, which must never sleep.
    timeout_s: deadline of every wait for a peer. sharing: ranks on this GPU, if not what `peers` found.

    Collective. Raises what Peers.connect does.
    """

    def __init__(self, peers: Peers, timeout_s: float, sharing: int | None = None):
        self.peers: Peers | None = peers
        self._peers, self._timeout_s, self._device = peers, timeout_s, peers.memory.device
        if peers.ranks > THREADS:
            raise ValueError(f"{peers.ranks} ranks: one thread watches each, and a block has {THREADS}")
        with peers.together():
            self._flags = peers.memory.take(FENCE_TAG, (_FENCE_BYTES // 8,), torch.int64)
            self._flags.zero_()
            torch.cuda.synchronize(self._device)
        peers.connect()
        with peers.together():
            self._kernel = CopyKernel(self._device, sharing or peers.sharing)
        where = f"cuda:{self._device}"
        self._arrived = torch.zeros(_MOST_PHASES, dtype=torch.int32, device=where)
        self._missed = torch.zeros(1, dtype=torch.int64, device=where)
        self._missed_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        flags = [peers.address(rank, self._flags.data_ptr()) + 8 * peers.rank for rank in range(peers.ranks)]
        self._peer_flags = torch.tensor(flags, dtype=torch.int64, device=where)
        self._begun = 0
        self._launches: list[_Launch] = []
        self._prepared: list[_Plan] = []
        self._buffer = PlanBuffer(1 << 16, self._device)
        self._latest: _Plan | None = None

    def reserve(self, numel: int, most: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Room for the tables of the largest move, at the narrowest words its dtype can need."""
        tiles = most // TILE_UNITS + 1 + 4 * self._peers.ranks**2
        phases = MOST_TENSORS * 256 * 8 * (1 + self._peers.ranks)
        self._grow(tiles * TILE.itemsize + 4 * self._peers.ranks**2 * STRIP.itemsize + phases)

    def prepare(self, blocks: Sequence[Block], moves: Sequence[LayerMove], keep: bool = True) -> None:
        if keep:
            self._prepared.append(self._build(blocks, moves, None))
        else:
            self._latest = self._build(blocks, moves, self._buffer)

    def move(self, blocks: Sequence[Block], source: Tensors, destination: Tensors) -> None:
        self.move_layers(blocks, [LayerMove(len(self._launches), source, destination)])

    def move_layers(self, blocks: Sequence[Block], moves: Sequence[LayerMove]) -> None:
        """As Transfer says; the rows that blocks list must not change until finish()."""
        views = _views(moves, _tensors(blocks, moves))
        if not views:
            return  # no rank has a block
        plan = next((plan for plan in (*self._prepared, self._latest) if plan and plan.covers(blocks, views)), None)
        if plan is None:
            plan = self._latest = self._build(blocks, moves, self._buffer)
        task = Task.from_buffer_copy(plan.task)
        task.bases += plan.views.index(views[0]) * (1 + task.ranks) * ctypes.sizeof(ctypes.c_uint64)
        task.phases, task.begun = len(views), self._begun + 1  # one phase for entering
        self._launches.append(_Launch(task.begun, plan.tensors, [move.layer for move in moves]))
        self._begun = task.begun + task.phases
        self._kernel.launch(plan.word, plan.listed, task, torch.cuda.current_stream(self._device).cuda_stream)

    def finish(self) -> None:
        self._missed_host.copy_(self._missed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        # The device gives up by itself after timeout_s; this is for a device that does not answer at all.
        deadline = time.monotonic() + 2 * self._timeout_s + 10
        while not done.query():
            if time.monotonic() > deadline:
                raise TransferError(f"rank {self._peers.rank}: the GPU did not finish within {2 * self._timeout_s} s")
            time.sleep(_POLL_S)
        if missed := int(self._missed_host):
            raise TransferError(self._describe(missed))
        self._launches.clear()
        self._latest = None  # what it held for the kernel

    def _describe(self, missed: int) -> str:
        rank, flag = (missed >> 48) - 1, missed & (1 << 48) - 1  # as copy.cu writes them
        what = "what came before"
        for launch in self._launches:
            phase = flag - launch.begun
            if phase == -1:
                what = f"entering the move of layers {launch.layers}"
            if 0 <= phase < len(launch.layers) * len(launch.tensors):
                layer, tensor = divmod(phase, len(launch.tensors))
                what = f"{launch.tensors[tensor]} of layer {launch.layers[layer]}"
        return f"rank {self._peers.rank}: rank {rank} did not finish {what} within {self._timeout_s} s"

    def _build(self, blocks: Sequence[Block], moves: Sequence[LayerMove], buffer: PlanBuffer | None) -> _Plan:
        tensors = _tensors(blocks, moves)
        views = _views(moves, tensors)
        if len(tensors) > MOST_TENSORS or len(views) > _MOST_PHASES:
            raise ValueError(
                f"{len(tensors)} tensors and {len(views)} phases: at most {MOST_TENSORS} and {_MOST_PHASES}"
            )
        read = [extent(move.source[name]) for move in moves for name in tensors]
        written = [extent(move.destination[name]) for move in moves for name in tensors]
        check_order(read, written, len(tensors))
        own = strips(blocks, self._peers.rank, moves[0].source, moves[0].destination)
        for strip in own:
            for rows in (strip.source_rows, strip.destination_rows):
                if rows is not None and rows.device.index != self._device:
                    raise ValueError(f"rows of {strip.tensor} are on {rows.device}, not on cuda:{self._device}")
        word = word_size(own, [address for pair in views for address in pair])
        made = tables(own, tensors, self._peers.rank, self._peers.ranks, word, TILE_UNITS)
        bases = np.array(
            [[source, *(self._peers.address(r, to) for r in range(self._peers.ranks))] for source, to in views],
            np.uint64,
        )
        parts = [made.strips, made.tiles, bases]
        if buffer is None:
            buffer = PlanBuffer(PlanBuffer.size_of(parts), self._device)
        elif PlanBuffer.size_of(parts) > buffer.nbytes:
            buffer = self._grow(PlanBuffer.size_of(parts))
        task = Task(*buffer.fill(parts), *(t.data_ptr() for t in (self._peer_flags, self._flags, self._arrived)))
        task.missed, task.timeout_ns = self._missed.data_ptr(), int(self._timeout_s * 1e9)
        task.phases, task.tensors, task.distance = len(views), len(tensors), len(tensors)
        task.ranks = self._peers.ranks
        for i, count in enumerate(made.counts):
            task.first_tile[i], task.tiles_of[i] = sum(made.counts[:i]), count
        listed = any(strip.source_rows is not None or strip.destination_rows is not None for strip in own)
        return _Plan(blocks, views, tensors, word, listed, task, buffer, own)

    def _grow(self, nbytes: int) -> PlanBuffer:
        if nbytes > self._buffer.nbytes:
            self._buffer = PlanBuffer(nbytes, self._device)
        return self._buffer


def _tensors(blocks: Sequence[Block], moves: Sequence[LayerMove]) -> list[str]:
    """Names of the tensors that the blocks move, in the order of the views: the same on every rank."""
    named = {block.tensor for block in blocks}
    return [name for name in moves[0].source if name in named]


def _views(moves: Sequence[LayerMove], tensors: Sequence[str]) -> list[tuple[int, int]]:
    return [(move.source[name].data_ptr(), move.destination[name].data_ptr()) for move in moves for name in tensors]
