"""How many requests a calibration measures with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.calibration.measure import TOKENS, sizes_that_fit


@given(st.integers(2, 16), st.integers(3, 4096), st.integers(3, 10**6), st.integers(1, 4096))
def test_a_rank_holds_its_share_with_one_request_to_spare(ranks, running, requests, context):
    tokens = 2 * requests * (context + TOKENS)
    sizes = sizes_that_fit(ranks, running, tokens, context)
    assert sizes == [ranks << power for power in range(len(sizes))]
    share = sizes[-1] // ranks
    assert 2 <= share < running
    assert share * (context + TOKENS) <= 0.9 * tokens
    assert 2 * share >= running or 2 * share * (context + TOKENS) > 0.9 * tokens - context - TOKENS


def test_all_that_a_rank_may_run_are_too_many():
    """Seen on two H200s and on a CPU: with prompts that do not divide a chunk, the last one waited for the others."""
    assert sizes_that_fit(ranks=2, running=256, tokens=10**6, context=256)[-1] == 256
    assert sizes_that_fit(ranks=2, running=257, tokens=10**6, context=256)[-1] == 512


def test_too_small_ranks_are_refused():
    with pytest.raises(ValueError, match="context=16: a rank holds 1000 KV tokens and may run 2 requests, too few"):
        sizes_that_fit(ranks=2, running=2, tokens=1000, context=16)
