"""What is counted of the router's choices."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius_engine.sglang.expert_load import EVERY, ExpertLoad
from moebius_engine.telemetry import LayerLoad, StepTrace
from rollout.phases import step_report

RANKS, EXPERTS, LAYERS = 2, 6, 2 * EVERY + 1
choices = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.lists(st.integers(-1, EXPERTS - 1), min_size=2, max_size=2))
)


@given(choices)
def test_every_eighth_layer_is_counted_by_rank(seen):
    """-1 is no token, and a choice outside of a layer is none of the model's."""
    load = ExpertLoad(LAYERS, EXPERTS, RANKS, "cpu")
    load.on_select_experts(torch.zeros(3, 2, dtype=torch.int32))
    expected: Counter[tuple[int, int]] = Counter()
    for layer, ids in seen:
        with load.with_current_layer(layer):
            load.on_select_experts(torch.tensor([ids], dtype=torch.int32))
        if layer % EVERY == 0:
            expected.update((layer, expert * RANKS // EXPERTS) for expert in ids if expert >= 0)
    found = load.take()
    assert {
        (one.layer, rank): tokens for one in found for rank, tokens in enumerate(one.rank_tokens) if tokens
    } == expected
    assert load.take() == ()


def test_skew_is_the_busiest_rank_over_the_mean():
    even, uneven = LayerLoad(layer=0, rank_tokens=(5, 5)), LayerLoad(layer=8, rank_tokens=(30, 10))
    assert (even.skew, uneven.skew) == (1.0, 1.5)
    report = step_report(StepTrace(step=0, expert_load=(even, uneven)), [], threshold=1)
    assert (report.expert_skew, report.expert_skew_worst) == (pytest.approx(1.25), 1.5)
    assert step_report(StepTrace(step=0), [], threshold=1).expert_skew is None
