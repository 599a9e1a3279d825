"""How many requests a calibration measures with."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.calibration.measure import TOKENS, finer, sizes_that_fit, time_for
from tests.unit.test_calibration_curve import points


@given(st.integers(2, 16), st.integers(3, 4096), st.integers(3, 10**6), st.integers(1, 4096))
def test_a_rank_holds_its_share_with_one_request_to_spare(ranks, running, requests, context):
    tokens = 2 * requests * (context + TOKENS)
    sizes = sizes_that_fit(ranks, running, tokens, context)
    assert sizes[0] == ranks and len(sizes) >= 2
    assert all(later == 4 * earlier for earlier, later in itertools.pairwise(sizes[:-1]))
    assert sizes[-1] in (2 * sizes[-2], 4 * sizes[-2])
    share = sizes[-1] // ranks
    assert share < running
    assert share * (context + TOKENS) <= 0.9 * tokens
    # Twice as many do not fit, but for rounding.
    assert 2 * share >= running or 2 * share * (context + TOKENS) > 0.9 * tokens - context - TOKENS


def test_all_that_a_rank_may_run_are_too_many():
    """Seen on two H200s and on a CPU: with prompts that do not divide a chunk, the last one waited for the others."""
    assert sizes_that_fit(ranks=2, running=256, tokens=10**6, context=256) == [2, 8, 32, 128, 256]
    assert sizes_that_fit(ranks=2, running=257, tokens=10**6, context=256) == [2, 8, 32, 128, 512]


def test_too_small_ranks_are_refused():
    with pytest.raises(ValueError, match="context=16: a rank holds 1000 KV tokens and may run 2 requests, too few"):
        sizes_that_fit(ranks=2, running=2, tokens=1000, context=16)


@given(st.integers(2, 1900).map(lambda n: n + 0.5), st.sampled_from([2, 4, 8]))
def test_two_rounds_bring_the_crossing_within_a_factor_of_one_and_a_quarter(at, ranks):
    sizes = [size for size in (2, 8, 32, 128, 512, 2048) if size >= ranks]
    for _ in range(2):
        if wanted := finer(points(at, sizes=sizes), ranks):
            assert not set(wanted) & set(sizes) and all(size % ranks == 0 for size in wanted)
            sizes = sorted({*sizes, *wanted})
    if at > sizes[0]:
        low, high = max(n for n in sizes if n <= at), min(n for n in sizes if n > at)
        assert high <= max(1.26 * low, low + ranks)


def test_layouts_that_do_not_cross_need_no_finer_numbers():
    assert finer(points(1e-3, sizes=(2, 8, 32)), 2) == finer(points(1e6, sizes=(2, 8, 32)), 2) == []


@given(st.floats(0.1, 3), st.floats(1e-4, 0.1), st.floats(5, 60))
def test_what_is_begun_ends_in_time(fixed, each, budget):
    """With as much for every number, and as much for every prompt that is new."""
    sizes, spent, clock, before = [2, 8, 32, 128, 512, 1024], [], 0.0, 0
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        spent.append(fixed + each * (size - before))
        clock, before = clock + spent[-1], size
        if larger is None or (len(spent) >= 2 and clock + time_for(spent, larger / size) > budget):
            break
    clock += fixed * len(spent)  # TP
    assert clock <= max(budget, 4 * fixed + 8 * each) + 1e-6


def test_all_that_may_run_are_reached_within_the_budget():
    """Seen on an H200 with 512 requests: half of the budget was for EP, and twice the last time was taken for the next
    one's, so 128 were the last; TP was faster up to there, EP from 430 on."""
    assert 5.0 + time_for([0.9, 0.9, 1.2, 2.0], 4) <= 20
