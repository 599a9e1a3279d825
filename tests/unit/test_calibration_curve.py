"""Where two curves of step times cross, with noise and without."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.calibration.curve import Point, crossing, point

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


def points(at: float, sizes=SIZES, error: float = 0.0, noise: float = 0.0, seed: int = 0) -> list[Point]:
    """Steps of 10 ms in TP; in EP as long at `at` requests, and slower below by a power of the number."""
    draw = random.Random(seed)
    made = []
    for size in sizes:
        for layout, step_s in (("tp", 0.01), ("ep", 0.01 * (at / size) ** 0.3)):
            step_s *= math.exp(draw.gauss(0, noise))
            made.append(Point(layout=layout, requests=size, step_s=step_s, error_s=error * step_s, steps=24))
    return made


@given(st.floats(2.1, 250), st.floats(0, 0.2))
def test_without_noise_the_crossing_is_exact_and_within_its_interval(at, error):
    found = crossing(points(at, error=error))
    assert found.requests == pytest.approx(at, rel=1e-6)
    assert found.winner is None
    assert found.least is None or found.least <= found.requests
    assert found.most is None or found.most >= found.requests


@given(st.floats(3, 200), st.integers(0, 1000))
def test_noise_moves_the_crossing_by_little(at, seed):
    found = crossing(points(at, error=0.01, noise=0.01, seed=seed))
    assert found.requests == pytest.approx(at, rel=0.25)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    hits = 0
    for seed in range(400):
        found = crossing(points(40, error=0.02, noise=0.02, seed=seed))
        hits += (found.least or 0) <= 40 <= (found.most or math.inf)
    assert hits > 0.9 * 400


@pytest.mark.parametrize(("at", "winner"), [(1.0, "ep"), (10_000.0, "tp")])
def test_where_one_layout_is_faster_everywhere_it_wins(at, winner):
    found = crossing(points(at))
    assert (found.requests, found.winner) == (None, winner)


def test_a_size_measured_in_one_layout_only_does_not_count():
    lonely = Point(layout="ep", requests=1000, step_s=9.0, error_s=0.0, steps=24)
    assert crossing([*points(40), lonely]).requests == pytest.approx(40)


def test_too_few_sizes_are_refused():
    with pytest.raises(ValueError, match="1 numbers of requests were measured in both layouts: at least 2"):
        crossing(points(40, sizes=(8,)))


def test_one_slow_step_moves_a_point_by_nothing():
    steady = [0.010, 0.0101, 0.0099, 0.0100, 0.0102, 0.0098, 0.0100, 0.0100]
    spiked = [*steady[:-1], 5.0]
    assert point("ep", 8, spiked).step_s == pytest.approx(point("ep", 8, steady).step_s, rel=0.01)
    assert point("ep", 8, spiked).error_s < 0.0005
    with pytest.raises(ValueError, match="3 steps of 8 requests in ep: at least 4"):
        point("ep", 8, [0.1] * 3)
