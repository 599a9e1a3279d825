"""What is refused at the door, with argument, value and limit in the message."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.admission import Limits, check_logprobs, check_prompt, check_rid, check_sampling

LIMITS = Limits(vocab_size=100, prompt_tokens=7, context_tokens=16)
PROMPT_TOKENS = 3


def prompt(input_ids) -> str | None:
    return check_prompt(input_ids, LIMITS)


def sampling(limits=LIMITS, **params) -> str | None:
    return check_sampling(params, PROMPT_TOKENS, limits)


def test_a_grammar_needs_a_back_end():
    assert sampling(regex="a+") is None
    assert "grammar_backend" in sampling(LIMITS._replace(has_grammars=False), regex="a+")


@pytest.mark.parametrize(
    ("input_ids", "text"),
    [
        ([], "input_ids is empty"),
        ([1] * 8, "input_ids has 8 tokens, a prompt may have 7 (context 16)"),
        ([1, 100], "input_ids[1]=100 lies outside the vocabulary of 100 tokens"),
        ([-1], "input_ids[0]=-1 lies outside the vocabulary of 100"),
        ([1, "2"], "input_ids[1]='2' is not an integer"),
        ([1.0], "input_ids[0]=1.0 is not an integer"),
        ([True], "input_ids[0]=True is not an integer"),
        ([[1, 2]], "input_ids[0]=[1, 2] is not an integer"),
        ([np.int64(1)], "is not an integer"),
        (np.array([1, 2]), "is a ndarray: give a list of integers"),
        ((1, 2), "is a tuple: give a list of integers"),
        (None, "is a NoneType: give a list of integers"),
        ("12", "is a str: give a list of integers"),
        ([1, 2**100], "input_ids[1]=an integer beyond 64 bits lies outside"),
    ],
)
def test_bad_prompts(input_ids, text):
    message = prompt(input_ids)
    assert message is not None and text in message, message


@given(st.lists(st.integers(0, 99), min_size=1, max_size=7))
def test_good_prompts(input_ids):
    assert prompt(input_ids) is None


@given(st.lists(st.one_of(st.integers(-2, 101), st.booleans(), st.none(), st.text(max_size=2)), min_size=1, max_size=7))
def test_a_prompt_is_good_exactly_if_all_its_tokens_are(input_ids):
    assert (prompt(input_ids) is None) == all(type(token) is int and 0 <= token < 100 for token in input_ids)


def test_a_long_prompt_is_checked_in_little_time():
    """2,000 tokens well under 0.2 ms on an idle machine; the limit here only tells it from a loop in Python."""
    limits = LIMITS._replace(prompt_tokens=4096)
    ids = list(range(100)) * 20
    fastest = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        assert check_prompt(ids, limits) is None
        fastest = min(fastest, time.perf_counter() - began)
    assert fastest < 2e-4


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_new_tokens": 0},
        {"max_new_tokens": 13},
        {"max_new_tokens": None, "top_p": None, "logit_bias": None, "stop": None},
        {"temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 2.5, "top_k": 1 << 30, "top_p": 0.01, "min_p": 1.0},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"stop": ["a"], "stop_token_ids": [3], "min_new_tokens": 2, "max_new_tokens": 2},
        {"stop": "a", "stop_regex": ["a+b", "[0-9]{2}"], "stop_token_ids": []},
        {"logit_bias": {"99": 1.0, 5: -3}},
        {"n": 4, "stream_interval": 1, "ignore_eos": True},
    ],
)
def test_good_sampling(params):
    assert sampling(**params) is None


@pytest.mark.parametrize(
    ("params", "texts"),
    [
        ({"temprature": 1.0}, ["unknown ['temprature']", "temperature"]),
        ({"max_new_tokens": -1}, ["max_new_tokens", "-1"]),
        ({"max_new_tokens": 1.5}, ["max_new_tokens=1.5 must be an integer"]),
        ({"max_new_tokens": True}, ["max_new_tokens=True must be an integer"]),
        ({"max_new_tokens": 14}, ["max_new_tokens=14", "3 tokens", "context of 16", "at most 13"]),
        ({"max_new_tokens": 2**30 + 1}, ["max_new_tokens", str(2**30 + 1), str(2**30)]),
        ({"min_new_tokens": 2**30 + 1}, ["min_new_tokens", str(2**30 + 1), str(2**30)]),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, ["min_new_tokens", "4", "5"]),
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature=nan must be finite"]),
        ({"temperature": float("inf")}, ["temperature=inf must be finite"]),
        ({"temperature": 10**400}, ["temperature=an integer beyond 64 bits must be finite"]),
        ({"temperature": "hot"}, ["temperature='hot' must be a number"]),
        ({"top_p": 0.0}, ["top_p", "(0, 1]", "0.0"]),
        ({"top_p": 1.1}, ["top_p", "(0, 1]", "1.1"]),
        ({"top_k": 0}, ["top_k", "0"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"top_k": 2**30 + 1}, ["top_k", str(2**30 + 1), str(2**30)]),
        ({"min_p": -0.1}, ["min_p", "[0, 1]", "-0.1"]),
        ({"min_p": 1.1}, ["min_p", "[0, 1]", "1.1"]),
        ({"frequency_penalty": 2.1}, ["frequency_penalty", "[-2, 2]", "2.1"]),
        ({"presence_penalty": -2.1}, ["presence_penalty", "[-2, 2]", "-2.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "(0, 2]", "0.0"]),
        ({"repetition_penalty": 1e-40}, ["repetition_penalty=1e-40", "1e-06"]),
        ({"logit_bias": {"100": 1.0}}, ["logit_bias['100']", "vocabulary of 100"]),
        ({"logit_bias": {"x": 1.0}}, ["logit_bias['x']", "token ids"]),
        ({"logit_bias": {True: 1.0}}, ["logit_bias[True]", "token ids"]),
        ({"logit_bias": {"5": "much"}}, ["logit_bias['5']='much' must be a number"]),
        ({"logit_bias": {5: 1e39}}, ["logit_bias[5]=1e+39 must be finite"]),
        ({"logit_bias": {5: -1e31}}, ["logit_bias[5]=-1e+31", "-1e+30 and 1e+30"]),
        ({"logit_bias": [1.0]}, ["logit_bias=[1.0]", "map"]),
        ({"stop_token_ids": [3, 100]}, ["stop_token_ids[1]=100", "vocabulary of 100"]),
        ({"stop_token_ids": ["3"]}, ["stop_token_ids[0]='3' is not an integer"]),
        ({"stop_token_ids": 3}, ["stop_token_ids=3 must be a list"]),
        ({"stop": 3}, ["stop=3 must be a string or a list of strings"]),
        ({"stop": ["a", 3]}, ["stop=['a', 3] must be a string or a list of strings"]),
        ({"stop_regex": "(a"}, ["stop_regex='(a' is not a regular expression"]),
        ({"stop_regex": "(" * 5000 + ")" * 5000}, ["stop_regex", "is not a regular expression"]),
        ({"n": 0}, ["n=0 must lie between 1 and"]),
        ({"stream_interval": 0}, ["stream_interval=0 must lie between 1 and"]),
        ({"skip_special_tokens": "yes"}, ["skip_special_tokens='yes' must be True or False"]),
        ({"custom_params": {"a": 1}}, ["custom_params is not supported"]),
        ({"regex": ""}, ["regex='' must be a string of at least one character"]),
        ({"json_schema": {"type": "object"}}, ["json_schema={'type': 'object'} must be a string"]),
        ({"regex": "a", "ebnf": "b"}, ["['regex', 'ebnf'] are given"]),
        ({"sampling_seed": 7}, ["sampling_seed", "seeded=True"]),
    ],
)
def test_bad_sampling(params, texts):
    message = sampling(**params)
    assert message is not None
    assert all(text in message for text in texts), message


def test_seeds_are_let_in_where_sglang_heeds_them():
    heeded = LIMITS._replace(seeded=True)
    assert sampling(heeded, sampling_seed=-(2**63)) is None
    assert "must lie between" in (sampling(heeded, sampling_seed=2**63) or "")
    assert "min_p=0.1 does not work with SwitchConfig(seeded=True)" in (sampling(heeded, min_p=0.1) or "")
    assert sampling(heeded, min_p=0.0) is None and sampling(min_p=0.1) is None


def test_what_needs_a_tokenizer_is_refused_without_one():
    assert "stop needs a tokenizer" in (sampling(LIMITS._replace(has_tokenizer=False), stop=["x"]) or "")


@pytest.mark.parametrize("params", [None, "greedy", [1]])
def test_parameters_that_are_no_mapping(params):
    assert "give a dict" in (check_sampling(params, PROMPT_TOKENS, LIMITS) or "")


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@given(
    st.dictionaries(st.sampled_from(["temperature", "top_k", "n", "stop", "stop_token_ids", "logit_bias"]), ANYTHING)
)
def test_no_value_raises(params):
    message = sampling(**params)
    assert message is None or message.startswith("sampling_params")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, None, None), "return_logprob=1"),
        ((True, -2, None), "logprob_start_len=-2 must be an integer from -1 to 3"),
        ((True, 4, None), "logprob_start_len=4 must be an integer from -1 to 3"),
        ((True, None, 101), "top_logprobs_num=101 must be an integer from 0 to 100"),
        ((True, None, "2"), "top_logprobs_num='2'"),
    ],
)
def test_bad_logprob_arguments(arguments, text):
    message = check_logprobs(*arguments, PROMPT_TOKENS, LIMITS)
    assert message is not None and text in message, message


def test_good_logprob_arguments():
    assert check_logprobs(None, None, None, PROMPT_TOKENS, LIMITS) is None
    assert check_logprobs(True, 3, 100, PROMPT_TOKENS, LIMITS) is None


@pytest.mark.parametrize("rid", [None, "", 5, ["a"], "HEALTH_CHECK_1"])
def test_bad_request_ids(rid):
    assert (check_rid(rid) or "").startswith("rid=")
    assert check_rid("row-1") is None
