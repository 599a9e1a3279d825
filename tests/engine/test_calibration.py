"""Calibration on a real engine: both layouts are timed with the numbers of requests that they say."""

import pytest

from moebius_engine.config import SwitchConfig

pytestmark = pytest.mark.timeout(300)


def test_both_layouts_are_timed_and_the_engine_is_as_before(engine):
    config = engine.config
    found = engine.calibrate(context=32, budget_s=20)
    sizes = {layout: sorted(p.requests for p in found.points if p.layout == layout) for layout in ("ep", "tp")}
    assert sizes["ep"] == sizes["tp"]
    assert sizes["ep"][:2] == [2, 4]
    assert all(p.step_s > p.error_s > 0 and p.steps >= 12 for p in found.points)
    assert (found.crossing.requests is None) != (found.crossing.winner is None)
    assert engine.config == config
    health = engine.health()
    assert (health["layout"], health["inflight"]) == ("ep", 0)


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
