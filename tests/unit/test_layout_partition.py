"""Which EP rank gets which request: conservation, capacity, balance."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_engine.layout.partition import Capacity, partition, spread

ROOMY = Capacity(requests=10**6, tokens=10**9)
TOKENS = st.lists(st.integers(1, 5000), max_size=60)


def weights(tokens: list[int]) -> list[float]:
    return [count / sum(tokens) + 1 / len(tokens) for count in tokens]


def loads(parts: list[list[int]], of: list[float]) -> list[float]:
    return [sum(of[index] for index in part) for part in parts]


@given(TOKENS, st.integers(2, 8), st.integers(1, 20), st.integers(1, 9000))
def test_every_request_goes_somewhere_once_and_no_rank_holds_more_than_it_can(tokens, ranks, requests, room):
    result = partition(tokens, ranks, Capacity(requests, room))
    assert sorted([index for part in (*result.ranks, result.overflow) for index in part]) == list(range(len(tokens)))
    for part in result.ranks:
        assert len(part) <= requests
        assert sum(tokens[index] for index in part) <= room
    assert partition(tokens, ranks, Capacity(requests, room)) == result


@given(TOKENS, st.integers(2, 8), st.integers(1, 20), st.integers(1, 9000))
def test_only_what_no_rank_could_hold_overflows(tokens, ranks, requests, room):
    """Room only shrinks while requests are placed, so what overflowed must fit nowhere at the end either."""
    result = partition(tokens, ranks, Capacity(requests, room))
    for index in result.overflow:
        for part in result.ranks:
            held = sum(tokens[other] for other in part)
            assert len(part) == requests or held + tokens[index] > room


@given(TOKENS.filter(len), st.integers(2, 8))
def test_balance_is_within_grahams_list_bound(tokens, ranks):
    """max load <= mean + (1 - 1/P) * largest weight (R. L. Graham, 1966), for count and tokens together."""
    of = weights(tokens)
    result = partition(tokens, ranks, ROOMY)
    assert not result.overflow
    assert max(loads(result.ranks, of)) <= sum(of) / ranks + (1 - 1 / ranks) * max(of) + 1e-9


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_balance_is_within_the_longest_first_bound_of_the_optimum(tokens, ranks):
    """4/3 - 1/(3P) of the best maximum, found by trying every assignment."""
    of = weights(tokens)

    def worst(owners: tuple[int, ...]) -> float:
        return max(sum(w for w, owner in zip(of, owners, strict=True) if owner == rank) for rank in range(ranks))

    best = min(map(worst, itertools.product(range(ranks), repeat=len(tokens))))
    assert max(loads(partition(tokens, ranks, ROOMY).ranks, of)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_equal_requests_are_dealt_evenly_in_order():
    assert partition([7] * 6, 3, ROOMY).ranks == [[0, 3], [1, 4], [2, 5]]


@given(st.integers(0, 50), st.lists(st.integers(0, 20), min_size=2, max_size=8))
def test_waiting_requests_level_the_counts(count, held):
    owners = spread(count, held)
    after = [before + owners.count(rank) for rank, before in enumerate(held)]
    assert len(owners) == count
    given_some = [after[rank] for rank in set(owners)]
    assert not given_some or max(given_some) <= min(after) + 1
