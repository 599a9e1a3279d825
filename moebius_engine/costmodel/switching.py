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


@dataclass(frozen=True)
class Control:
    """Host work of a switch to a layout: seconds in any case, and for each request in flight.

    Measured with 2 ranks on one H200: metadata, decision and rest of 32 and of 512 requests, 8.4 and 56.5 ms to TP,
    5.7 and 24.1 ms to EP, on 2026-11-29. Since then part of it goes on beside the weights, which is not reckoned with.
    """

    base_s: Mapping[Layout, float] = field(default_factory=lambda: {Layout.TP: 5.2e-3, Layout.EP: 4.5e-3})
    request_s: Mapping[Layout, float] = field(default_factory=lambda: {Layout.TP: 100e-6, Layout.EP: 38e-6})

    def seconds(self, target: Layout, requests: float) -> float:
        return self.base_s[target] + self.request_s[target] * requests


class SwitchParts(NamedTuple):
    """Seconds of one switch."""

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
    weights = weight_bytes(model, cluster.ranks, target)
    kv = kv_bytes(model, cluster.ranks, target, kv_tokens)
    return SwitchParts(
        weights=_move_s(cluster, achieved, weights) + model.shape.layers * fence,
        kv=_move_s(cluster, achieved, kv) + fence,
        control=control.seconds(target, requests),
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
