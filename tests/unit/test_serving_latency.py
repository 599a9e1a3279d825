"""TTFT and TPOT of responses, over a run and in bins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.serving.latency import Response, in_bins, spread

SECONDS = st.floats(0.001, 20)


@st.composite
def responses(draw):
    arrival = draw(st.floats(0, 100))
    times, at = [], arrival
    for gap in draw(st.lists(SECONDS, min_size=1, max_size=8)):
        at += gap
        times.append(at)
    return Response(arrival, tuple(times))


def test_the_first_token_counts_from_when_the_request_was_due():
    response = Response(arrival_s=2.0, tokens_s=(5.0, 6.0, 9.0))
    assert (response.ttft_s, response.tpot_s) == (3.0, 2.0)
    assert Response(0.0, (1.0,)).tpot_s is None


def test_a_token_counts_in_the_bin_in_which_it_comes():
    first, second = in_bins([Response(1.0, (4.0, 9.0, 11.0)), Response(12.0, (13.0,))], width_s=10.0)
    assert (first.begin_s, first.requests, first.tokens, first.ttft_s, first.tpot_s) == (0.0, 1, 2, 3.0, 5.0)
    assert (second.begin_s, second.requests, second.tokens, second.ttft_s, second.tpot_s) == (10.0, 1, 2, 1.0, 2.0)


def test_a_bin_without_arrivals_or_tokens_has_no_mean():
    middle = in_bins([Response(0.0, (1.0, 25.0))], width_s=10.0)[1]
    assert (middle.requests, middle.tokens, middle.ttft_s, middle.tpot_s) == (0, 0, None, None)


@given(st.lists(responses(), min_size=1, max_size=20), st.floats(0.5, 20))
def test_bins_hold_every_request_token_and_second(seen, width_s):
    bins = in_bins(seen, width_s)
    assert sum(one.requests for one in bins) == len(seen)
    assert sum(one.tokens for one in bins) == sum(len(response.tokens_s) for response in seen)
    first_tokens = sum((one.ttft_s or 0) * one.requests for one in bins)
    assert first_tokens == pytest.approx(sum(response.ttft_s for response in seen))


def test_a_width_of_nothing_is_refused():
    with pytest.raises(ValueError, match="width_s=0"):
        in_bins([Response(0.0, (1.0,))], 0)


def test_spread_leaves_out_what_is_not_known():
    assert spread([1.0, None, 3.0]) == {"mean": 2.0, "p50": 2.0, "p99": pytest.approx(2.98)}
    assert spread([None]) is None
