"""Comparisons on the cost model's times: the paper's workloads, the command, and what is refused."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from moebius_engine.costmodel.paper import MEM_FRACTION, MODEL, paper_fit
from moebius_engine.layout import Layout
from moebius_engine.memory.presets import PRESETS
from moebius_engine.telemetry import to_json_line
from rollout.cli import app
from rollout.replay.request import RecordedRequest
from rollout.simulate.compare import compare_serving, compare_steps, tpot_s
from rollout.simulate.machine import from_costs
from rollout.simulate.outcome import Run
from rollout.simulate.trace import Trace, bursty_trace, recorded_steps, rollout_steps

EP, TP = Layout.EP, Layout.TP
SMALL = ["--steps", "1", "--requests", "300", "--median", "50", "--p99", "200", "--cap", "400"]


@pytest.fixture(scope="module")
def paper():
    return from_costs(MODEL, paper_fit().costs, PRESETS[MODEL]["max_position_embeddings"], 2048, MEM_FRACTION)


def simulate(*arguments):
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["simulate", *arguments])


def test_nine_steps_lie_within_a_tenth_of_the_papers_range(paper):
    row = compare_steps(paper, rollout_steps(), 256, ("rollout",))[0]
    assert row.switches == 9 and row.refused == 0
    assert min(row.over_better) == pytest.approx(1.16, rel=0.1)
    assert max(row.over_better) == pytest.approx(1.25, rel=0.1)
    assert max(row.over_worse) == pytest.approx(1.31, rel=0.1)


def test_the_bursty_trace_takes_four_switches(paper):
    row = compare_serving(paper, bursty_trace(), 256, ("interactive",))[0]
    assert row.switches == 4


def test_payoff_is_never_worse_by_a_hundredth_and_better_on_short_tails(paper):
    plain, payoff = compare_steps(paper, rollout_steps(), 256, ("rollout", "payoff"))
    assert all(own <= 1.01 * other for own, other in zip(payoff.seconds, plain.seconds, strict=True))
    for short in ({"cap": 4096}, {"median": 500, "p99": 505}):
        plain, payoff = compare_steps(paper, rollout_steps(steps=3, **short), 256, ("rollout", "payoff"))
        assert payoff.total_s < plain.total_s
        assert payoff.switches < plain.switches


def test_one_layout_alone_holds_more_kv(paper):
    for layout in Layout:
        alone, both = paper.static[layout].kv_tokens[layout], paper.switching.kv_tokens[layout]
        assert 1 < alone / both < 1.4
    assert paper.switching.prefill_tokens == {TP: 8192, EP: 32_768}


def test_a_step_ends_with_its_last_replica(paper):
    traces = rollout_steps(steps=1, requests=64, median=40, p99=90, cap=200)
    together = compare_steps(paper, traces, 8, ("tp",), replicas=4)[0]
    alone = [compare_steps(paper, [part], 8, ("tp",))[0].seconds[0] for part in traces[0].split(4)]
    assert together.seconds == (max(alone),)
    assert together.request_steps == sum(traces[0].responses)


def test_tpot_by_hand():
    trace = Trace("two", [0.0, 5.0], [1, 1], [11, 1], 11)
    run = Run(first_s=[2.0, 6.0], finish_s=[7.0, 6.0])
    assert tpot_s(trace, run) == pytest.approx(0.5)  # a response of one token has none


def test_bad_machines_are_refused():
    costs = paper_fit().costs
    with pytest.raises(ValueError, match=r"running=4 .* ranks=8"):
        from_costs("x", costs, 40_960, 4, 0.85)
    with pytest.raises(ValueError, match="mem_fraction=1 "):
        from_costs("x", costs, 40_960, 2048, 1.0)
    small = replace(costs, cluster=replace(costs.cluster, gpu=replace(costs.cluster.gpu, memory=40 * 10**9)))
    with pytest.raises(ValueError, match=r"40 GB .* ranks=8; use more ranks"):
        from_costs("x", small, 40_960, 2048, 0.85)


def test_a_dump_is_a_workload(tmp_path):
    def line(step, number, tokens):
        return to_json_line(
            RecordedRequest(
                version=1, step=step, number=number, request_id=f"{step}-{number}", prompt_ids=(1, 2),
                output_ids=(1,) * tokens, sampling={}, finish_reason="stop",
            )
        )  # fmt: skip

    path = tmp_path / "step.jsonl"
    path.write_text("".join([line(2, 1, 5), line(2, 0, 9), line(3, 0, 4)]), encoding="utf-8")
    first, second = recorded_steps(path)
    assert (first.responses, second.responses, first.cap) == ([9, 5], [4], 9)
    result = simulate("--workload", str(path), "--policy", "rollout", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["rows"][0]["request_steps"] == 18
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no responses"):
        recorded_steps(path)


def test_the_command_prints_a_table_and_json():
    result = simulate(*SMALL, "--replicas", "2", "--policy", "rollout", "--policy", "payoff")
    assert result.exit_code == 0, result.stderr
    assert "Simulation: Qwen3-235B-A22B on 8xH200" in result.stdout and "payoff" in result.stdout
    made = json.loads(simulate(*SMALL, "--json", "--policy", "ep").stdout)
    assert made["rows"][0]["strategy"] == "ep" and made["rows"][0]["over_better"][0] <= 1


def test_the_command_simulates_serving():
    made = json.loads(simulate("--workload", "serving", "--policy", "interactive", "--json").stdout)
    assert made["rows"][0]["switches"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "policy='best'"),
        (["--workload", "serving", "--policy", "oracle"], "policy='oracle'"),
        (["--workload", "serving", "--replicas", "2"], "replicas=2"),
        (["--workload", "nothing"], "workload='nothing'"),
        (["--ranks", "3"], "ranks=3"),
        (["--ranks", "1"], "ranks=1"),
        (["--threshold", "0"], "threshold=0"),
        (["--requests", "2", "--replicas", "3"], "replicas=3 for 2 requests"),
        (["--median", "10", "--p99", "5"], "median=10 and p99=5"),
        (["--dispatch", "magic"], "dispatch='magic'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr
