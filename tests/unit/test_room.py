"""Whether a layout can hold the requests that a switch brings."""

from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout import Layout
from moebius_engine.layout.partition import Capacity
from moebius_engine.switch.room import Held, no_room


@given(
    ranks=st.lists(st.builds(Held, st.integers(0, 50), st.integers(0, 5000)), min_size=1, max_size=8),
    capacity=st.builds(Capacity, st.integers(1, 200), st.integers(1, 20000)),
)
def test_there_is_room_for_the_sum_of_all_ranks_or_the_numbers_say_why_not(ranks, capacity):
    requests, rows = sum(held.requests for held in ranks), sum(held.rows for held in ranks)
    refusal = no_room(Layout.TP, ranks, capacity)
    assert (refusal is None) == (requests <= capacity.requests and rows <= capacity.tokens)
    if refusal is not None:
        assert refusal == (
            f"{requests} requests with {rows} KV rows do not fit into tp, which holds {capacity.requests} requests and "
            f"{capacity.tokens} rows a rank"
        )
