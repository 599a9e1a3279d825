"""Oracle, variants and replicas, on step times that are easy to follow."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from rollout.simulate.limits import Limits
from rollout.simulate.machine import Machine
from rollout.simulate.oracle import best_run
from rollout.simulate.replica import simulate
from rollout.simulate.strategies import STRATEGIES, play
from rollout.simulate.trace import burst_windows, bursty_trace, rollout_steps, step_of
from rollout.simulate.variants import LazyKv, PartialLayers
from tests.unit.simulate_reference import UNLIMITED, Linear

EP, TP = Layout.EP, Layout.TP
MACHINE = Machine("linear", 8, Linear(), UNLIMITED, dict.fromkeys(Layout, UNLIMITED))

lengths = st.lists(st.integers(1, 80), min_size=2, max_size=25)
times = st.builds(
    Linear, crossing=st.floats(1, 30), pause=st.floats(0, 2), pause_per_token=st.sampled_from([0.0, 1e-3])
)


@given(lengths, times)
def test_no_single_switch_beats_the_oracle(responses, times):
    trace = step_of("drawn", responses)
    best, threshold = best_run(trace, times, UNLIMITED)
    for other in range(1, len(responses) + 1):
        run = simulate(trace, times, SwitchConfig(threshold=other), UNLIMITED)
        assert best.seconds <= run.seconds * (1 + 1e-9)
    for layout in Layout:
        run = simulate(trace, times, SwitchConfig(policy=layout.value), UNLIMITED, layout)
        assert best.seconds <= run.seconds * (1 + 1e-9)
    assert 1 <= threshold <= len(responses) + 1


@given(lengths, st.integers(60, 400))
def test_the_oracle_keeps_to_what_tp_holds(responses, tokens):
    limits = Limits(30, dict.fromkeys(Layout, 1000), {EP: 10_000, TP: max(tokens, max(responses) + 5)})
    trace = step_of("drawn", responses, prompt=5)
    best, _ = best_run(trace, Linear(), limits)
    static = [simulate(trace, Linear(), SwitchConfig(policy=x.value), limits, x).seconds for x in Layout]
    assert best.seconds <= min(static)
    assert best.refused == 0


@settings(max_examples=30)
@given(st.lists(st.integers(1, 80), min_size=6, max_size=30), st.integers(1, 6), st.sampled_from(["ep", "rollout"]))
def test_replicas_are_independent(responses, replicas, strategy):
    """A replica runs as it would alone, whatever the others do, and together they produce every token."""
    trace = step_of("drawn", responses)
    parts = trace.split(replicas)
    runs = [play(strategy, MACHINE, [part], threshold=4)[0] for part in parts]
    changed = step_of("drawn", [n if i % replicas == 0 else 80 for i, n in enumerate(responses)])
    again = play(strategy, MACHINE, [changed.split(replicas)[0]], threshold=4)[0]
    assert again.finish_s == runs[0].finish_s
    assert sum(run.tokens for run in runs) == sum(responses)


def test_the_learned_threshold_follows_the_best_of_the_steps_before():
    traces = [step_of(str(i), list(range(1, 60)) + [400] * 5) for i in range(3)]
    best, threshold = best_run(traces[0], MACHINE.times, UNLIMITED)
    runs = play("learned", MACHINE, traces, threshold=50)
    assert runs[0].switches[0].inflight == 49
    assert [run.switches[0].inflight for run in runs[1:]] == [threshold - 1] * 2
    assert runs[1].seconds == pytest.approx(best.seconds)


def test_payoff_skips_what_the_threshold_switches():
    traces = [step_of(str(i), [*range(300, 330)]) for i in range(3)]
    plain, gated = (sum(r.seconds for r in play(name, MACHINE, traces, 8)) for name in ("rollout", "payoff"))
    assert gated < plain


def test_half_of_the_layers_lie_between():
    half = PartialLayers(Linear(), 0.5)
    for count in (2, 20):
        both = [Linear().step_s(layout, count, 10.0) for layout in Layout]
        assert half.step_s(TP, count, 10.0) == pytest.approx(sum(both) / 2)
    assert half.step_s(EP, 2, 10.0) == Linear().step_s(EP, 2, 10.0)
    assert half.switch_s(TP, 2, 1000) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="share=0"):
        PartialLayers(Linear(), 0)


def test_lazy_kv_hides_no_more_than_a_step():
    lazy = LazyKv(Linear())
    assert lazy.switch_s(TP, 0, 0) == pytest.approx(0.3)
    assert lazy.switch_s(TP, 1, 10) == pytest.approx(0.3)  # 1 ms of KV in a step of 22.5 ms
    assert lazy.switch_s(TP, 2, 1000) == pytest.approx(0.3 + 0.1 - Linear().step_s(TP, 2, 500))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_ends_a_step(strategy):
    run = play(strategy, MACHINE, [step_of("one", [3, 9, 40, 41, 200])], threshold=3)[0]
    assert run.tokens == 293


def test_a_server_begins_in_tp_and_the_oracle_is_for_steps():
    trace = bursty_trace()
    with pytest.raises(ValueError, match=r"oracle.*bursty"):
        play("oracle", MACHINE, [trace], threshold=256)
    with pytest.raises(ValueError, match=r"strategy='best'"):
        play("best", MACHINE, [trace], threshold=256)


def test_the_synthetic_steps_have_the_published_quantiles():
    steps = rollout_steps()
    pooled = sorted(length for step in steps for length in step.responses)
    assert len(pooled) == 18_432
    assert pooled[len(pooled) // 2] == pytest.approx(1510, rel=0.03)
    assert pooled[round(len(pooled) * 0.99)] == pytest.approx(10_386, rel=0.05)
    assert max(pooled) == 32_768
    assert rollout_steps(seed=0)[3].responses == steps[3].responses != rollout_steps(seed=1)[3].responses


def test_the_bursty_trace_is_the_published_one():
    trace = bursty_trace()
    assert len(trace.prompts) == pytest.approx(3107, rel=0.03)
    assert trace.arrivals_s[-1] == pytest.approx(322, abs=1)
    assert {min(trace.prompts) >= 300, max(trace.prompts) <= 700, min(trace.responses) >= 800} == {True}


def test_a_scaled_trace_keeps_the_shape_of_the_published_one():
    trace = bursty_trace(rate_scale=4, time_scale=0.5, length_scale=0.1)
    assert len(trace.prompts) == pytest.approx(2 * 3107, rel=0.03)
    assert trace.arrivals_s[-1] == pytest.approx(161, abs=1)
    assert (min(trace.prompts), max(trace.prompts), min(trace.responses), trace.cap) == (30, 70, 80, 120)
    (begin, end), _ = burst_windows(time_scale=0.5)
    assert sum(begin <= at < end for at in trace.arrivals_s) == pytest.approx(4 * 80 * (end - begin), rel=0.1)
    with pytest.raises(ValueError, match="time_scale=0"):
        bursty_trace(time_scale=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"responses": []}, "no requests"),
        ({"responses": [0]}, "responses of 0"),
        ({"responses": [5], "cap": 4}, "5 tokens, above cap=4"),
        ({"responses": [5], "prompt": 0}, "prompts of 0"),
    ],
)
def test_bad_traces_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        step_of("bad", **arguments)


def test_bad_splits_and_quantiles_are_refused():
    with pytest.raises(ValueError, match="replicas=3 for 2 requests"):
        step_of("two", [1, 2]).split(3)
    with pytest.raises(ValueError, match="median=10 and p99=10"):
        rollout_steps(median=10, p99=10)
