"""`moebius-rollout calibrate` around an engine that stands in: what is printed, drawn and kept."""

import json

import pytest
from typer.testing import CliRunner

from moebius_engine.calibration import start
from moebius_engine.calibration.context import Longer
from moebius_engine.calibration.curve import crossing
from moebius_engine.calibration.store import Calibration, load
from rollout import calibrate_cli
from rollout.cli import app
from tests.unit.test_calibration_curve import points
from tests.unit.test_calibration_start import Engine

ASKED: dict = {}


def calibration(at: float) -> Calibration:
    found = tuple(points(at, error=0.02))
    longer = Longer(context=8192, points=tuple(p for p in found if p.requests == 32))
    return Calibration(
        setting=start.setting_of(Engine()),
        points=found,
        longer=longer,
        crossing=crossing(found),
        switches=(),
        seconds=3.0,
    )


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    def measure(model, ranks, context, budget_s, share_gpu, arguments):
        ASKED.update(ranks=ranks, context=context, budget_s=budget_s, arguments=arguments)
        return calibration(40)

    monkeypatch.setattr(calibrate_cli, "measure", measure)


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["calibrate", *arguments])


def test_it_prints_the_curve_draws_it_and_keeps_it(tmp_path):
    png = tmp_path / "curve.png"
    result = run("--model", "m", "--folder", str(tmp_path), "--plot", str(png), "--set", "max_running_requests=64")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["requests", "tokens", "each", "EP", "step,", "ms", "TP", "step,", "ms", "EP", "/", "TP"]
    assert [int(line.split()[0]) for line in lines[1:9]] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert [line.split()[:2] for line in lines[8:10]] == [["256", "1,024"], ["32", "8,192"]]
    assert "calibration: EP is faster from 40 requests on (95 %:" in result.stdout
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert load(start.setting_of(Engine()), tmp_path) == calibration(40)
    assert ASKED == {"ranks": 2, "context": 1024, "budget_s": 20.0, "arguments": {"max_running_requests": 64}}


def test_json_is_the_file(tmp_path):
    result = run("--model", "m", "--folder", str(tmp_path), "--json")
    (kept,) = tmp_path.glob("*.json")
    assert json.loads(result.stdout) == json.loads(kept.read_text())


def test_without_a_crossing_the_picture_has_none(tmp_path):
    calibrate_cli.save_curves(calibration(10_000), tmp_path / "tp_wins.png")
    assert (tmp_path / "tp_wins.png").stat().st_size > 10_000


def test_a_bad_argument_is_named():
    result = run("--model", "m", "--set", "max_running_requests")
    assert (result.exit_code, result.stderr) == (2, "Error: --set 'max_running_requests': give argument=value\n")


@pytest.mark.parametrize("option", ["--context", "--budget-s"])
def test_a_number_that_is_too_small_starts_no_engine(option):
    result = run("--model", "m", option, "0")
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr and "equal to 1" in result.stderr
