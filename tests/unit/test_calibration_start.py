"""What an engine makes of a calibration: from a file or measured, and never against a threshold that is given."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from moebius_engine import async_calls
from moebius_engine.calibration import start
from moebius_engine.calibration.context import Longer
from moebius_engine.calibration.curve import Crossing, crossing
from moebius_engine.calibration.measure import Measured
from moebius_engine.calibration.start import calibrate_at_start, calibrated, in_words
from moebius_engine.calibration.store import Calibration, load, save
from moebius_engine.calibration.times import MeasuredTimes
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape
from tests.unit.test_calibration_curve import points
from tests.unit.test_verify import record

SHAPE = ModelShape("qwen3_moe", 4, 64, 64, 8, 4, 2, 16, 512)


class Engine:
    """What calibrate_at_start asks of an engine."""

    def __init__(self, **config):
        self.config, self.shape, self.ranks = SwitchConfig(**config), SHAPE, 2
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
        self.server_args = SimpleNamespace(
            model_path="m",
            attention_backend="triton",
            moe_a2a_backend="none",
            moe_runner_backend="auto",
            disable_cuda_graph=False,
        )
        self.measured, self.layout, self.calibration = 0, "ep", None

    async def async_set_policy(self, config, calibration=None):
        self.config, self.calibration = config, calibration

    async def async_switch(self, layout):
        self.layout = layout


@pytest.fixture
def measuring(monkeypatch):
    """Measuring finds the layouts crossing at 40 requests."""

    async def calibrate(engine):
        engine.measured += 1
        found = points(40)
        return Calibration(
            setting=start.setting_of(engine), points=tuple(found), crossing=crossing(found), switches=(), seconds=1.0
        )

    monkeypatch.setattr(start, "calibrate", calibrate)


async def test_measured_once_and_read_the_next_time(tmp_path, measuring):
    for measured in (1, 0):
        engine = Engine(calibrate="auto")
        await calibrate_at_start(engine, tmp_path)
        assert (engine.config.high, engine.measured) == (40, measured)
    other = Engine(calibrate="auto", share_gpu=True)  # on another machine, so to speak
    await calibrate_at_start(other, tmp_path)
    assert other.measured == 1
    other = Engine(calibrate="auto")
    other.server_args.disable_cuda_graph = True  # steps take several times as long
    await calibrate_at_start(other, tmp_path)
    assert other.measured == 1


@pytest.mark.parametrize(
    "config",
    [
        {"calibrate": "off"},
        {"calibrate": "auto", "threshold": 7},
        {"calibrate": "file", "threshold": 7},
        {"calibrate": "auto", "policy": "ep"},
    ],
)
async def test_what_the_user_says_wins(config, tmp_path, measuring):
    engine = Engine(**config)
    before = engine.config
    await calibrate_at_start(engine, tmp_path)
    assert (engine.config, engine.measured) == (before, 0)


async def test_a_file_that_is_asked_for_must_be_there_and_whole(tmp_path, measuring):
    engine = Engine(calibrate="file")
    missing = r"calibrate='file': .* does not exist; run `moebius-rollout calibrate --model m --ranks 2 --set .*=False`"
    with pytest.raises(ValueError, match=missing):
        await calibrate_at_start(engine, tmp_path)
    (tmp_path / start.setting_of(engine).name).write_text("{}")
    with pytest.raises(ValueError, match=r"is no calibration: Field required; remove it"):
        await calibrate_at_start(engine, tmp_path)


def calibration(found: Crossing) -> Calibration:
    return Calibration(
        setting=start.setting_of(Engine()), points=tuple(points(40)), crossing=found, switches=(), seconds=1.0
    )


def test_a_crossing_becomes_the_threshold_and_a_winner_stays():
    found = calibration(Crossing(requests=39.2, least=30.4, most=None, winner=None))
    assert calibrated(SwitchConfig(), found).high == 40
    assert calibrated(SwitchConfig(policy="interactive"), found).low == 32
    assert in_words(found) == (
        "calibration: EP is faster from 39 requests on (95 %: 30 to above 256), measured from 2 to 256 requests"
    )
    wins = calibration(Crossing(requests=None, least=None, most=None, winner="tp"))
    assert calibrated(SwitchConfig(policy="rollout"), wins).policy == "tp"
    assert "TP is faster at all numbers measured from 2 to 256 requests, so the engine stays in TP" in in_words(wins)


async def test_a_calibration_that_failed_is_tried_again(monkeypatch):
    tries = []

    async def fails_once(engine):
        tries.append(engine)
        await asyncio.sleep(0)
        if len(tries) == 1:
            raise TimeoutError("once")

    monkeypatch.setattr(async_calls, "calibrate_at_start", fails_once)
    engine = async_calls.AsyncCalls()
    engine.config, engine._calibration = SwitchConfig(calibrate="auto"), None
    both = await asyncio.gather(engine._calibrated(), engine._calibrated(), return_exceptions=True)
    assert [str(error) for error in both] == ["once", "once"] and len(tries) == 1
    for _ in range(2):
        await engine._calibrated()
        assert len(tries) == 2


async def test_a_winner_is_gone_to(tmp_path, monkeypatch):
    async def calibrate(engine):
        return calibration(Crossing(requests=None, least=None, most=None, winner="tp"))

    monkeypatch.setattr(start, "calibrate", calibrate)
    engine = Engine(calibrate="auto")
    await calibrate_at_start(engine, tmp_path)
    assert (engine.config.policy, engine.layout) == ("tp", "tp")


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_is_as_before_it_was_measured(fails, monkeypatch):
    async def measure(engine, context, budget_s):
        assert engine.config.policy == "ep"
        engine.layout = "ep"
        if fails:
            raise TimeoutError
        return Measured(points(40), fits=256, longer=None, switches=[], warm_up_s=1.0, seconds=2.0)

    monkeypatch.setattr(start, "measure", measure)
    engine = Engine(policy="tp")
    before, engine.layout, engine.calibration = engine.config, "tp", "earlier"
    try:
        found = await start.calibrate(engine)
        assert (found.fits, found.cut_at) == (256, None)
    except TimeoutError:
        assert fails
    assert (engine.config, engine.layout, engine.calibration) == (before, "tp", "earlier")


def test_numbers_that_there_was_no_time_for_are_left_to_ep():
    wins = calibration(Crossing(requests=None, least=None, most=None, winner="tp"))
    cut = wins.model_copy(update={"fits": 512})
    assert (calibrated(SwitchConfig(), cut).policy, calibrated(SwitchConfig(), cut).high) == ("rollout", 257)
    assert in_words(cut).endswith(
        "to 256 requests, and EP is taken to be above them, where there was no time to measure"
    )
    assert calibrated(SwitchConfig(), wins.model_copy(update={"fits": 256})).policy == "tp"
    ep = cut.model_copy(update={"crossing": Crossing(requests=None, least=None, most=None, winner="ep")})
    assert calibrated(SwitchConfig(), ep).policy == "ep" and in_words(ep).endswith("so the engine stays in EP")


def test_longer_contexts_are_said():
    """TP's steps are twice as long there at 32 requests, EP's as long as before: (40 / n)^0.3 = 1 + n / 32 at 13."""
    (tp,) = (p for p in points(40) if (p.layout, p.requests) == ("tp", 32))
    longer = Longer(context=8192, points=(tp.model_copy(update={"step_s": 2 * tp.step_s}),))
    crosses = calibration(Crossing(requests=39.2, least=30.4, most=None, winner=None))
    wins = calibration(Crossing(requests=None, least=None, most=None, winner="tp"))
    crosses, wins = (found.model_copy(update={"longer": longer}) for found in (crosses, wins))
    for found in (crosses, wins):
        assert in_words(found).endswith("256 requests; with 8,192 tokens a request instead of 1,024, EP from 13 on")
    # A layout that wins with short contexts only is not pinned.
    assert calibrated(SwitchConfig(), crosses).high == 40
    assert calibrated(SwitchConfig(), wins).high == 13
    level = longer.model_copy(update={"points": tuple(p for p in points(40) if p.requests == 32)})
    stays = wins.model_copy(update={"longer": level, "points": tuple(points(1000))})
    assert calibrated(SwitchConfig(), stays).policy == "tp"
    assert in_words(stays).endswith(
        "so the engine stays in TP; with 8,192 tokens a request instead of 1,024, TP at all"
    )


def test_a_file_reads_back(tmp_path):
    made = calibration(Crossing(requests=39.2, least=30.4, most=None, winner=None))
    assert load(made.setting, tmp_path) is None
    assert save(made, tmp_path) == tmp_path / made.setting.name
    assert load(made.setting, tmp_path) == made


async def test_payoff_needs_the_times_but_not_the_crossing(tmp_path, measuring):
    engine = Engine(calibrate="auto", threshold=7, payoff=True)
    await calibrate_at_start(engine, tmp_path)
    assert (engine.measured, engine.config.high, engine.config.payoff) == (1, 7, True)
    assert engine.calibration is not None


def test_times_are_those_measured_and_a_switchs_cost_follows_its_tokens():
    times = MeasuredTimes(points(40), [record(target="tp", kv_tokens=100, kv_ms=2.0, total_ms=10.0)], context=1024)
    assert times.step_s(Layout.TP, 40, 999.0) == pytest.approx(0.01)
    for requests in (2, 11, 256):
        assert times.step_s(Layout.EP, requests, 0.0) == pytest.approx(0.01 * (40 / requests) ** 0.3)
    assert times.step_s(Layout.EP, 10_000, 0.0) == times.step_s(Layout.EP, 256, 0.0)
    assert times.switch_s(Layout.TP, 8, 100) == pytest.approx(0.010)
    assert times.switch_s(Layout.EP, 8, 1100) == pytest.approx(0.030)  # none to EP was seen
    times.switched(record(target="ep", kv_tokens=100, kv_ms=0.0, total_ms=5.0))
    assert times.switch_s(Layout.EP, 8, 1100) == pytest.approx(0.005)
    with pytest.raises(ValueError, match="no switch was measured"):
        MeasuredTimes(points(40), [], context=1024)
    with pytest.raises(ValueError, match="no step of tp was measured"):
        MeasuredTimes([p for p in points(40) if p.layout == "ep"], [record()], context=1024)
