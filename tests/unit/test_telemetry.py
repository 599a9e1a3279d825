import pytest
from pydantic import ValidationError

from moebius_engine.telemetry import StepReport, StepTrace, SwitchRecord, TraceSample, read_json_lines, to_json_line

SWITCH = {
    "source": "ep",
    "target": "tp",
    "reason": "policy",
    "step": 3,
    "forward_ct": 17,
    "started_at_s": 1.25,
    "running": 30,
    "waiting": 1,
    "prefilling": 0,
    "kv_tokens": 900,
    "decide_ms": 1.0,
    "metadata_ms": 2.0,
    "kv_ms": 3.0,
    "weights_ms": 4.0,
    "rest_ms": 0.5,
    "total_ms": 10.5,
    "kv_bytes": 4096,
    "weight_bytes": 8192,
}


def sample(t_s: float, tokens: int) -> TraceSample:
    return TraceSample(t_s=t_s, inflight=1, tokens=tokens, layout="ep")


def test_json_lines_round_trip(tmp_path):
    traces = [
        StepTrace(step=0),
        StepTrace(step=1, samples=(sample(0.0, 0), sample(0.5, 4)), switches=(SwitchRecord(**SWITCH),), rank_steps=8),
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(to_json_line(trace) for trace in traces))
    assert read_json_lines(path, StepTrace) == traces


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text(to_json_line(StepTrace(step=0)) + '{"step": 1, "samp')
    with pytest.raises(ValueError, match=r"traces\.jsonl, line 2, is not a StepTrace"):
        read_json_lines(path, StepTrace)


def test_records_are_frozen_and_closed():
    record = SwitchRecord(**SWITCH)
    assert record.inflight == 31
    with pytest.raises(ValidationError, match="frozen"):
        record.running = 5
    with pytest.raises(ValidationError, match="kv_seconds"):
        SwitchRecord(**SWITCH, kv_seconds=1.0)


@pytest.mark.parametrize("change", [{"target": "dp"}, {"reason": "whim"}, {"running": -1}, {"kv_ms": float("nan")}])
def test_bad_values_are_refused(change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        SwitchRecord(**SWITCH | change)


def test_a_trace_out_of_order_is_refused():
    with pytest.raises(ValidationError, match=r"sample 1 of step 7 goes back: t_s 0\.5 -> 0\.4, tokens 4 -> 5"):
        StepTrace(step=7, samples=(sample(0.5, 4), sample(0.4, 5)))
    with pytest.raises(ValidationError, match=r"tokens 4 -> 3"):
        StepTrace(step=7, samples=(sample(0.5, 4), sample(0.6, 3)))
    with pytest.raises(ValidationError, match="idle_rank_steps 5 is more than rank_steps 4"):
        StepTrace(step=7, rank_steps=4, idle_rank_steps=5)


def test_every_field_is_described_and_times_carry_their_unit():
    for model in (SwitchRecord, TraceSample, StepTrace, StepReport):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            for suffix, unit in (("_s", "[s]"), ("_ms", "[ms]"), ("_bytes", "[bytes]"), ("tokens", "[tokens]")):
                if name.endswith(suffix) and not name.endswith("per_s"):
                    assert field.description.endswith(unit), f"{model.__name__}.{name}"
