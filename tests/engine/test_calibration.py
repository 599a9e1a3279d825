"""Calibration on a real engine: both layouts are timed with the numbers of requests that they say."""

import asyncio
import time

import pytest

from moebius_engine.calibration import measure
from moebius_engine.calibration.curve import crossing
from moebius_engine.calibration.measure import _warm_up, sweep
from moebius_engine.calibration.start import setting_of
from moebius_engine.calibration.store import Calibration
from moebius_engine.config import SwitchConfig
from tests.unit.test_calibration_curve import points
from tests.unit.test_verify import record

pytestmark = pytest.mark.timeout(300)


def test_both_layouts_are_timed_and_the_engine_is_as_before(engine):
    config = engine.config
    found = engine.calibrate(context=32, budget_s=40)
    sizes = {layout: sorted(p.requests for p in found.points if p.layout == layout) for layout in ("ep", "tp")}
    assert sizes["ep"] == sizes["tp"]
    assert sizes["ep"][0] == 2 and {8, 16} <= set(sizes["ep"])
    assert all(p.step_s > p.error_s > 0 and p.steps >= 12 for p in found.points)
    assert (found.crossing.requests is None) != (found.crossing.winner is None)
    assert found.longer is not None and found.longer.context == 8 * 32
    assert sorted((p.layout, p.requests) for p in found.longer.points) == [("ep", 2), ("tp", 2)]
    assert len(found.switches) >= 2
    assert engine.config == config
    health = engine.health()
    assert (health["layout"], health["inflight"]) == ("ep", 0)


def test_kernels_compile_before_time_is_taken(engine, monkeypatch):
    """Seen on an H200: prefills of other numbers of tokens compiled kernels, 1 to 2 s each, throughout."""
    prompts = []
    answer = engine.async_generate_now

    async def generate(input_ids, **kwargs):
        if isinstance(input_ids[0], int):
            prompts.append(input_ids)
        return await answer(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(engine, "async_generate_now", generate)
    monkeypatch.setattr(engine.server_args, "device", "cuda")
    monkeypatch.setattr(engine.server_args, "chunked_prefill_size", 32)
    engine.loop.run_until_complete(_warm_up(engine, [2, 8], 16, longest=100))
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32]
    assert [len(ids) for ids in prompts] == 2 * sizes
    assert len({tuple(ids) for ids in prompts}) == len(prompts)
    health = engine.health()
    assert (health["layout"], health["inflight"]) == ("ep", 0)
    prompts.clear()
    engine.loop.run_until_complete(_warm_up(engine, [2, 8], 16, longest=5))
    assert [len(ids) for ids in prompts] == 2 * [1, 2, 3, 4, 5]


def test_a_sweep_ends_in_time(engine, monkeypatch):
    """Seen on an H200: 21 s of 20, since all numbers of requests were waited for that took longer in TP."""
    monkeypatch.setattr(measure, "time_for", lambda spent, growth: -100.0)  # so EP begins all
    found = engine.loop.run_until_complete(sweep(engine, [2, 4, 8], 32, until=time.monotonic()))
    assert [(p.layout, p.requests) for p in found.points if p.layout == "tp"] == [("tp", 8), ("tp", 4)]
    health = engine.health()
    assert (health["layout"], health["inflight"]) == ("ep", 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_count_wherever_the_requests_are(engine, rank):
    """Seen on a CPU: both of two requests came to rank 1, no step was counted, and calibration ended with an error."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 40}

    async def steps() -> list[tuple[str, int, int]]:
        await engine.async_step_times()
        batch = [
            engine.async_generate_now(input_ids=[7, n], sampling_params=sampling, routed_dp_rank=rank) for n in (8, 9)
        ]
        await asyncio.gather(*batch)
        return [(layout, requests, len(seen)) for layout, requests, seen in await engine.async_step_times()]

    counted = engine.loop.run_until_complete(steps())
    assert sum(seen for layout, requests, seen in counted if (layout, requests) == ("ep", 2)) > 20


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match="context=2040 and 240 more: a request may have 2048 tokens"):
        engine.calibrate(context=2040)
    with pytest.raises(ValueError, match="context=0: at least 1 token"):
        engine.calibrate(context=0)


def test_the_policy_can_be_set_anew(engine):
    before = engine.config
    engine.set_policy(SwitchConfig(policy="tp", timeout_s=1.0))
    assert (engine.config.policy, engine.config.timeout_s) == ("tp", before.timeout_s)
    engine.begin_step(1)
    assert engine.health()["layout"] == "tp"
    engine.set_policy(before)
    engine.switch("ep")
    assert engine.config == before


def known_times(engine, switch_ms: float) -> Calibration:
    """TP 10 ms a step up to 40 requests, EP 11 or more; a switch of `switch_ms`."""
    found = points(40)
    return Calibration(
        setting=setting_of(engine),
        points=tuple(found),
        crossing=crossing(found),
        switches=(record(target="tp", kv_tokens=100, kv_ms=0.0, total_ms=switch_ms),),
        seconds=1.0,
    )


@pytest.mark.parametrize(("switch_ms", "switches"), [(1e6, 0), (1e-3, 1)])
def test_a_switch_that_does_not_pay_is_left(engine, switch_ms, switches):
    before = engine.config
    lengths = [16] * 12 + [60, 70, 80, 90]
    sampling = [{"temperature": 0.0, "ignore_eos": True, "max_new_tokens": length} for length in lengths]
    config = SwitchConfig(policy="rollout", threshold=8, calibrate="auto", payoff=True)
    engine.set_policy(config, known_times(engine, switch_ms))
    try:
        engine.begin_step(3)
        engine.generate(input_ids=[[20 + row, 30, 31] for row in range(16)], sampling_params=sampling)
        trace = engine.end_step()
    finally:
        engine.set_policy(before)
    assert len(trace.switches) == switches, trace.estimates
    assert trace.declined == 0 if switches else trace.declined > 0
    for estimate in trace.estimates:
        assert estimate.pays == bool(switches)
        assert 0 < estimate.inflight <= 4 and estimate.cost_s == pytest.approx(switch_ms / 1e3)
        assert estimate.known >= estimate.running > 0 and estimate.gain_s > 0
