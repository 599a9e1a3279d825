"""Columns of attributes: what is packed comes back, and nothing mutable is shared that was not shared before."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang import columns

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.text(max_size=2),
    st.lists(st.integers(0, 3), max_size=2),
    st.tuples(st.integers(0, 3)),
)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys("abcd", VALUES)), min_size=1, max_size=6))
def test_states_come_back(states):
    packed = pickle.loads(pickle.dumps(columns.pack(states, "abcd")))
    unpacked = columns.unpack(packed, {"template": 1, "a": "overwritten"})
    assert unpacked == [{"template": 1, **state} for state in states]
    lists = [id(value) for state in unpacked for value in state.values() if isinstance(value, list)]
    assert len(lists) == len(set(lists))


def test_one_object_of_all_stays_one():
    shared = {1, 2}
    unpacked = columns.unpack(columns.pack([{"a": shared, "b": 1}, {"a": shared, "b": 2}], "ab"), {})
    assert unpacked[0]["a"] is unpacked[1]["a"]


def test_a_missing_attribute_is_an_error():
    with pytest.raises(KeyError, match="b"):
        columns.pack([{"a": 1, "b": 2}, {"a": 1}], "ab")


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 2**31 - 1), max_size=4)), max_size=6))
def test_lists_of_tokens_come_back(lists):
    assert columns.unpack_lists(columns.pack_lists("I", lists)) == lists


def test_a_negative_token_is_an_error():
    with pytest.raises(OverflowError):
        columns.pack_lists("I", [[1, -1]])


@given(st.lists(st.one_of(st.none(), st.lists(st.floats(allow_nan=False), max_size=4)), max_size=6))
def test_lists_of_logprobs_come_back(lists):
    assert columns.unpack_lists(columns.pack_lists("d", lists)) == lists
