"""Switch costs: the bytes are those of the transfer plans, and the seconds those that were measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.hardware import Cluster
from moebius_engine.costmodel.moe import MoeModel
from moebius_engine.costmodel.paper import paper_fit
from moebius_engine.costmodel.switching import Control, Linear, kv_bytes, weight_bytes
from moebius_engine.layout import Layout, other
from moebius_engine.memory.budget import Sizes, budget, kv_token_bytes
from moebius_engine.memory.presets import PRESETS
from tests.unit.test_costmodel_decode import LARGE, PERFECT, UNIT

layouts = st.sampled_from(list(Layout))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_weights_that_move_are_all_experts(name, ranks):
    model = MoeModel.from_hf_config(PRESETS[name])
    shape = model.shape
    experts = 3 * shape.layers * shape.experts * shape.hidden * shape.intermediate * model.itemsize
    for target in Layout:
        moved = weight_bytes(model, ranks, target)
        assert moved.total() == experts
        assert set(moved.values()) == {experts // ranks**2}  # every pair of ranks the same
    sizes = Sizes(shape, ranks, 1, 1, 4096, 40960, 2, 2)
    held = next(c.nbytes for c in budget(sizes).components if c.key == "experts.both")
    assert held == pytest.approx(experts / ranks, rel=1e-3)  # rounded up to segments


@given(st.sampled_from([2, 4, 8, 16]), st.integers(0, 100_000))
def test_kv_that_moves_is_what_is_in_flight(ranks, tokens):
    """To TP each head goes to all its holders, to EP it comes once."""
    one = tokens * kv_token_bytes(LARGE.shape, LARGE.itemsize)
    copies = max(1, ranks // LARGE.shape.kv_heads)
    assert kv_bytes(LARGE, ranks, Layout.TP, tokens).total() == copies * one
    assert kv_bytes(LARGE, ranks, Layout.EP, tokens).total() == one


@given(layouts, st.integers(0, 4096), st.integers(0, 4096), st.floats(0, 1e6), st.floats(0, 1e6))
def test_more_to_move_never_takes_less(target, few, more, short, long):
    costs = CostModel(LARGE, Cluster.of("H200", 8), PERFECT)
    (few, more), (short, long) = sorted((few, more)), sorted((short, long))
    assert costs.switch_s(target, few, short) <= costs.switch_s(target, more, short)
    whole_token = 1e-6  # the plan deals out whole tokens, so one more can even out what the ranks move
    assert costs.switch_s(target, few, short) <= costs.switch_s(target, few, long) + whole_token


def test_weights_by_hand():
    """Memory and NVLink of 1 byte a second: each rank reads and writes all its bytes, and sends 7/8 of them."""
    rank = 94 * 16 * 3 * 4096 * 1536 * 2
    parts = CostModel(LARGE, Cluster(UNIT, 8), PERFECT).switch_parts(Layout.TP, 0, 0)
    assert parts.weights == pytest.approx(2 * rank)
    slow_link = Cluster.of("H200", 8)
    parts = CostModel(LARGE, slow_link, PERFECT).switch_parts(Layout.TP, 0, 0)
    assert parts.weights == pytest.approx(7 / 8 * rank / (450e9 * 0.80) + 94 * 19e-6)
    assert parts.kv == pytest.approx(19e-6)


def test_between_hosts_the_nic_is_the_limit():
    rank = 94 * 8 * 3 * 4096 * 1536 * 2
    parts = CostModel(LARGE, Cluster.of("H200", 16, "infiniband-ndr"), PERFECT).switch_parts(Layout.EP, 0, 0)
    assert parts.weights == pytest.approx(8 / 16 * rank / (50e9 * 0.92) + 94 * 19e-6)


# benchmarks/switch_h200.json: a prompt each, medians of 10; KV tokens are the mean of them.
MEASURED_MS = [
    (Layout.TP, 32, 20_131, 11.34),
    (Layout.EP, 32, 21_981, 9.22),
    (Layout.TP, 512, 138_240, 72.0),
    (Layout.EP, 512, 146_381, 36.6),
]
WEIGHTS_MS = 5.05  # of each


def qwen3_30b(layers: int, link: str) -> CostModel:
    """Of two ranks on H200s."""
    model = MoeModel.from_hf_config(PRESETS["Qwen3-30B-A3B"] | {"num_hidden_layers": layers})
    return CostModel(model, Cluster.of("H200", 2, link), paper_fit().costs.achieved)


@pytest.mark.parametrize(("target", "requests", "kv_tokens", "total_ms"), MEASURED_MS)
def test_measured_switches_on_one_shared_gpu(target, requests, kv_tokens, total_ms):
    """Total: with the decision, since no long decode step was running."""
    parts = qwen3_30b(8, "shared").switch_parts(target, requests, kv_tokens)
    assert parts.weights * 1e3 == pytest.approx(WEIGHTS_MS, rel=0.1)
    assert parts.total * 1e3 == pytest.approx(total_ms, rel=0.1)


# benchmarks/switch_2xh200.json: 128 requests, medians of four; KV tokens are the mean of them. Totals without
# decide_ms, which is the decode step that was running.
OVER_NVLINK_MS = [
    (Layout.TP, 175_968, 40.2, 12.1, 58.9),
    (Layout.TP, 373_696, 40.2, 27.3, 81.5),
    (Layout.EP, 374_720, 41.0, 25.5, 72.9),
    (Layout.EP, 693_632, 41.1, 47.0, 95.1),
]


@pytest.mark.parametrize(("target", "kv_tokens", "weights_ms", "kv_ms", "total_ms"), OVER_NVLINK_MS)
def test_measured_switches_over_nvlink(target, kv_tokens, weights_ms, kv_ms, total_ms):
    parts = qwen3_30b(48, "nvlink").switch_parts(target, 128, kv_tokens)
    assert parts.weights * 1e3 == pytest.approx(weights_ms, rel=0.04)
    assert parts.kv * 1e3 == pytest.approx(kv_ms, rel=0.08)
    assert parts.total * 1e3 == pytest.approx(total_ms, rel=0.13)


def test_host_work_beside_the_weights_shows_where_it_is_longer():
    one_s = Linear(1.0, 0.0)
    nothing, beside = ({layout: Linear(seconds, 0.0) for layout in Layout} for seconds in (0.0, 100.0))
    control = Control(beside=beside, after=dict.fromkeys(Layout, one_s))
    costs = CostModel(LARGE, Cluster.of("H200", 8), PERFECT, control=control)
    parts = costs.switch_parts(Layout.TP, 0, 0)
    assert parts.control == pytest.approx(100 - parts.weights + 1)
    assert replace(costs, control=replace(control, beside=nothing)).switch_parts(Layout.TP, 0, 0).control == 1


def test_both_ways_move_the_same_weights():
    for target in Layout:
        there, back = weight_bytes(LARGE, 8, target), weight_bytes(LARGE, 8, other(target))
        assert {(b, a): n for (a, b), n in there.items()} == dict(back)


def test_bad_arguments_are_refused():
    costs = CostModel(LARGE, Cluster.of("H200", 8), PERFECT)
    with pytest.raises(ValueError, match="requests=-1 and kv_tokens=5 must be at least 0"):
        costs.switch_s(Layout.TP, -1, 5)
