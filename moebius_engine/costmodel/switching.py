"""Seconds of a switch: bytes of the transfer plans over the links, and the control plane.

Bytes come from moebius_engine/layout/plan.py, which the kernels read too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from moebius_engine.costmodel.hardware import Achieved, Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.layout import Layout
from moebius_engine.layout.plan import Block, RowMove, expert_blocks, kv_blocks

Pair = tuple[int, int]
"""Source rank, destination rank."""


class Linear(NamedTuple):
    """Seconds in any case, and for each request in flight."""

    base_s: float
    request_s: float

    def seconds(self, requests: float) -> float:
        return self.base_s + self.request_s * requests


@dataclass(frozen=True)
class Control:
    """Host work of a switch, by the layout that it goes to: beside, while weights move; after, when nothing moves.

    Measured with 2 ranks that share one H200, 32 and 512 requests, a prompt each: weights and what is not hidden behind
    them, 9.7 and 56.7 ms to TP, 6.4 and 26.9 to EP; decision and rest, 2.3 and 14.6 to TP, 2.7 and 6.8 to EP (a later
    run, benchmarks/switch_h200.json: 8.9, 54.7, 6.1, 26.0; 2.3, 15.0, 2.7, 8.5). Requests that share a prompt cost
    less, KV of 700,000 tokens costs 26 ms more to TP.
    """

    beside: Mapping[Layout, Linear] = field(
        default_factory=lambda: {Layout.TP: Linear(6.5e-3, 98e-6), Layout.EP: Linear(5.0e-3, 43e-6)}
    )
    after: Mapping[Layout, Linear] = field(
        default_factory=lambda: {Layout.TP: Linear(1.4e-3, 26e-6), Layout.EP: Linear(2.4e-3, 8.5e-6)}
    )


IN_A_ROW = Control(
    beside={layout: Linear(0.0, 0.0) for layout in Layout},
    after={Layout.TP: Linear(5.2e-3, 100e-6), Layout.EP: Linear(4.5e-3, 38e-6)},
)
"""Of an engine that moves weights only when the host has done its work. Measured with 2 ranks on one H200 before ours
let both go on together: 32 and 512 requests, 8.4 and 56.5 ms to TP, 5.7 and 24.1 to EP."""


class SwitchParts(NamedTuple):
    """Seconds of one switch. control: of the host's work, what does not go on beside the weights."""

    weights: float
    kv: float
    control: float

    @property
    def total(self) -> float:
        return sum(self)


def switch_parts(
    model: MoeModel,
    cluster: Cluster,
    achieved: Achieved,
    control: Control,
    target: Layout,
    requests: int,
    kv_tokens: float,
) -> SwitchParts:
    """requests, kv_tokens: in flight over all ranks; in EP each rank has 1/P of both.

    After each layer of weights, and once for the KV of all layers, all ranks meet: a fence, counted as the latency of a
    collective.
    """
    fence = 0.0 if cluster.ranks == 1 else (cluster.nic or cluster.gpu.nvlink).latency_s
    weights = _move_s(cluster, achieved, weight_bytes(model, cluster.ranks, target)) + model.shape.layers * fence
    kv = kv_bytes(model, cluster.ranks, target, kv_tokens)
    beside, after = (work[target].seconds(requests) for work in (control.beside, control.after))
    return SwitchParts(
        weights=weights,
        kv=_move_s(cluster, achieved, kv) + fence,
        control=max(0.0, beside - weights) + after,
    )


@lru_cache
def weight_bytes(model: MoeModel, ranks: int, target: Layout) -> Counter[Pair]:
    """Bytes of all layers' experts by pair of ranks, what stays on its rank included."""
    return _by_pair(expert_blocks(model.shape, ranks, target), model)


def kv_bytes(model: MoeModel, ranks: int, target: Layout, kv_tokens: float) -> Counter[Pair]:
    """Bytes of all layers' KV by pair of ranks; each EP rank holds an even part of the tokens."""
    total = round(kv_tokens)
    parts = [(rank + 1) * total // ranks - rank * total // ranks for rank in range(ranks)]
    moves = [RowMove(rank, tokens, None, None) for rank, tokens in enumerate(parts)]
    return _by_pair(kv_blocks(model.shape, ranks, target, moves), model)


def _by_pair(blocks: Iterable[Block], model: MoeModel) -> Counter[Pair]:
    """blocks: of one layer."""
    moved: Counter[Pair] = Counter()
    for block in blocks:
        moved[block.source, block.destination] += block.numel * model.itemsize * model.shape.layers
    return moved


def _move_s(cluster: Cluster, achieved: Achieved, moved: Mapping[Pair, int]) -> float:
    """The slowest rank's time. Its HBM reads what it sends and writes what it gets, once each (the paper's table 1,
    direct); its links carry what goes to or comes from other ranks. These overlap, so the slowest counts."""
    hbm: Counter[int] = Counter()
    links: dict[bool, Counter[tuple[int, str]]] = {True: Counter(), False: Counter()}  # same host or not
    for (source, destination), nbytes in moved.items():
        hbm[source] += nbytes
        hbm[destination] += nbytes
        if source != destination:
            near = source // cluster.per_host == destination // cluster.per_host
            links[near][source, "out"] += nbytes
            links[near][destination, "in"] += nbytes
    times = [max(hbm.values(), default=0) / (cluster.gpu.hbm * achieved.hbm)]
    for link, near in ((cluster.gpu.nvlink, True), (cluster.nic, False)):
        if link is not None:
            times.append(max(links[near].values(), default=0) / (link.bytes_per_s * link.direct))
    return max(times)
