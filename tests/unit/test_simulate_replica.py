"""The simulated engine: equal to one that goes token by token, and to examples computed by hand."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from rollout.simulate.limits import Limits
from rollout.simulate.replica import MAX_JUMP, simulate
from rollout.simulate.trace import Trace, step_of
from tests.unit.simulate_reference import UNLIMITED, Linear, token_by_token

EP, TP = Layout.EP, Layout.TP


class Seconds:
    """A step or a prefill: 1 s in EP, 2 s in TP. A switch: 10 s."""

    def step_s(self, layout, requests, context):
        return 1.0 if layout == EP else 2.0

    def prefill_s(self, layout, tokens, requests=1):
        return 1.0 if layout == EP else 2.0

    def switch_s(self, target, requests, kv_tokens):
        return 10.0


@st.composite
def traces(draw):
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.floats(0, 1.5), min_size=count, max_size=count))
    arrivals = [0.0] * count if draw(st.booleans()) else [sum(gaps[: i + 1]) for i in range(count)]
    sizes = st.lists(st.integers(1, 30), min_size=count, max_size=count)
    responses = st.lists(st.integers(1, 60), min_size=count, max_size=count)
    return Trace("drawn", arrivals, draw(sizes), draw(responses), 60)


@st.composite
def configs(draw):
    policy = draw(st.sampled_from(["ep", "tp", "rollout", "interactive"]))
    return SwitchConfig(
        policy=policy,
        threshold=draw(st.integers(1, 12)),
        window=draw(st.integers(1, 5)),
        cooldown_s=draw(st.sampled_from([0.0, 0.7, 5.0])),
    )


@st.composite
def all_limits(draw):
    return Limits(
        running=draw(st.integers(1, 16)),
        prefill_tokens={EP: draw(st.integers(1, 120)), TP: draw(st.integers(1, 60))},
        kv_tokens={
            EP: draw(st.sampled_from([100, 300, sys.maxsize])),
            TP: draw(st.sampled_from([95, 150, sys.maxsize])),
        },
        reserve_tokens=draw(st.integers(0, 20)),
    )


@settings(max_examples=300)
@given(traces(), configs(), all_limits(), st.sampled_from(Layout))
def test_equals_token_by_token(trace, config, limits, start):
    fast = simulate(trace, Linear(), config, limits, start)
    slow = token_by_token(trace, Linear(), config, limits, start)
    count = len(trace.prompts)
    assert fast.seconds == pytest.approx(slow.seconds)
    assert fast.first_s == pytest.approx([slow.first_s[i] for i in range(count)])
    assert fast.finish_s == pytest.approx([slow.finish_s[i] for i in range(count)])
    assert [(s.target, s.inflight) for s in fast.switches] == [(target, n) for _, target, n in slow.switches]
    assert [s.t_s for s in fast.switches] == pytest.approx([t_s for t_s, _, _ in slow.switches])


@given(traces(), configs(), all_limits(), st.sampled_from(Layout))
def test_every_token_comes_once(trace, config, limits, start):
    run = simulate(trace, Linear(), config, limits, start)
    assert run.tokens == sum(trace.responses)
    assert all(
        arrival <= first <= finish <= run.seconds
        for arrival, first, finish in zip(trace.arrivals_s, run.first_s, run.finish_s, strict=True)
    )
    last = run.samples[-1]
    assert (last.running, last.waiting, last.kv_tokens) == (0, 0, 0)
    assert all(sample.kv_tokens <= limits.kv_tokens[sample.layout] for sample in run.samples)
    assert all(sample.running <= limits.running for sample in run.samples)


def test_by_hand():
    """Prefill 1 s; four tokens come by prefill and three steps. In TP from the second end on: 4 steps of 2 s."""
    trace = step_of("three", [4, 2, 8])
    assert simulate(trace, Seconds(), SwitchConfig(policy="ep"), UNLIMITED).finish_s == [4, 2, 8]
    assert simulate(trace, Seconds(), SwitchConfig(policy="tp"), UNLIMITED, TP).finish_s == [8, 4, 16]
    run = simulate(trace, Seconds(), SwitchConfig(threshold=2), UNLIMITED)
    assert run.finish_s == [4, 2, 4 + 10 + 4 * 2]
    assert [(s.t_s, s.target, s.inflight, s.kv_tokens, s.seconds) for s in run.switches] == [(4, TP, 1, 124, 10)]


def test_arrivals_wait_for_the_step_in_progress_and_for_a_place():
    trace = Trace("two", [0.0, 1.5], [5, 5], [4, 2], cap=4)
    together = simulate(trace, Seconds(), SwitchConfig(policy="ep"), UNLIMITED)
    # Prefill, a step, the other's prefill, two steps for both, of which the second request needs one.
    assert (together.first_s, together.finish_s) == ([1, 3], [5, 4])
    one = Limits(running=1, prefill_tokens=dict.fromkeys(Layout, 10))
    alone = simulate(trace, Seconds(), SwitchConfig(policy="ep"), one)
    assert (alone.first_s, alone.finish_s) == ([1, 5], [4, 6])


def test_a_full_cache_retracts_the_shortest():
    trace = Trace("full", [0, 0], [3, 3], [8, 7], 8)
    limits = Limits(2, dict.fromkeys(Layout, 100), dict.fromkeys(Layout, 16), reserve_tokens=0)
    run = simulate(trace, Seconds(), SwitchConfig(policy="ep"), limits)
    # At 8 + 8 tokens the second has 5 of its 7: the first one's last three steps, then a prefill and a step.
    assert run.retracted == 1
    assert run.finish_s == [8, 10]


def test_a_switch_whose_kv_does_not_fit_is_refused_and_asked_for_again():
    limits = Limits(3, dict.fromkeys(Layout, 100), {EP: 100, TP: 20}, reserve_tokens=0)
    trace = Trace("long", [0, 0, 0], [8, 8, 8], [3, 6, 12], 12)
    run = simulate(trace, Seconds(), SwitchConfig(threshold=3), limits)
    assert run.refused == 1  # two requests hold 22 tokens
    assert [(s.inflight, s.kv_tokens) for s in run.switches] == [(1, 14)]


def test_a_kink_in_the_step_time_costs_less_than_a_jump():
    class Kinked(Seconds):
        def step_s(self, layout, requests, context):
            return max(1.0, context / 1000)

    trace = step_of("long", [2500])
    fast = simulate(trace, Kinked(), SwitchConfig(policy="ep"), UNLIMITED)
    slow = token_by_token(trace, Kinked(), SwitchConfig(policy="ep"), UNLIMITED)
    assert fast.seconds == pytest.approx(slow.seconds, abs=MAX_JUMP**2 / 8 / 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"running": 0}, "running=0"),
        ({"prefill_tokens": {EP: 5}}, "prefill_tokens="),
        ({"kv_tokens": {EP: 5, TP: 0}}, "kv_tokens="),
        ({"reserve_tokens": -1}, "reserve_tokens=-1"),
    ],
)
def test_bad_limits_are_refused(change, message):
    good = {"running": 1, "prefill_tokens": {EP: 5, TP: 5}}
    with pytest.raises(ValueError, match=message):
        Limits(**good | change)


def test_a_request_that_fits_nowhere_is_refused():
    limits = Limits(3, dict.fromkeys(Layout, 100), {EP: 100, TP: 19})
    with pytest.raises(ValueError, match=r"a request of 20 tokens.*19"):
        simulate(step_of("big", [12], prompt=8), Seconds(), SwitchConfig(), limits)
