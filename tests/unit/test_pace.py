"""How many steps go by between two exchanges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.pace import Pace


def steps_between(skip: int) -> int:
    """Steps from one exchange to the next, counted as a rank does."""
    pace = Pace()
    assert pace.is_due()
    pace.exchanged(skip)
    steps = 1
    while not pace.is_due():
        steps += 1
    return steps


@given(st.integers(0, 8))
def test_every_rank_skips_what_rank_0_said(skip):
    assert steps_between(skip) == skip + 1


@pytest.mark.parametrize(
    ("step_s", "skip"), [(0.0001, 8), (0.002, 5), (0.0033, 3), (0.0051, 1), (0.0101, 0), (0.05, 0)]
)
def test_short_steps_go_by_long_ones_do_not(step_s, skip):
    """A message is handled within 20 ms, or two steps."""
    pace = Pace()
    pace.skip(0.0, quiet=True)
    for _ in range(5):
        pace.is_due()
    assert pace.skip(5 * step_s, quiet=True) == skip


def test_an_engine_that_is_idle_or_receives_looks_at_every_turn():
    pace = Pace()
    pace.is_due()
    assert pace.skip(0.001, quiet=False) == 0
