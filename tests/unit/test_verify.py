"""What `moebius-rollout verify` calls a difference, without an engine (tests/engine/test_verify.py has them)."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.telemetry import SwitchRecord
from rollout.findings import MAX_LOGPROB_DIFF, TIE, Findings
from rollout.verify import PROMPT_TOKENS, RESPONSE_TOKENS, make_requests, model_shape

STATIC = "static tp"


def record(**changes) -> SwitchRecord:
    times = dict.fromkeys(("decide_ms", "metadata_ms", "kv_ms", "weights_ms", "rest_ms", "total_ms"), 1.0)
    state = {"source": "ep", "target": "tp", "reason": "explicit", "step": 0, "forward_ct": 9, "started_at_s": 0.0}
    counts = {"running": 3, "waiting": 2, "prefilling": 1, "kv_tokens": 50, "kv_bytes": 1000, "weight_bytes": 7}
    return SwitchRecord(**{**state, **times, **counts, **changes})


def answer(tokens: list[int], logprob: float | None = -1.0, margin: float = 1.0) -> dict:
    """margin: by which the next token is less likely."""
    likeliest = [[(0.0, token, None), (-margin, 300, None)] for token in tokens]
    return {
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": [(logprob, token, None) for token in tokens],
            "output_top_logprobs": likeliest,
        },
    }


def test_equal_runs_are_ok_and_counted():
    findings = Findings()
    findings.add_switch(1, record())
    findings.add_switch(2, record(running=0, waiting=1, prefilling=0, kv_bytes=500))
    weights = [{"a": ("x", 10), "b": ("y", 20)}, {"a": ("z", 10)}]
    findings.add_weights("after switch 1", weights, weights)
    findings.add_answer(0, answer([1, 2, 3]), {STATIC: answer([1, 2, 3], -1.0 + 1e-5), "static ep": answer([1, 2, 3])})
    result = findings.result()
    assert result.pop("max_logprob_diff") == pytest.approx(1e-5)
    assert result == {
        "switches": 2,
        "inflight_min": 1,
        "requests": 1,
        "tokens_compared": 3,
        "bytes_compared": 1540,
        "weights_checksum": {},
        "ok": True,
    }
    assert findings.faults == []


def test_a_run_that_compared_nothing_is_not_ok():
    result = Findings().result()
    assert (result["ok"], result["inflight_min"], result["tokens_compared"]) == (False, 0, 0)


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        (None, "switch 3: the engine was in that layout already"),
        (
            record(refused="rolled back: rank 0: KV differs"),
            "switch 3 to tp was refused: rolled back: rank 0: KV differs",
        ),
        (record(running=0, waiting=0, prefilling=0), "switch 3 to tp: nothing was in flight"),
    ],
)
def test_a_switch_that_proves_nothing_is_a_fault(switch, reason):
    findings = Findings(tokens=1)
    findings.add_switch(3, switch)
    (fault,) = findings.faults
    assert reason in fault
    assert not findings.result()["ok"]


def test_a_refused_switch_does_not_count():
    findings = Findings()
    findings.add_switch(1, record(refused="full"))
    assert (findings.result()["switches"], findings.result()["bytes_compared"]) == (0, 0)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([{"a": ("x", 10)}, {"a": ("OTHER", 10)}], "here, rank 1: a differs from a fresh start"),
        ([{"a": ("x", 10)}, {"a": ("x", 12)}], "here, rank 1: a differs from a fresh start"),
        ([{"a": ("x", 10)}, {}], "here, rank 1: only the fresh start has a"),
        ([{"a": ("x", 10)}, {"a": ("x", 10), "b": ("y", 1)}], "here, rank 1: only the switched engine has b"),
        ([{"a": ("x", 10)}], "here: weights of 1 ranks, a fresh start has 2"),
    ],
)
def test_weights_that_differ_are_named(found, reason):
    findings = Findings()
    findings.add_weights("here", [{"a": ("x", 10)}, {"a": ("x", 10)}], found)
    assert findings.faults == [reason]


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        (
            answer([1, 9, 3]),
            f"request 7 differs from {STATIC}: token 1 is 9, 2 expected (logprobs -1.000000 and -1.000000; th",
        ),
        (answer([1, 2]), f"request 7 differs from {STATIC}: 2 tokens, 3 expected"),
        (answer([1, 2, 3], -1.01), f"request 7 differs from {STATIC}: logprobs by up to 1.00e-02 > {MAX_LOGPROB_DIFF}"),
        (answer([1, 2, 3], math.nan), f"request 7 differs from {STATIC}: logprobs by up to nan"),
        (answer([1, 2, 3], None), f"request 7 differs from {STATIC}: logprobs by up to nan"),
    ],
)
def test_answers_that_differ_are_named(got, reason):
    findings = Findings()
    findings.add_answer(7, got, {STATIC: answer([1, 2, 3])})
    (fault,) = findings.faults
    assert fault.startswith(reason)
    json.loads(json.dumps(findings.result(), allow_nan=False))


@given(place=st.integers(0, 9), diff=st.floats(0, 1))
def test_one_logprob_beyond_the_bound_is_enough(place, diff):
    expected, got = answer(list(range(10))), answer(list(range(10)))
    _, token, text = got["meta_info"]["output_token_logprobs"][place]
    got["meta_info"]["output_token_logprobs"][place] = (-1.0 - diff, token, text)
    findings = Findings()
    findings.add_answer(0, got, {STATIC: expected})
    assert findings.max_logprob_diff == pytest.approx(diff, abs=1e-12)
    assert bool(findings.faults) == (findings.max_logprob_diff > MAX_LOGPROB_DIFF)


def test_requests_that_rounding_decides_are_left_out():
    runs = {name: [answer([number]) for number in range(24)] for name in ("static tp", "static tp again", "static ep")}
    runs["static tp again"][3] = answer([3], -1.04)
    runs["static ep"][9] = answer([0])
    runs["static ep"][20] = answer([20], margin=TIE / 2)
    findings = Findings()
    chosen, undecided = findings.choose(runs)
    assert chosen == [n for n in range(24) if n not in (3, 9, 20)]
    assert undecided == {
        3: f"static tp and static tp again differ: logprobs by up to 4.00e-02 > {MAX_LOGPROB_DIFF}",
        9: "static tp and static ep differ: token 0 is 0, 9 expected (logprobs -1.000000 and -1.000000; those before "
        "lie up to 0.00e+00 apart)",
        20: "static ep: token 0 is 20 or 300, whose logprobs lie 5.0e-05 apart",
    }
    assert findings.faults == []


def test_too_many_that_rounding_decides_are_a_fault():
    tp = [answer([number]) for number in range(16)]
    findings = Findings()
    findings.choose({"static tp": tp, "static ep": [*tp[:13], *[answer([99])] * 3]})
    (fault,) = findings.faults
    assert fault.startswith(
        "without any switch, 3 of 16 requests are undecided; at most 2 may be. First request 13: static tp and static "
        "ep differ: token 0 is 99, 13 expected"
    )


@given(ranks=st.integers(2, 64))
def test_the_model_fits_any_number_of_ranks(ranks):
    shape = model_shape(ranks)
    given_sizes = {name: shape[name] for name in ("experts", "intermediate", "q_heads", "kv_heads", "vocab_size")}
    check_ranks(ModelShape("qwen3_moe", 4, 64, head_dim=16, **given_sizes), ranks)
    assert shape["q_heads"] % shape["kv_heads"] == 0
    assert ranks % 2 or ranks == 2 or shape["kv_heads"] < ranks


def test_requests_are_mixed_and_reproducible():
    requests = make_requests(16, vocab_size=512)
    assert requests == make_requests(16, vocab_size=512)
    assert {len(request["input_ids"]) for request in requests} == set(PROMPT_TOKENS)
    assert len({tuple(request["input_ids"]) for request in requests}) == 16
    shortest, longest = RESPONSE_TOKENS
    assert all(shortest <= request["sampling_params"]["max_new_tokens"] <= longest for request in requests)
    assert all(0 <= token < 512 for request in requests for token in request["input_ids"])
