"""Whether a switch pays: the estimate of the rest of a step, and what the policy makes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.switch.payoff import CumulativeHazard, Payoff

EP, TP = Layout.EP, Layout.TP


class Times:
    """TP saves `saves` seconds a step up to `crossing` requests, EP beyond. A switch takes a second."""

    def __init__(self, saves=0.01, crossing=100.0):
        self.saves, self.crossing = saves, crossing

    def step_s(self, layout, requests, context):
        return 0.05 - (self.saves if (layout == TP) == (requests < self.crossing) else 0.0)

    def switch_s(self, target, requests, kv_tokens):
        return 1.0


def judge(lengths, generated, *, cap=10_000, earlier=(), **times):
    payoff = Payoff(Times(**times))
    for step in (*earlier, lengths):
        payoff.begin_step()
        for length in step:
            payoff.finished(length)
    return payoff.estimate(EP, len(generated), generated, kv_tokens=100.0 * len(generated), cap=cap)


def test_a_short_rest_does_not_pay():
    """Of 100 responses between 600 and 700 tokens ten are left: they end within some thirty steps, at 0.01 s each."""
    estimate = judge(list(range(600, 690)), [690] * 10)
    assert not estimate.pays
    assert estimate.known == 90
    assert 5 < estimate.steps_left < 80
    assert estimate.gain_s == pytest.approx(0.01 * estimate.steps_left, rel=0.05)


def test_a_long_rest_pays():
    draw = np.random.default_rng(0)
    lengths = np.sort(np.clip(np.exp(7.3 + 0.83 * draw.standard_normal(512)), 1, 32_000).astype(int))
    done, left = lengths[:448].tolist(), lengths[448:]
    estimate = judge(done, [done[-1]] * len(left), cap=32_768)
    assert estimate.pays
    real = int(lengths[-1]) - done[-1]
    assert real / 3 < estimate.steps_left < 3 * real


def test_earlier_steps_say_what_this_one_cannot():
    """Nothing of this step has ended. The steps before ended within 20 tokens from here."""
    alone = judge([], [500] * 8)
    assert alone.known == 0 and alone.steps_left == pytest.approx(9500, rel=0.02)  # all run to the cap
    informed = judge([], [500] * 8, earlier=[[510] * 30 + [520] * 30])
    assert informed.known == 60 and informed.steps_left < 40
    assert not informed.pays


def test_too_little_knowledge_is_no_reason_against_a_switch():
    """At most 100 steps are left, of a millisecond each. Two responses of ten say little about the rest."""
    estimate = judge([100, 101], [101] * 8, cap=200, saves=0.001)
    assert estimate.gain_s < estimate.cost_s and estimate.pays
    assert not judge([100] * 8, [101] * 8, cap=200, saves=0.001).pays


def test_a_switch_waits_until_the_target_is_faster():
    estimate = judge(list(range(1, 800)), [800] * 150, crossing=100)
    assert estimate.gain_s > estimate.cost_s and estimate.faster_s < 0
    assert not estimate.pays


def test_lengths_are_forgotten_after_some_steps():
    payoff = Payoff(Times(), history=1)
    for length in (10, 20, 30):
        payoff.begin_step()
        payoff.finished(length)
    assert payoff.estimate(EP, 1, [5], 10.0, cap=100).known == 2


def test_the_cap_ends_all():
    estimate = judge([], [90] * 5, cap=100)
    assert estimate.steps_left == pytest.approx(10, abs=1)


@given(
    st.lists(st.integers(1, 300), max_size=40),
    st.lists(st.integers(0, 400), min_size=1, max_size=20),
    st.floats(-0.02, 0.04),
)
def test_the_gain_lies_within_its_bounds(lengths, generated, saves):
    estimate = judge(lengths, generated, cap=300, saves=saves)
    assert 0 <= estimate.steps_left <= 301
    assert abs(estimate.gain_s) <= abs(saves) * estimate.steps_left + 1e-9


@given(st.lists(st.integers(1, 200), max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_the_hazard_never_falls(lengths, running):
    hazard = CumulativeHazard(np.array(lengths, dtype=int), np.array(running, dtype=int))
    values = hazard(np.arange(0, 400))
    assert values[0] == 0 and (np.diff(values) >= 0).all() and np.isfinite(values).all()


def test_the_hazard_by_hand():
    """Lengths 2, 4 ended; one runs at 3. At risk at 2: three, at 4: one."""
    hazard = CumulativeHazard(np.array([2, 4]), np.array([3]))
    assert hazard(np.array([2, 4])) == pytest.approx([1 / 3, 1 / 3 + 1])
    # The two longest of three: one ended at 4, and one has come from 3 to 3. Their start is 3.
    assert hazard(np.array([8])) == pytest.approx([4 / 3 + np.log(2) / np.log(4 / 3)])
    hazard = CumulativeHazard(np.array([2, 4]), np.array([8]))
    # One runs beyond 4, so the two longest tell: one ended at 4, and the other has come to 8.
    assert hazard(np.array([4, 16])) == pytest.approx([1 / 3 + 1 / 2, 1 / 3 + 1 / 2 + np.log(4) / np.log(2)])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="history=-1"):
        Payoff(Times(), history=-1)
    with pytest.raises(ValueError, match="cap=0"):
        Payoff(Times()).estimate(EP, 1, [5], 10.0, cap=0)


def test_nothing_in_flight_is_refused():
    with pytest.raises(ValueError, match="inflight=0"):
        Payoff(Times()).estimate(EP, 0, [], 0.0, cap=10)
