"""What is refused at the door, with argument, value and limit in the message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.admission import check_prompt, check_sampling


def prompt(input_ids) -> str | None:
    return check_prompt(input_ids, vocab_size=100, context_len=8)


def sampling(has_tokenizer=True, **params) -> str | None:
    return check_sampling(params, vocab_size=100, has_tokenizer=has_tokenizer)


@pytest.mark.parametrize(
    ("input_ids", "text"),
    [
        ([], "input_ids is empty"),
        ([1] * 8, "input_ids has 8 tokens, the context holds 8"),
        ([1, 100], r"input_ids[1]=100 lies outside the vocabulary of 100 tokens"),
        ([-1], r"input_ids[0]=-1 lies outside the vocabulary of 100"),
        ([1, "2"], r"input_ids[1]='2' is not an integer"),
        ([1.0], r"input_ids[0]=1.0 is not an integer"),
        ([True], r"input_ids[0]=True is not an integer"),
    ],
)
def test_bad_prompts(input_ids, text):
    message = prompt(input_ids)
    assert message is not None and text in message


@given(st.lists(st.integers(0, 99), min_size=1, max_size=7))
def test_good_prompts(input_ids):
    assert prompt(input_ids) is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_new_tokens": 0},
        {"max_new_tokens": None, "top_p": None},
        {"temperature": 0, "top_k": -1, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 2.5, "top_k": 1, "top_p": 0.01, "min_p": 1.0, "sampling_seed": 7},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"stop": ["a"], "stop_token_ids": [3], "min_new_tokens": 2, "max_new_tokens": 2},
        {"logit_bias": {"99": 1.0}},
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
        ({"min_new_tokens": 5, "max_new_tokens": 4}, ["min_new_tokens", "4", "5"]),
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature=nan must be finite"]),
        ({"temperature": float("inf")}, ["temperature=inf must be finite"]),
        ({"temperature": "hot"}, ["temperature='hot' must be a number"]),
        ({"top_p": 0.0}, ["top_p", "(0, 1]", "0.0"]),
        ({"top_p": 1.1}, ["top_p", "(0, 1]", "1.1"]),
        ({"top_k": 0}, ["top_k", "0"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"min_p": -0.1}, ["min_p", "[0, 1]", "-0.1"]),
        ({"min_p": 1.1}, ["min_p", "[0, 1]", "1.1"]),
        ({"frequency_penalty": 2.1}, ["frequency_penalty", "[-2, 2]", "2.1"]),
        ({"presence_penalty": -2.1}, ["presence_penalty", "[-2, 2]", "-2.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "(0, 2]", "0.0"]),
        ({"logit_bias": {"100": 1.0}}, ["logit_bias", "100"]),
        ({"regex": "a+"}, ["regex is not supported"]),
    ],
)
def test_bad_sampling(params, texts):
    message = sampling(**params)
    assert message is not None
    assert all(text in message for text in texts), message


def test_what_needs_a_tokenizer_is_refused_without_one():
    assert "stop needs a tokenizer" in (sampling(has_tokenizer=False, stop=["x"]) or "")
