"""What `moebius-rollout verify` calls a difference, without an engine (tests/engine/test_verify.py has them)."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.telemetry import SwitchRecord
from rollout.findings import MAX_LOGPROB_DIFF, MAX_TIE_DIFF, Findings
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
        "undecided": 0,
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


@given(place=st.integers(0, 9), diff=st.floats(0, 4e-2) | st.floats(0, 1))
def test_one_logprob_beyond_the_bound_is_enough(place, diff):
    expected, got = answer(list(range(10))), answer(list(range(10)))
    _, token, text = got["meta_info"]["output_token_logprobs"][place]
    got["meta_info"]["output_token_logprobs"][place] = (-1.0 - diff, token, text)
    diff = abs(-1.0 - diff + 1.0)  # as it arrives
    findings = Findings(of=8)
    findings.add_answer(0, got, {STATIC: expected})
    assert bool(findings.undecided) == (MAX_LOGPROB_DIFF < diff <= MAX_TIE_DIFF)
    assert bool(findings.faults) == (diff > MAX_TIE_DIFF)
    assert findings.max_logprob_diff == (0.0 if findings.undecided else pytest.approx(diff, abs=1e-12))


def test_requests_on_which_the_static_runs_differ_are_left_out():
    tp, ep = ([answer([number]) for number in range(16)] for _ in range(2))
    ep[3], ep[9] = answer([3], -1.04), answer([0])
    findings = Findings()
    assert findings.choose({"static tp": tp, "static ep": ep}) == [n for n in range(16) if n not in (3, 9)]
    assert findings.undecided == {
        3: f"in static ep differs from static tp: logprobs by up to 4.00e-02 > {MAX_LOGPROB_DIFF}",
        9: "in static ep differs from static tp: token 0 is 0, 9 expected (logprobs -1.000000 and -1.000000; those "
        "before lie up to 0.00e+00 apart)",
    }
    assert findings.faults == []


def test_static_runs_that_differ_too_often_are_a_fault():
    tp = [answer([number]) for number in range(16)]
    findings = Findings()
    findings.choose({"static tp": tp, "static ep": [*tp[:13], *[answer([99])] * 3]})
    assert findings.faults == [
        "more than 2 of 16 requests are undecided. First request 13 in static ep differs from static tp: token 0 is "
        "99, 13 expected (logprobs -1.000000 and -1.000000; those before lie up to 0.00e+00 apart)"
    ]


CLOSE, FAR = MAX_TIE_DIFF / 2, MAX_TIE_DIFF * 2


@pytest.mark.parametrize(
    ("got", "expected", "is_tied"),
    [
        (answer([1, 300, 8]), answer([1, 2, 3], margin=CLOSE), True),  # the runner-up, and everything after it
        (answer([1, 300, 8]), answer([1, 2, 3], margin=FAR), False),
        (answer([1, 7, 8]), answer([1, 2, 3], margin=CLOSE), False),  # another token than the runner-up
        (answer([1, 300, 8], -1 - FAR), answer([1, 2, 3], margin=CLOSE), False),  # what comes before differs
        (answer([1, 2, 3], -1 - CLOSE), answer([1, 2, 3]), True),
        (answer([1, 2, 3], -1 - FAR), answer([1, 2, 3]), False),
        (answer([1, 2, 3], None), answer([1, 2, 3]), False),
        (answer([1, 2]), answer([1, 2, 3]), False),
    ],
)
def test_what_two_tied_experts_do_is_undecided(got, expected, is_tied):
    """Seen on an H200 with eight ranks: in one of 64 requests, at a token where two experts' scores were 9e-6 apart."""
    findings = Findings(of=8)
    findings.add_answer(7, got, {STATIC: expected})
    assert list(findings.undecided) == [7] * is_tied
    assert bool(findings.faults) != is_tied


def test_a_request_is_undecided_once_and_few_may_be():
    findings = Findings(of=16)
    for request in (3, 3, 4):
        findings.add_answer(request, answer([300]), {STATIC: answer([2], margin=CLOSE)})
    assert not findings.result()["ok"], "nothing was compared"
    findings.add_answer(1, answer([2, 3]), {STATIC: answer([2, 3])})
    assert findings.result() | {"undecided": 2, "tokens_compared": 2, "ok": True} == findings.result()
    findings.add_answer(5, answer([300]), {STATIC: answer([2], margin=CLOSE)})
    assert findings.faults[0].startswith(
        "more than 2 of 16 requests are undecided. First request 3 differs from static"
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
