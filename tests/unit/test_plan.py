"""`moebius-rollout plan`: lengths, the verdicts, and the command line. No engine."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moebius_engine.calibration.curve import Point, crossing
from moebius_engine.calibration.store import Calibration, Setting
from moebius_engine.costmodel.paper import paper_fit
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape
from moebius_engine.memory.presets import PRESETS
from moebius_engine.telemetry import to_json_line
from rollout.cli import app
from rollout.plan import LEAST_GAIN, Wish, make_plan, response_lengths
from rollout.replay.request import RecordedRequest

PAPER = Wish("Qwen3-235B-A22B", "H200", ranks=8, batch=2048, cap=32_768, dispatch="deepep")
SMALL = Wish("Qwen3-30B-A3B", "H200", ranks=8, batch=64, cap=4096)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def asked(wish: Wish) -> list[str]:
    pairs = {"model": wish.model, "gpu": wish.gpu, "ranks": wish.ranks, "batch": wish.batch, "cap": wish.cap}
    return [part for name, value in pairs.items() for part in (f"--{name}", str(value))]


def test_lengths_are_the_papers():
    lengths = response_lengths(PAPER)
    assert len(lengths) == 2048 and lengths == sorted(lengths)
    assert lengths[1023] == pytest.approx(1510, rel=0.01)
    assert lengths[2027] == pytest.approx(10_386, rel=0.02)
    assert max(lengths) < 32_768
    assert max(response_lengths(SMALL)) == 4096


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=50), st.integers(2, 200))
def test_lengths_given_are_spread_over_the_batch(seen, batch):
    wish = Wish("Qwen3-30B-A3B", "H200", 2, batch, cap=4096, lengths=seen)
    lengths = response_lengths(wish)
    assert len(lengths) == batch and set(lengths) <= set(seen)
    if batch == len(seen):
        assert lengths == sorted(seen)


def test_the_papers_machine_gains_by_switching():
    plan = make_plan(PAPER)
    assert plan.crossing.below == Layout.TP and 128 < plan.crossing.requests < 256
    assert plan.gain == pytest.approx(min(plan.step_s["ep"], plan.step_s["tp"]) / plan.step_s["rollout"])
    assert plan.gain > 1.1 and plan.verdict.startswith("switch: ")
    assert plan.budget.tp_tokens == pytest.approx(1.23e6, rel=0.01)


def test_a_batch_below_the_crossing_need_not_bother():
    plan = make_plan(Wish("Qwen3-235B-A22B", "H200", ranks=8, batch=64, cap=4096, dispatch="deepep"))
    assert plan.crossing.requests is None and plan.gain is None
    assert set(plan.step_s) == {"ep", "tp"}
    assert plan.verdict == "do not bother: TP is faster at any count up to the batch; run it alone"


def test_a_small_gain_is_not_worth_it():
    plan = make_plan(Wish("Qwen3-235B-A22B", "H200", ranks=4, batch=2048, cap=32_768, dispatch="deepep"))
    assert plan.gain < LEAST_GAIN and plan.verdict.startswith("do not bother: ")


def test_what_does_not_fit_is_said_and_the_rest_answered():
    plan = make_plan(Wish("Qwen3-Coder-480B-A35B", "H100", ranks=8, batch=2048, cap=32_768))
    assert plan.verdict.startswith("does not fit: gpu_memory=85 GB leaves no room for KV")
    assert plan.budget is None and plan.step_s == {} and plan.switch_s[Layout.TP] > 0


def test_printed():
    text = run(*asked(PAPER), "--dispatch", "deepep")
    assert "requests: TP is faster below, EP above" in text
    for residual in paper_fit().residuals:
        assert f"{residual.error:+6.1%}  {residual.name}" in text


def test_json():
    made = json.loads(run(*asked(SMALL), "--json"))
    plan = make_plan(SMALL)
    assert made["crossing_requests"] == plan.crossing.requests
    assert made["switch_s"] == {"ep": plan.switch_s[Layout.EP], "tp": plan.switch_s[Layout.TP]}
    assert made["verdict"] == plan.verdict and made["step_s"] == plan.step_s
    assert list(made["fit_errors"].values()) == [residual.error for residual in plan.fit.residuals]


def test_table():
    text = run("--table", "--gpu", "B200", "--batch", "256", "--cap", "2048")
    rows = [line for line in text.splitlines() if line.startswith("Qwen3-")]
    assert len(rows) == 18
    assert "does not run on several hosts" in text


def test_lengths_of_a_recorded_step(tmp_path):
    file = tmp_path / "step_1.jsonl"
    requests = [
        RecordedRequest(
            version=1,
            step=1,
            number=number,
            request_id=str(number),
            prompt_ids=(1,),
            output_ids=(2,) * length,
            sampling={},
            finish_reason="stop",
        )
        for number, length in enumerate([5, 5, 5, 2000])
    ]
    file.write_text("".join(map(to_json_line, requests)), encoding="utf-8")
    short = json.loads(run(*asked(SMALL), "--lengths", str(file), "--json"))
    assert short["step_s"]["ep"] < make_plan(SMALL).step_s["ep"]
    output = run("--model", SMALL.model, *asked(SMALL)[2:-1], "1000", "--lengths", str(file), code=2)
    assert "a response of 2000 tokens, above cap=1000" in output
    file.write_text("", encoding="utf-8")
    assert "holds no requests" in run(*asked(SMALL), "--lengths", str(file), code=2)


def test_a_fit_to_a_calibration(tmp_path):
    """Of a machine that takes twice what the model says: the fit says how far off it still is."""
    costs = make_plan(SMALL).fit.costs
    points = [
        Point(layout=layout.value, requests=n, step_s=2 * costs.step_s(layout, n, 500), error_s=0.0, steps=9)
        for layout in Layout
        for n in (8, 64, 512)
    ]
    setting = Setting(
        model=asdict(ModelShape.from_hf_config(PRESETS[SMALL.model])),
        dtype="bfloat16",
        ranks=8,
        device="NVIDIA H200",
        share_gpu=False,
        context=500,
        versions={},
    )
    made = Calibration(setting=setting, points=tuple(points), crossing=crossing(points), switches=(), seconds=1.0)
    file = tmp_path / "calibration.json"

    def written(calibration: Calibration) -> list[str]:
        file.write_text(calibration.model_dump_json(), encoding="utf-8")
        return [*asked(SMALL), "--calibration", str(file)]

    text = run(*written(made))
    assert "Fitted to the calibration" in text and "TP, 512 requests, 500 KV tokens" in text
    one = made.model_copy(update={"points": tuple(points[:1])})
    assert "1 observations cannot give 2 parameters" in run(*written(one), code=2)
    other = made.model_copy(update={"setting": setting.model_copy(update={"ranks": 4})})
    assert "was measured with ranks=4, and the plan is for ranks=8" in run(*written(other), code=2)
    file.write_text("{}", encoding="utf-8")
    assert "is no calibration" in run(*asked(SMALL), "--calibration", str(file), code=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--gpu", "H300"], "gpu='H300' is unknown"),
        (["--link", "wire"], "link='wire' is unknown"),
        (["--dispatch", "x"], "dispatch='x' is unknown"),
        (["--ranks", "3"], "ranks=3 does not divide"),
        (["--batch", "4"], "batch=4 leaves no request to each of ranks=8"),
        (["--ranks", "1"], "ranks=1: two layouts need at least 2 ranks"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--cap", "50000"], "prompt=120 and cap=50000 need 50120 tokens, and the model has 40960 positions"),
        (["--skew", "0.5"], "skew=0.5 must lie between 1 and ranks=8"),
        (["--model", "nothing"], "model='nothing' is no folder"),
        (["--lengths", "nothing.jsonl"], "nothing.jsonl"),
        (["--table"], "give --model and --ranks, or --table, and not both"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    output = run(*asked(SMALL), *change, code=2)
    assert message in output and output.startswith("Error:")


def test_neither_table_nor_model():
    assert "or --table" in run("--gpu", "H200", "--batch", "8", "--cap", "8", code=2)
