"""Decode steps: by hand, and how they change with requests, context and ranks."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.hardware import GPUS, LINKS, Achieved, Cluster, Gpu, Link
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.network import all_gather_s, all_reduce_s, all_to_all_s
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.budget import Sizes, budget
from moebius_engine.memory.presets import PRESETS

FLOORS = Achieved(layer_floor_s=100e-6, dispatch_floor_s=50e-6, row_passes=2.0)
PERFECT = Achieved(layer_floor_s=0.0, dispatch_floor_s=0.0, row_passes=1.0, hbm=1.0, flops=1.0)
LARGE = MoeModel.from_hf_config(PRESETS["Qwen3-235B-A22B"])
TINY = MoeModel(
    ModelShape(
        model_type="qwen3_moe",
        layers=2,
        hidden=100,
        intermediate=40,
        experts=4,
        q_heads=4,
        kv_heads=1,
        head_dim=10,
        vocab_size=1000,
    ),
    top_k=2,
)
# 1 byte a second each, so that seconds are bytes; no FLOP counts.
UNIT = Gpu("unit", 10**9, hbm=1.0, flops=1e30, nvlink=Link(1.0, latency_s=0.0, collective=1.0, direct=1.0))

layouts = st.sampled_from(list(Layout))


@st.composite
def any_costs(draw) -> CostModel:
    model = MoeModel.from_hf_config(PRESETS[draw(st.sampled_from(sorted(PRESETS)))])
    cluster = Cluster.of(
        draw(st.sampled_from(sorted(GPUS))), draw(st.sampled_from([2, 4, 8, 16])), draw(st.sampled_from(LINKS))
    )
    return CostModel(
        model, cluster, FLOORS, dispatch=draw(st.sampled_from(["deepep", "none"])), skew=draw(st.floats(1.0, 2.0))
    )


@given(any_costs(), layouts, st.floats(1, 4096), st.floats(1, 4096), st.floats(0, 30_000), st.floats(0, 30_000))
def test_more_requests_or_context_never_take_less(costs, layout, few, many, short, long):
    assume(few <= many and short <= long)
    assert costs.step_s(layout, few, short) <= costs.step_s(layout, many, short) * (1 + 1e-12)
    assert costs.step_s(layout, few, short) <= costs.step_s(layout, few, long) * (1 + 1e-12)


@given(st.sampled_from(sorted(PRESETS)), st.floats(1, 4096), st.floats(0, 30_000), st.sampled_from(["deepep", "none"]))
def test_one_rank_has_one_layout(name, requests, context, dispatch):
    costs = CostModel(MoeModel.from_hf_config(PRESETS[name]), Cluster.of("H200", 1), FLOORS, dispatch)
    ep, tp = (costs.step_parts(layout, requests, context) for layout in (Layout.EP, Layout.TP))
    assert tp == pytest.approx(ep)
    assert tp.network == 0


@given(any_costs(), st.floats(1, 4096), st.floats(0, 10_000))
def test_skew_costs_only_ep(costs, requests, context):
    even, skewed = replace(costs, skew=1.0), replace(costs, skew=min(2.0, costs.cluster.ranks))
    assert even.step_s(Layout.TP, requests, context) == skewed.step_s(Layout.TP, requests, context)
    assert even.step_s(Layout.EP, requests, context) <= skewed.step_s(Layout.EP, requests, context)


@given(st.floats(1, 5000))
def test_activated_experts_lie_between_the_top_k_and_all(tokens):
    assert LARGE.top_k - 1e-9 <= LARGE.activated_experts(tokens) <= LARGE.shape.experts
    assert LARGE.activated_experts(1) == pytest.approx(LARGE.top_k)


def test_a_step_of_tp_by_hand():
    """2 ranks, 4 requests with 3 KV tokens each, 2 bytes an element, 1 byte a second."""
    parts = CostModel(TINY, Cluster(UNIT, 2), PERFECT).step_parts(Layout.TP, 4, 3)
    assert parts.attention == 2 * (100 * 10 * (4 / 2 * 2 + 2 * 1) + 100 * 4) * 2
    assert parts.kv == 2 * 4 * 3 * 2 * 1 * 10 * 2  # K = 1 < P: a whole head on each rank
    activated = 4 * (1 - 0.5**4)
    assert parts.experts == pytest.approx(2 * activated / 2 * 3 * 100 * 40 * 2)
    assert parts.rows == pytest.approx(2 * 4 * 2 * (3 * 100 + 6 * 20) * 2)
    assert parts.head == 1000 / 2 * 100 * 2
    assert parts.network == pytest.approx(2 * 2 * (2 * 1 / 2 * 4 * 100 * 2))
    assert parts.floor == 0


def test_a_step_of_ep_by_hand():
    deepep, none = (
        CostModel(TINY, Cluster(UNIT, 2), PERFECT, dispatch).step_parts(Layout.EP, 4, 3)  # type: ignore[arg-type]
        for dispatch in ("deepep", "none")
    )
    assert deepep.attention == 2 * (100 * 10 * (4 * 2 + 2 * 1) + 100 * 4) * 2
    assert deepep.kv == 2 * 2 * 3 * 2 * 1 * 10 * 2
    assert deepep.experts == pytest.approx(2 * 4 * (1 - 0.5**4) / 2 * 3 * 100 * 40 * 2)
    assert deepep.rows == pytest.approx(2 * 4 * 2 / 2 * (3 * 100 + 6 * 40) * 2)
    assert deepep.network == pytest.approx(2 * 2 * (1 / 2 * 2 * 2 * 100 * 2))
    assert none.network == pytest.approx(2 * 2 * (1 * 2 * 100 * 2))
    assert none[:-2] == deepep[:-2]


def test_flops_count_where_they_are_the_limit():
    slow = replace(UNIT, flops=1.0)
    parts = CostModel(TINY, Cluster(slow, 2), PERFECT).step_parts(Layout.EP, 1000, 0)
    assert parts.experts == pytest.approx(2 * 1000 * 2 / 2 * 6 * 100 * 40)
    assert parts.attention == pytest.approx(2 * 2 * 500 * (100 * 10 * 10 + 400))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_weights_are_those_of_the_budget(ranks):
    """All experts are hit, so a step reads what a rank holds."""
    unit = CostModel(LARGE, Cluster(UNIT, ranks), PERFECT)
    sizes = Sizes(LARGE.shape, ranks, 1, 1, 4096, 40960, 2, 2)
    held = {component.key: component.nbytes for component in budget(sizes).components}
    router = LARGE.shape.layers * LARGE.shape.hidden * LARGE.shape.experts * 2
    for layout, attention in ((Layout.EP, "attention.ep"), (Layout.TP, "attention.tp")):
        parts = unit.step_parts(layout, 4096, 0)
        assert parts.attention - router == pytest.approx(held[attention])
        assert parts.experts == pytest.approx(held["experts.both"], rel=1e-3)  # which is rounded up to segments


def test_collectives_by_hand():
    """16 ranks on 2 hosts: NVLink of 10 and a NIC of 1 byte a second."""
    nvlink, nic = Link(10.0, 5.0, 1.0, 1.0), Link(1.0, 7.0, 0.5, 1.0)
    two = Cluster(replace(UNIT, nvlink=nvlink), 16, hosts=2, nic=nic)
    assert all_reduce_s(two, 80) == pytest.approx((5 + 2 * 7 / 8 * 80 / 10) + (7 + 2 * 1 / 2 * 10 / 0.5))
    assert all_gather_s(two, 80) == pytest.approx((5 + 7 * 2 * 80 / 10) + (7 + 80 / 0.5))
    assert all_to_all_s(two, 80) == pytest.approx(7 + 8 / 16 * 80 / 0.5)
    one = Cluster(two.gpu, 8)
    assert all_to_all_s(one, 80) == pytest.approx(5 + 7 / 8 * 80 / 10)


@given(st.sampled_from([2, 4, 8]), st.floats(1, 1e9))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks, nbytes):
    cluster = Cluster(UNIT, ranks)
    assert all_reduce_s(cluster, nbytes) == pytest.approx(2 * all_gather_s(cluster, nbytes / ranks))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster.of("H300", 8), "gpu='H300' is unknown"),
        (lambda: Cluster.of("H200", 8, "ethernet"), "link='ethernet' is unknown"),
        (lambda: Cluster.of("H200", 0), "ranks=0 must be at least 1"),
        (lambda: Cluster.of("H200", 0, "shared"), "ranks=0 must be at least 1"),
        (lambda: Cluster.of("H200", 3, "infiniband-ndr"), "hosts=2 must divide ranks=3"),
        (lambda: Cluster(UNIT, 4, hosts=2), "hosts=2: several hosts need a NIC"),
        (lambda: replace(PERFECT, hbm=1.5), "hbm=1.5 must be a share"),
        (lambda: replace(PERFECT, row_passes=0.5), "row_passes=0.5 must be at least 1"),
        (lambda: replace(TINY, top_k=5), "top_k=5 must lie between 1 and experts=4"),
        (lambda: MoeModel.from_hf_config({"torch_dtype": "int4"}), "dtype='int4' is unknown"),
        (lambda: MoeModel.from_hf_config({"torch_dtype": "bfloat16"}), "lacks num_experts_per_tok"),
        (lambda: CostModel(LARGE, Cluster.of("H200", 3), FLOORS), "ranks=3 does not divide experts=128"),
        (lambda: CostModel(LARGE, Cluster.of("H200", 8), FLOORS, "nccl"), "dispatch='nccl' is unknown"),  # type: ignore[arg-type]
        (lambda: CostModel(LARGE, Cluster.of("H200", 8), FLOORS, skew=9), "skew=9 must lie between 1 and ranks=8"),
        (
            lambda: CostModel(LARGE, Cluster.of("H200", 8), FLOORS).step_s(Layout.EP, 0, 1),
            "requests=0 must be at least 1",
        ),
        (
            lambda: CostModel(LARGE, Cluster.of("H200", 8), FLOORS).step_s(Layout.EP, 1, -1),
            "context=-1 must be at least 0",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
