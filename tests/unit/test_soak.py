"""What a soak draws, and what it counts."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.layout.shape import ModelShape, check_ranks
from rollout.budget_cli import read_config
from rollout.soak import start
from rollout.soak.counts import Counts
from rollout.soak.mix import Happening, Mix


@given(st.integers(0, 1 << 32), st.integers(2, 8), st.integers(1, 8))
def test_a_seed_gives_the_same_events_and_each_is_possible(seed, ranks, layers):
    """A Fault that cannot be would raise."""
    one, other = (Mix(seed, ranks, layers, faults=True) for _ in range(2))
    for _ in range(50):
        event = one.draw()
        assert event == other.draw()
        assert event.rank < ranks
        if event.fault is not None:
            assert event.fault.rank < ranks and event.fault.layer < layers


def test_everything_is_drawn_and_without_faults_nothing_breaks():
    mix = Mix(0, 2, 4, faults=True)
    seen = Counter(mix.draw().what for _ in range(3000))
    assert set(seen) == set(get_args(Happening))
    quiet = Mix(0, 2, 4, faults=False)
    assert {quiet.draw().what for _ in range(500)} == {"switch", "abort", "update", "step"}


@pytest.mark.parametrize(
    ("tokens", "complete", "lost", "differ"),
    [
        ([1, 2, 3], True, 0, 0),
        ([1, 2], True, 1, 0),
        ([1, 2], False, 0, 0),
        ([1, 9, 3], True, 0, 1),
        ([1, 2, 3, 4], False, 1, 0),
        ([], True, 1, 0),
    ],
)
def test_responses_are_compared_with_an_undisturbed_run(tokens, complete, lost, differ):
    counts = Counts(finished=1)
    counts.compare(tokens, [1, 2, 3], complete)
    assert (counts.lost, counts.tokens_differ, counts.tokens_compared) == (lost, differ, len(tokens))
    assert counts.ok == (not lost and not differ)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_the_model_is_made_for_the_ranks(monkeypatch, tmp_path, ranks):
    class Started(Exception):
        pass

    def actor(model, ranks, **_):
        check_ranks(ModelShape.from_hf_config(read_config(model)), ranks)
        raise Started

    monkeypatch.setattr(start, "RolloutActor", actor)
    with pytest.raises(Started):
        start.soak(str(tmp_path), 1.0, False, ranks, 0)
