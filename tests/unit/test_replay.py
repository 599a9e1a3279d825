"""Dump and replay without an engine: the schema, what the actor writes, and what a file turns into."""

import json
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from moebius_engine.sglang.admission import Limits, check_sampling
from moebius_engine.telemetry import StepReport, read_json_lines, to_json_line
from rollout.actor import RolloutActor
from rollout.cli import app
from rollout.replay.request import VERSION, RecordedRequest, SamplingName
from rollout.replay.run import WrongLength, replay
from rollout.replay.workload import dummy_prompts, read_workloads
from tests.unit.stand_in_engine import StandInEngine, StopsEarly

VOCAB = 512
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20).map(tuple)
sampling = st.dictionaries(
    st.sampled_from(["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]),
    st.integers(-1, 100) | st.floats(allow_nan=False, allow_infinity=False),
)
requests = st.builds(
    RecordedRequest,
    version=st.just(VERSION),
    step=st.integers(),
    number=st.integers(0),
    request_id=st.text(),
    prompt_ids=tokens.filter(len),
    output_ids=tokens,
    sampling=sampling,
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
)


def line(**changes) -> str:
    request = {
        "version": VERSION,
        "step": 0,
        "number": 0,
        "request_id": "a",
        "prompt_ids": [1, 2],
        "output_ids": [3],
        "sampling": {},
        "finish_reason": "stop",
    }
    return json.dumps(request | changes) + "\n"


def file_of(tmp_path, *lines):
    path = tmp_path / "step_0.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@given(written=st.lists(requests, max_size=5))
def test_what_is_written_is_read(written, tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "step_0.jsonl"
    path.write_text("".join(map(to_json_line, written)), encoding="utf-8")
    read = read_json_lines(path, RecordedRequest)
    assert read == written
    types = [[type(value) for value in request.sampling.values()] for request in written]
    assert [[type(value) for value in request.sampling.values()] for request in read] == types


def test_every_field_is_described():
    assert all(field.description for field in RecordedRequest.model_fields.values())


def test_every_recorded_sampling_parameter_is_one_of_sglangs():
    sampling = {name: 4 if name == "top_k" else 0.5 for name in get_args(SamplingName)}
    limits = Limits(vocab_size=VOCAB, prompt_tokens=10, context_tokens=20)
    assert check_sampling({**sampling, "max_new_tokens": 3, "ignore_eos": True}, 5, limits) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{}\n", r"line 2, is not a RecordedRequest"),
        (line(number=1)[:-20], r"line 2, is not a RecordedRequest"),
        (line(number=1, version=2), r"line 2, is not a RecordedRequest(.|\n)*version(.|\n)*should be 1"),
        (line(number=1, prompt_ids=[]), r"line 2(.|\n)*prompt_ids"),
        (line(number=1, sampling={"stop": "x"}), r"line 2(.|\n)*sampling\.stop"),
        (line(), r"line 2: request 0 of step 0 stands in line 1 already"),
        (line(number=1, prompt_ids=[512]), r"line 2: the prompt holds token 512, and the model's vocabulary has 512"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        read_workloads(file_of(tmp_path, line(), bad), VOCAB)


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"step_0\.jsonl holds no requests"):
        read_workloads(file_of(tmp_path), VOCAB)


def test_a_workload_has_the_order_of_sending_and_the_recorded_lengths(tmp_path):
    late = line(number=0, step=4, prompt_ids=[9], output_ids=[1] * 7, sampling={"top_k": 5})
    path = file_of(tmp_path, line(number=2, step=4), late, line(number=1, step=3, output_ids=[]))
    three, four = read_workloads(path, VOCAB)
    assert (three.step, three.lengths, four.step, four.lengths) == (3, [0], 4, [7, 1])
    assert four.prompts == [[9], [1, 2]]
    assert four.sampling[0] == {"top_k": 5, "max_new_tokens": 7, "ignore_eos": True}


def test_lengths_only_runs_on_any_vocabulary(tmp_path):
    path = file_of(tmp_path, line(prompt_ids=[150_000, 1]), line(number=1))
    (workload,) = read_workloads(path, VOCAB, lengths_only=True)
    assert [len(prompt) for prompt in workload.prompts] == [2, 2]
    assert workload.lengths == [1, 1]


@given(st.lists(tokens.filter(len)), st.integers(1, 1000))
def test_dummy_prompts_keep_lengths_and_which_are_equal(prompts, vocab):
    dummies = dummy_prompts(prompts, vocab)
    assert [len(dummy) for dummy in dummies] == [len(prompt) for prompt in prompts]
    assert all(0 <= token < vocab for dummy in dummies for token in dummy)
    pairs = set(zip(map(tuple, prompts), map(tuple, dummies), strict=True))
    assert max(Counter(prompt for prompt, _ in pairs).values(), default=1) == 1
    assert dummies == dummy_prompts(prompts, vocab)


# ---- the actor's file


async def dumped(tmp_path, engine=StandInEngine):
    """An actor that has run step 3: two problems with two samples, of 30, 20, 10 and 5 tokens."""
    actor = RolloutActor("unused", dump_dir=tmp_path, engine_factory=engine)
    await actor.begin_step(3, requests=4)
    lengths = [{"max_new_tokens": length, "temperature": 0.5, "stop": ["x"]} for length in (30, 20, 10, 5)]
    batch = await actor.generate_batch([[1, 2], [3]], 2, lengths, request_ids=list("abcd"))
    await actor.end_step()
    return actor, batch


async def test_the_actor_writes_a_step(tmp_path):
    _, batch = await dumped(tmp_path)
    read = sorted(read_json_lines(tmp_path / "step_3.jsonl", RecordedRequest), key=lambda request: request.number)
    assert [request.request_id for request in read] == list("abcd")
    assert [request.prompt_ids for request in read] == [(1, 2), (1, 2), (3,), (3,)]
    assert [list(request.output_ids) for request in read] == [x.output_ids for samples in batch for x in samples]
    assert {request.step for request in read} == {3}
    assert all(request.sampling == {"temperature": 0.5} for request in read)


async def test_what_is_refused_or_no_part_of_a_step_is_not_written(tmp_path):
    actor, _ = await dumped(tmp_path)
    before = (tmp_path / "step_3.jsonl").read_text()
    await actor.generate_batch([[1]], sampling={"max_new_tokens": 2})
    assert (tmp_path / "step_3.jsonl").read_text() == before
    await actor.begin_step(3)
    await actor.generate_batch([[], [5]], sampling={"max_new_tokens": 2})
    actor.shutdown()
    (request,) = read_json_lines(tmp_path / "step_3.jsonl", RecordedRequest)  # begun again, so written anew
    assert request.prompt_ids == (5,)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3.jsonl"]


def test_a_dump_dir_that_is_a_file_starts_no_engine(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        RolloutActor("unused", dump_dir=tmp_path / "file", engine_factory=lambda *_, **__: pytest.fail("started"))


async def test_a_step_whose_file_cannot_be_opened_loses_no_sample(tmp_path, caplog):
    (tmp_path / "step_3.jsonl").mkdir()
    actor, batch = await dumped(tmp_path)
    assert [len(sample.output_ids) for samples in batch for sample in samples] == [30, 20, 10, 5]
    (record,) = caplog.records
    assert "the requests of step 3 are not written down" in record.message and "step_3.jsonl" in record.message
    await actor.begin_step(4)
    await actor.generate_batch([[5]], sampling={"max_new_tokens": 2})
    assert len(list(read_json_lines(tmp_path / "step_4.jsonl", RecordedRequest))) == 1


async def test_a_replay_reports_each_step(tmp_path):
    await dumped(tmp_path)
    actor = RolloutActor("unused", switch={"policy": "tp"}, engine_factory=StandInEngine)
    reports: list[StepReport] = []
    await replay(actor, read_workloads(tmp_path / "step_3.jsonl", VOCAB), 60, reports.append)
    assert [(report.step, report.tokens, report.layout_at_end) for report in reports] == [(3, 65, "tp")]


async def test_a_response_of_another_length_fails_the_replay(tmp_path):
    await dumped(tmp_path)
    actor = RolloutActor("unused", engine_factory=StopsEarly)
    with pytest.raises(WrongLength, match="step 3: request 0 has 29 of 30 tokens and ended with"):
        await replay(actor, read_workloads(tmp_path / "step_3.jsonl", VOCAB), 60)


# ---- the command


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (line(), ["--policy", "off"], "policy='off' is unknown: use one of ['rollout', 'ep', 'tp']"),
        (line(), ["--timeout-s", "0"], "timeout_s must be above 0 seconds, got 0"),
        (line(), ["--out", __file__], "out must be a folder"),
        (line(), ["--threshold", "0"], "threshold=0: at least 1 request"),
        (line(), ["--ranks", "3"], "3"),
        (line(), ["--set", "x"], "--set 'x': give argument=value"),
        (line(), ["--set", "pp_size=2"], "pp_size=2: only 1 works with switching"),
        (line(), ["--set", "foo=1"], "['foo'] are no server arguments of SGLang"),
        (line() + "{}\n", [], "line 2, is not a RecordedRequest"),
        (line(prompt_ids=[512]), [], "line 1: the prompt holds token 512"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(tmp_path, tiny_moe, text, arguments, message):
    command = ["replay", str(file_of(tmp_path, text)), "--model", tiny_moe, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    (printed,) = result.stderr.strip().splitlines()
    assert printed.startswith("Error: ") and message in printed


def test_a_file_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "none"), "--model", "x"])
    assert (result.exit_code, result.stderr.strip()) == (2, f"Error: {tmp_path / 'none'} is not a file")


def test_a_recorded_request_is_frozen():
    with pytest.raises(ValidationError):
        RecordedRequest.model_validate_json(line()).step = 2
