"""What longer contexts do to steps: attention's part grows with the tokens, and the layouts cross elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.calibration.context import Longer, at_longer, curve, per_token, step_at
from moebius_engine.calibration.curve import Point, crossing
from moebius_engine.calibration.sizes import TOKENS, longer_batch
from moebius_engine.calibration.times import MeasuredTimes
from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.hardware import Cluster
from moebius_engine.layout import Layout
from tests.unit.test_costmodel_decode import FLOORS, LARGE
from tests.unit.test_verify import record

SHORT, LONG, SIZES, FEW = 1024, 8192, (8, 32, 128, 512, 1024), 128


def steps(costs: CostModel, sizes, context: int) -> tuple[Point, ...]:
    return tuple(
        Point(layout=layout.value, requests=n, step_s=costs.step_s(layout, n, context), error_s=1e-6, steps=24)
        for layout in Layout
        for n in sizes
    )


@pytest.fixture(scope="module")
def costs() -> CostModel:
    """Eight ranks and four KV heads: in TP two ranks hold each, so that contexts cost TP twice as much."""
    return CostModel(LARGE, Cluster.of("H200", 8), FLOORS)


def test_one_batch_of_longer_ones_gives_all_others(costs):
    points, longer = steps(costs, SIZES, SHORT), Longer(context=LONG, points=steps(costs, [FEW], LONG))
    added = per_token(points, SHORT, longer)
    assert added[Layout.TP] == pytest.approx(2 * added[Layout.EP], rel=0.01) and added[Layout.EP] > 0
    times = MeasuredTimes(points, [record()], SHORT, longer)
    for layout in Layout:
        for requests, context in ((8, 4096), (512, 4096), (128, 16384), (32, SHORT)):
            expected = costs.step_s(layout, requests, context)
            assert times.step_s(layout, requests, context) == pytest.approx(expected, rel=0.01)
    here, there = crossing(points).requests, crossing(at_longer(points, SHORT, longer)).requests
    assert there < here
    assert there == pytest.approx(crossing(steps(costs, SIZES, LONG)).requests, rel=0.01)


def test_without_them_context_plays_no_part(costs):
    points = steps(costs, SIZES, SHORT)
    assert per_token(points, SHORT, None) == {Layout.EP: 0.0, Layout.TP: 0.0}
    times = MeasuredTimes(points, [record()], SHORT)
    assert times.step_s(Layout.TP, 32, LONG) == times.step_s(Layout.TP, 32, 1) == step_at(curve(points, Layout.TP), 32)


def test_noise_never_makes_longer_contexts_faster(costs):
    points = steps(costs, SIZES, SHORT)
    longer = Longer(context=LONG, points=tuple(p.model_copy(update={"step_s": 1e-3}) for p in points))
    assert per_token(points, SHORT, longer) == {Layout.EP: 0.0, Layout.TP: 0.0}


@given(st.integers(1, 10_000), st.integers(1, 16), st.integers(1, 40_000), st.integers(1, 300_000))
def test_the_longer_batch_fits_where_the_largest_did(most, ranks, context, limit):
    batch = longer_batch(most, ranks, context, limit)
    if batch is None:
        assert most < 2 * ranks or 2 * context + TOKENS > limit
        return
    requests, tokens = batch
    assert requests % ranks == 0 and requests >= ranks
    assert requests * tokens <= most * context and context < tokens <= limit - TOKENS
