"""A step of a real engine is written down and runs again: on the shared engine, and from the command line."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import StepReport, read_json_lines
from rollout.actor import RolloutActor
from rollout.cli import app
from rollout.replay.dump import RequestDump
from rollout.replay.request import RecordedRequest
from rollout.replay.run import replay
from rollout.replay.workload import read_workloads

LENGTHS = [16] * 8 + [40, 48, 56, 64]  # the ranks tell each other only every few steps: a shorter burst goes unseen
PROMPTS = [[20 + row, *range(30, 40)] for row in range(6)]
SAMPLING = [{"temperature": 0.0, "ignore_eos": True, "max_new_tokens": length} for length in LENGTHS]


@pytest.fixture
def actor(engine, tmp_path, monkeypatch):
    """Its process is the shared engine's, so it is not shut down here."""
    monkeypatch.setattr(engine, "config", replace(engine.config, threshold=6, silent_s=60))
    return RolloutActor(
        "unused",
        switch=SwitchConfig(policy="ep", threshold=6),
        dump_dir=tmp_path,
        engine_factory=lambda *_, **__: engine,
    )


async def record(actor) -> list[list[int]]:
    await actor.begin_step(7, requests=len(LENGTHS))
    batch = await actor.generate_batch(PROMPTS, 2, SAMPLING)
    await actor.end_step()
    return [sample.output_ids for samples in batch for sample in samples]


def test_a_recorded_step_runs_again(actor, engine, tmp_path):
    outputs = engine._run(record(actor))
    file = tmp_path / "step_7.jsonl"
    first = read_json_lines(file, RecordedRequest)
    assert [list(x.output_ids) for x in sorted(first, key=lambda x: x.number)] == outputs
    engine.flush_cache()
    reports: list[StepReport] = []
    engine._run(replay(actor, read_workloads(file, engine.shape.vocab_size), 120, reports.append))
    # The replay is a step of the same number, so the actor has written it in place of the first: equal but for ids.
    again = read_json_lines(file, RecordedRequest)
    assert [list(x.output_ids) for x in sorted(again, key=lambda x: x.number)] == outputs
    assert {x.request_id for x in again}.isdisjoint(x.request_id for x in first)
    (report,) = reports
    assert (report.step, report.responses, report.tokens) == (7, len(LENGTHS), sum(LENGTHS))
    assert report.burst_s > 0 and report.tail_s > 0


def test_lengths_are_kept_with_other_prompts(actor, engine, tmp_path):
    engine._run(record(actor))
    workloads = read_workloads(tmp_path / "step_7.jsonl", engine.shape.vocab_size, lengths_only=True)
    reports: list[StepReport] = []
    engine._run(replay(actor, workloads, 120, reports.append))
    assert reports[0].tokens == sum(LENGTHS) and reports[0].longest_response == max(LENGTHS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_switches(tiny_moe, tmp_path):
    dump = RequestDump(tmp_path)
    dump.begin(7)
    for number, length in enumerate(LENGTHS):
        dump.write(number, str(number), PROMPTS[number // 2], [1] * length, {"temperature": 1.0}, {"type": "stop"})
    dump.end()
    command = ["replay", str(tmp_path / "step_7.jsonl"), "--model", tiny_moe, "--threshold", "6"]
    command += ["--set", "max_total_tokens=8192", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    (report,) = read_json_lines(tmp_path / "out" / "steps.jsonl", StepReport)
    assert (report.switches, report.inflight_at_switch, report.layout_at_end) == (1, 4, "tp")
    assert (report.responses, report.tokens, report.threshold) == (len(LENGTHS), sum(LENGTHS), 6)
    assert result.stdout.strip().startswith("step 7: ") and "at 4 in flight" in result.stdout
