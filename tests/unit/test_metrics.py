import io
import os
import time

import pytest
from rich.console import Console

from moebius_engine.telemetry import StepReport, StepTrace, TraceSample, read_json_lines
from rollout.metrics import JSON_ONLY, METRICS, ConsoleSink, JsonLinesSink, WandbSink, console_line, scalars
from rollout.phases import step_report


def report(step: int) -> StepReport:
    samples = [TraceSample(t_s=t, inflight=n, tokens=k, layout="ep") for t, n, k in ((0, 8, 0), (1, 3, 8), (2, 0, 11))]
    return step_report(StepTrace(step=step, samples=samples), [4, 7], threshold=4)


def test_the_table_and_the_report_hold_the_same():
    fields = [metric.field for metric in METRICS]
    assert len(set(fields)) == len(fields)
    assert set(fields) | JSON_ONLY == set(StepReport.model_fields)
    assert not set(fields) & JSON_ONLY


def test_units_agree_with_names_and_descriptions():
    for metric in METRICS:
        assert metric.name == f"moebius/{metric.field}"
        if metric.unit not in ("count", "share", "name", "ratio"):
            assert metric.description.endswith(f"[{metric.unit}]"), metric
        for suffix, unit in (("_s", "s"), ("_share", "share")):
            if metric.field.endswith(suffix) and "per_s" not in metric.field:
                assert metric.unit == unit, metric
        if metric.field.startswith("switch_ms"):
            assert metric.unit == "ms"


def test_the_names_others_rely_on():
    assert {
        "step_s", "burst_s", "tail_s", "tail_share", "switches", "switch_ms_decide", "bytes_moved", "refused_switches",
        "tokens_burst", "tokens_tail", "inflight_at_switch", "longest_response", "weight_update_s", "idle_rank_share",
        "layout_at_end",
    } <= {metric.field for metric in METRICS}  # fmt: skip


def test_what_is_none_is_left_out():
    values = scalars(report(0))
    assert "moebius/inflight_at_switch" not in values
    assert values["moebius/layout_at_end"] == "ep"
    assert values["moebius/step_s"] == 2


def test_json_lines_append_and_read_back(tmp_path):
    path = tmp_path / "metrics" / "steps.jsonl"
    for step in (0, 1):
        sink = JsonLinesSink(path)
        sink.write(report(step))
        assert len(path.read_text().splitlines()) == step + 1  # on disk before the file is closed
        sink.close()
    assert read_json_lines(path, StepReport) == [report(0), report(1)]


def test_console_line():
    stream = io.StringIO()
    ConsoleSink(Console(file=stream, width=200)).write(report(3))
    assert stream.getvalue().strip() == console_line(report(3))
    assert console_line(report(3)).startswith("step 3: 2.00 s (burst 1.00, tail 1.00), 11 tokens at 6/s, 0 switches")


def test_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WandbSink({"project": "moebius", "dir": str(tmp_path)})
    sink.write(report(0))
    sink.write(report(1))
    sink.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (data,) = run.glob("*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process writes the file, after finish() on a busy machine
    while b"moebius/tail_share" not in data.read_bytes():
        assert time.monotonic() < deadline, f"{data} holds {len(data.read_bytes())} bytes, no step metrics"
        time.sleep(0.1)


def test_wandb_refuses_unknown_settings(tmp_path):
    assert "WANDB_API_KEY" not in os.environ
    with pytest.raises(TypeError, match="projekt"):
        WandbSink({"projekt": "moebius", "dir": str(tmp_path)})
