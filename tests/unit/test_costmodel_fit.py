"""Crossing, fit, and the paper's numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.costmodel.costs import CostModel
from moebius_engine.costmodel.crossing import crossing
from moebius_engine.costmodel.fit import FREE, Observation, fit, step_observation
from moebius_engine.costmodel.hardware import Cluster
from moebius_engine.costmodel.paper import advantage, comparisons, paper_fit, tpot_s
from moebius_engine.layout import Layout
from tests.unit.test_costmodel_decode import FLOORS, LARGE, any_costs

COSTS = CostModel(LARGE, Cluster.of("H200", 8), FLOORS)
GRID = [(layout, n, c) for layout in Layout for n in (8, 64, 256, 1024) for c in (500, 4000)]


class Lines:
    """Step times that are straight lines of the requests: (at 0, per request) by layout."""

    def __init__(self, ep: tuple[float, float], tp: tuple[float, float]):
        self._lines = {Layout.EP: ep, Layout.TP: tp}

    def step_s(self, layout: Layout, requests: float, context: float) -> float:
        start, slope = self._lines[layout]
        return start + slope * requests

    def switch_s(self, target: Layout, requests: int, kv_tokens: float) -> float:
        return 0.0


@given(st.floats(1.5, 3900))
def test_crossing_of_two_lines(at):
    found = crossing(Lines(ep=(2.0 * at, 1.0), tp=(at, 2.0)), lambda _: 0.0, 4000)
    assert found.requests == pytest.approx(at, abs=1e-2)
    assert (found.below, found.above) == (Layout.TP, Layout.EP)


@pytest.mark.parametrize(("ep", "tp", "winner"), [((1, 1), (2, 2), Layout.EP), ((2, 2), (1, 1), Layout.TP)])
def test_no_crossing_names_the_winner(ep, tp, winner):
    found = crossing(Lines(ep, tp), lambda _: 0.0, 1000)
    assert (found.requests, found.below, found.above) == (None, winner, winner)


@given(any_costs(), st.floats(0, 10_000))
def test_crossing_is_that_of_a_grid_search(costs, context):
    found = crossing(costs, lambda _: context, 1024)
    grid = range(1, 1025)
    faster = [costs.step_s(Layout.EP, n, context) < costs.step_s(Layout.TP, n, context) for n in grid]
    changes = [n for n in grid[1:] if faster[n - 1] != faster[n - 2]]
    if found.requests is None:
        assert not changes
    else:
        assert changes[-1] - 1 <= found.requests + 1e-3 and found.requests - 1e-3 <= changes[-1]
        assert (found.above == Layout.EP) == faster[-1]


def test_context_may_depend_on_what_is_in_flight():
    seen = []
    crossing(COSTS, lambda requests: seen.append(requests) or 100.0, 64)
    assert min(seen) == 1 and max(seen) == 64


def test_crossing_needs_a_request():
    with pytest.raises(ValueError, match=r"most=0.5 must be at least 1"):
        crossing(COSTS, lambda _: 0.0, 0.5)


@given(st.floats(0, 5e-4), st.floats(0, 5e-4), st.floats(1, 4))
def test_a_fit_finds_what_the_points_were_made_with(layer, dispatch, passes):
    achieved = replace(FLOORS, layer_floor_s=layer, dispatch_floor_s=dispatch, row_passes=passes)
    made = replace(COSTS, achieved=achieved)
    points = [step_observation(layout, n, c, made.step_s(layout, n, c)) for layout, n, c in GRID]
    found = fit(COSTS, points)
    assert found.worst < 1e-4
    for name, (_, most, _) in FREE.items():
        assert getattr(found.costs.achieved, name) == pytest.approx(getattr(achieved, name), abs=1e-3 * most)


def test_a_fit_reports_its_error_at_each_point():
    draw = np.random.default_rng(0)
    points = [
        step_observation(layout, n, c, COSTS.step_s(layout, n, c) * draw.uniform(0.9, 1.1)) for layout, n, c in GRID
    ]
    found = fit(COSTS, points)
    assert [r.measured for r in found.residuals] == [p.measured for p in points]
    for residual, point in zip(found.residuals, points, strict=True):
        assert residual.predicted == point.predict(found.costs)
        assert residual.error == pytest.approx(residual.predicted / residual.measured - 1)
    assert 0 < found.worst < 0.2


@pytest.mark.parametrize(
    ("observations", "free", "message"),
    [
        ([step_observation(Layout.TP, 8, 0, 0.01)] * 2, tuple(FREE), "2 observations cannot give 3 parameters"),
        ([step_observation(Layout.TP, 8, 0, 0.01)] * 3, tuple(FREE), "dispatch_floor_s cannot be fitted"),
        ([Observation("nothing", 0.0, lambda costs: 1.0)], ("row_passes",), "nothing: measured=0 must be above 0"),
        ([step_observation(Layout.TP, 8, 0, 0.01)], ("hbm",), r"free=\['hbm'\] are unknown"),
    ],
)
def test_what_cannot_be_fitted_is_refused(observations, free, message):
    with pytest.raises(ValueError, match=message):
        fit(COSTS, observations, free)


def test_the_fit_to_the_paper():
    """Three numbers, three parameters within bounds: the errors that docs/costmodel.md states."""
    found = paper_fit()
    assert found.worst < 0.055
    assert tpot_s(found.costs, Layout.TP) == pytest.approx(0.037, rel=0.05)
    assert tpot_s(found.costs, Layout.EP) == pytest.approx(0.052, rel=0.05)
    assert advantage(found.costs, 128) > 1 > advantage(found.costs, 512)


def test_what_the_paper_did_not_fit_is_predicted_as_documented():
    rows = {row.figure: row for row in comparisons()}
    assert [row.fitted for row in rows.values()] == [True] * 3 + [False] * 6
    stated = {
        "TP's advantage at 8 requests, figure 2": -0.08,
        "EP's advantage at 2,048 requests, figure 2": 0.12,
        "weights of a switch [s], section 6.4": 0.0,
        "shortest switch [s], section 6.4": -0.05,
        "longest switch [s], section 6.4": -0.22,
        "memory overhead, section 6.6": -0.03,
    }
    for figure, error in stated.items():
        assert rows[figure].error == pytest.approx(error, abs=0.01), figure
