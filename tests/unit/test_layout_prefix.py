"""Shared prefixes: the order, and what each request shares with those before it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout.prefix import shared_prefixes

# Few tokens, so that prefixes collide; some need the second and the fourth byte to be ordered.
TOKENS = st.lists(st.sampled_from([0, 1, 256, 70_000, 2**31 - 1]), max_size=9)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.asarray(row, dtype=np.int32) for row in rows]


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@given(st.lists(TOKENS, max_size=14), st.integers(1, 4))
def test_shares_as_much_as_any_earlier_request_allows(rows, page):
    entries = shared_prefixes(arrays(rows), page)
    assert sorted(entry.request for entry in entries) == list(range(len(rows)))
    for position, entry in enumerate(entries):
        own = rows[entry.request]
        most = max((common(own, rows[earlier.request]) for earlier in entries[:position]), default=0)
        assert entry.shared == most // page * page
        sharer = rows[entries[entry.sharer].request]
        assert entry.sharer < position or entry.shared == 0
        assert sharer[: entry.shared] == own[: entry.shared]


@given(st.lists(TOKENS, max_size=10), st.randoms())
def test_the_same_rows_in_any_order_move_the_same_tokens(rows, random):
    shuffled = rows.copy()
    random.shuffle(shuffled)
    saved = [sum(entry.shared for entry in shared_prefixes(arrays(some), 1)) for some in (rows, shuffled)]
    assert saved[0] == saved[1]


def test_samples_of_one_prompt_share_all_whole_pages_of_it():
    entries = shared_prefixes(arrays([[5, 6, 7, 8, 9]] * 3), 2)
    assert [(entry.request, entry.shared, entry.sharer) for entry in entries] == [(0, 0, 0), (1, 4, 0), (2, 4, 1)]
