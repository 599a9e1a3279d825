"""Budget, promise, settings, the open step and the metrics: each alone."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from moebius_engine.prometheus import HealthCollector
from moebius_engine.telemetry import StepTrace, TraceSample
from moebius_engine.vitals import State, make_vitals
from rollout.recovery.budget import RestartBudget
from rollout.recovery.collector import LossCollector
from rollout.recovery.journal import Journal
from rollout.recovery.losses import Losses
from rollout.recovery.open_step import OpenStep
from rollout.recovery.promise import DEFAULT_MAX_NEW_TOKENS, Part, Promise
from rollout.recovery.settings import RecoveryConfig
from rollout.recovery.weights import LastWeights
from tests.unit.fake_engine import next_token, response


@given(st.lists(st.floats(0, 500), max_size=30), st.integers(0, 5))
def test_no_window_holds_more_restarts_than_are_allowed(pauses_s, most):
    config = RecoveryConfig(max_restarts=most, window_s=100, backoff_s=2)
    budget, now_s, taken = RestartBudget(config), 0.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s = budget.take(now_s)
        recent = [time_s for time_s in taken if time_s > now_s - 100]
        if wait_s is None:
            assert len(recent) == most
        else:
            assert wait_s == (2 * 2.0 ** (len(recent) - 1) if recent else 0)
            taken.append(now_s)
    assert all(sum(start < time_s <= start + 100 for time_s in taken) <= most for start in taken)


@pytest.mark.parametrize("bad", [{"max_restart": 1}, {"max_restarts": -1}, {"wait_s": 0}, {"backoff_s": float("inf")}])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        RecoveryConfig(**bad)


def test_the_page_lists_every_setting_with_its_default():
    page = (Path(__file__).parents[2] / "docs/recovery.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", page, re.MULTILINE)
    assert rows == [(name, repr(field.default)) for name, field in RecoveryConfig.model_fields.items()]


@given(
    prompt=st.lists(st.integers(0, 499), min_size=1, max_size=5),
    length=st.integers(1, 30),
    deaths=st.lists(st.integers(0, 12), max_size=4),
    least=st.integers(0, 30),
)
def test_a_promise_is_kept_over_any_deaths(prompt, length, deaths, least):
    """Greedy tokens are those of an undisturbed run, and the limits that an engine is given sum up."""
    promise = Promise("a", prompt, {"max_new_tokens": length, "min_new_tokens": min(least, length)})
    for index, count in enumerate([*deaths, length]):
        if promise.complete:
            break
        asked, sampling = promise.ask()
        assert len(asked) + sampling["max_new_tokens"] == len(prompt) + length
        assert len(promise.tokens) + sampling["min_new_tokens"] == max(min(least, length), len(promise.tokens))
        got: list[int] = []
        for _ in range(min(count, sampling["max_new_tokens"])):
            got.append(next_token([*asked, *got]))
        part = Part(got, [float(-index)] * len(got), index)
        if len(got) == sampling["max_new_tokens"]:
            promise.parts.append(part)
        else:
            promise.engine_died(part)
    assert promise.tokens == response(prompt, length)
    assert len(promise.logprobs) == length


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"temperature": 0.0, "stop_token_ids": [3], "sampling_seed": 1, "logit_bias": {"1": 2}}, True),
        ({"frequency_penalty": 0.0, "repetition_penalty": 1.0, "stop": None}, True),
        ({"stop": ["\n"]}, False),
        ({"stop": "x"}, False),
        ({"stop_regex": "a+"}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"presence_penalty": -0.1}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)
def test_tokens_are_dropped_where_the_rest_depends_on_them(sampling, kept):
    promise = Promise("a", [1], {"max_new_tokens": 9, **sampling})
    promise.engine_died(Part([5, 6], [-1, -1], 0))
    assert promise.tokens == ([5, 6] if kept else [])
    prompt, asked = promise.ask()
    assert (prompt, asked["max_new_tokens"]) == (([1, 5, 6], 7) if kept else ([1], 9))
    assert promise.deaths == 1


def test_on_policy_drops_the_tokens():
    promise = Promise("a", [1], {"max_new_tokens": 9}, on_policy=True)
    promise.engine_died(Part([5, 6], [-1, -1], 0))
    assert promise.ask() == ([1], {"max_new_tokens": 9})


def test_a_length_of_none_is_what_there_is_room_for_and_no_default():
    promise = Promise("a", [1], {"max_new_tokens": None})
    promise.engine_died(Part([5] * 200, [-1.0] * 200, 0))
    assert not promise.complete
    assert promise.ask() == ([1, *[5] * 200], {"max_new_tokens": None})


def test_the_default_length_is_sglangs():
    from sglang.srt.sampling.sampling_params import SamplingParams

    from moebius_engine.sglang import admission
    from rollout.recovery.promise import _LOOKS_BACK

    parameters = inspect.signature(SamplingParams.__init__).parameters
    assert parameters["max_new_tokens"].default == DEFAULT_MAX_NEW_TOKENS == Promise("a", [1], {}).left
    for name, neutral in _LOOKS_BACK.items():
        assert parameters[name].default == neutral
    # A parameter that a new SGLang brings must be looked at: does it depend on the tokens before?
    assert admission._KNOWN - set(admission._UNSUPPORTED) == {
        *_LOOKS_BACK, "max_new_tokens", "min_new_tokens", "stop_token_ids", "temperature", "top_p", "top_k", "min_p",
        "n", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval",
        "logit_bias", "sampling_seed",
    }  # fmt: skip


def test_the_last_complete_update_is_copied():
    weights, tensor, copies = LastWeights(keep=True), torch.ones(2), []
    assert not weights.lost and weights.pairs is None
    assert [name for name, _ in weights.copying([("a", tensor)], copies)] == ["a"]
    assert weights.pairs is None  # not before it is complete
    weights.complete(copies)
    tensor.zero_()
    ((name, kept),) = weights.pairs
    assert (name, kept.tolist(), weights.lost) == ("a", [1, 1], False)
    without = LastWeights(keep=False)
    without.complete([])
    assert without.pairs is None and without.lost


def test_a_trace_of_the_next_engine_is_put_into_its_step():
    step = OpenStep(3)
    trace = StepTrace(
        step=3, samples=[TraceSample(t_s=t, inflight=n, tokens=k, layout="tp") for t, n, k in [(0, 2, 0), (1, 0, 6)]]
    )
    assert step.whole(trace) is trace
    step._began_s -= 5
    step.begun_again(tokens=40, inflight=3)
    whole = StepTrace.model_validate(step.whole(trace).model_dump())
    assert [(sample.inflight, sample.tokens) for sample in whole.samples] == [(3, 0), (2, 40), (0, 46)]
    assert whole.samples[-1].t_s == pytest.approx(6, abs=0.5) and whole.samples[0].t_s == 0


def test_metrics_are_read_by_prometheus_names():
    vitals = make_vitals(2)
    vitals[1].beat_s = 1.0
    registry, journal = CollectorRegistry(), Journal(on_policy=False)
    registry.register(HealthCollector(lambda: State.SWITCHING, lambda: vitals))
    registry.register(LossCollector(Losses(restarts=2, resumed=5, lost_s=1.5), journal))
    with journal.promised("a", [1], {}):
        lines = generate_latest(registry).decode().splitlines()
    for line in (
        'moebius_engine_state{moebius_engine_state="switching"} 1.0',
        'moebius_engine_state{moebius_engine_state="dead"} 0.0',
        "moebius_restarts_total 2.0",
        "moebius_resumed_requests_total 5.0",
        "moebius_lost_seconds_total 1.5",
        "moebius_requests_in_flight 1.0",
    ):
        assert line in lines, lines
    assert [line.split()[0] for line in lines if line.startswith("moebius_rank")] == [
        'moebius_rank_silence_seconds{rank="1"}'
    ]
