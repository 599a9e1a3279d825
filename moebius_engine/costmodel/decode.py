"""Seconds of one decode step in each layout, by part. Letters as in moebius_engine/layout; k is the model's top-k.

n requests are in flight, one token each, with c KV tokens on average. TP: every rank has all n. EP: the busiest rank
has m, n/P if they are balanced and at least 1. Time is the slowest rank's, so only one rank is counted. What is read
from HBM and what is computed overlap (the roofline: the larger of the two counts); parts follow one another.

Source of the terms: arXiv 2606.26607, section 2.1 (communication, and activation traffic per rank); the roofline is
S. Williams, A. Waterman, D. Patterson, Roofline, 2009.
"""

from typing import Literal, NamedTuple

from moebius_engine.costmodel.hardware import Achieved, Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.network import all_gather_s, all_reduce_s, all_to_all_s
from moebius_engine.layout import Layout
from moebius_engine.layout.heads import kv_heads_per_rank

Dispatch = Literal["deepep", "none"]


class StepParts(NamedTuple):
    """Seconds of one step, all layers."""

    attention: float  # weights of q, k, v, o and the router
    kv: float
    experts: float  # weights
    rows: float  # of routed tokens, read and written around the experts
    head: float
    network: float
    floor: float

    @property
    def total(self) -> float:
        return sum(self)


def step_parts(
    model: MoeModel,
    cluster: Cluster,
    achieved: Achieved,
    layout: Layout,
    requests: float,
    context: float,
    *,
    dispatch: Dispatch = "deepep",
    skew: float = 1.0,
    busiest: float | None = None,
) -> StepParts:
    """The parts of one step.

    dispatch: how EP's tokens reach their experts, by all-to-all ("deepep") or by gathering all of them on every rank
    ("none", SGLang's moe_a2a_backend). skew: tokens of the rank whose experts get most, over the mean. busiest: m.

    attention   EP reads all of q, k, v and o, H D (2Q + 2K) elements a layer; TP Q/P and K/P heads, each KV head at
                least once. 2 FLOP an element and token. The router's H E elements in both.
    kv          c 2 D elements a layer, request and KV head on the rank: m K in EP; n K/P in TP, n if K < P, because
                then P/K ranks hold the same head.
    experts     activated(n) experts (MoeModel) are read, 3 H I elements each. TP reads 1/P of each of them, EP all of
                those that are its own: of E/P experts the same share, so the same bytes. With skew EP's busiest rank
                reads that much more, at most E/P. n k / P rows, times skew in EP, of 6 H I FLOP.
    rows        a row of a routed token: H is read for w13 and 2 J written, 2 J read and J written by the activation, J
                read for w2 and H written, H read by the sum over k: 3 H + 6 J elements, J = I/P in TP and I in EP. TP
                has all n k rows on every rank, EP n k / P times skew. Times row_passes.
    head        1/P of the vocabulary in both layouts.
    network     a layer of TP: two all-reduces of n H. Of EP, "deepep": all-to-alls of m k H there and back, and
                dispatch_floor_s; "none": an all-gather of m H and a reduce-scatter to m H.
    floor       L layer_floor_s.
    """
    shape, size, ranks, tp = model.shape, model.itemsize, cluster.ranks, layout == Layout.TP
    layers, hidden, width = shape.layers, shape.hidden, shape.intermediate
    hbm, flops = cluster.gpu.hbm * achieved.hbm, cluster.gpu.flops * achieved.flops
    excess = 1.0 if tp else skew
    local = requests if tp else max(1.0, requests / ranks) if busiest is None else busiest
    q_heads, kv_heads = (
        (shape.q_heads / ranks, kv_heads_per_rank(shape.kv_heads, ranks)) if tp else (shape.q_heads, shape.kv_heads)
    )

    def roofline(elements: float, tokens: float) -> float:
        """Elements of weights, each multiplied with `tokens` tokens."""
        return max(elements * size / hbm, 2 * elements * tokens / flops)

    attention = hidden * shape.head_dim * (2 * q_heads + 2 * kv_heads) + hidden * shape.experts
    expert = 3 * hidden * width
    activated = min(1.0, model.activated_experts(requests) / shape.experts * excess) * shape.experts / ranks
    rows = requests * model.top_k if tp else requests * model.top_k / ranks * excess
    row = 3 * hidden + 6 * (width / ranks if tp else width)
    return StepParts(
        attention=layers * roofline(attention, local),
        kv=layers * local * context * 2 * kv_heads * shape.head_dim * size / hbm,
        experts=layers * max(
            activated * expert * size / hbm, requests * model.top_k / ranks * excess * 2 * expert / flops
        ),
        rows=layers * rows * row * size * achieved.row_passes / hbm,
        head=roofline(shape.vocab_size / ranks * hidden, requests),
        network=layers * _network_s(cluster, achieved, layout, dispatch, requests, local, model),
        floor=layers * achieved.layer_floor_s,
    )  # fmt: skip


def _network_s(
    cluster: Cluster,
    achieved: Achieved,
    layout: Layout,
    dispatch: Dispatch,
    requests: float,
    local: float,
    model: MoeModel,
) -> float:
    """Of one layer."""
    token = model.shape.hidden * model.itemsize
    if cluster.ranks == 1:
        return 0.0
    if layout == Layout.TP:
        return 2 * all_reduce_s(cluster, requests * token)
    if dispatch == "deepep":
        return 2 * all_to_all_s(cluster, local * model.top_k * token) + achieved.dispatch_floor_s
    return 2 * all_gather_s(cluster, local * token)
