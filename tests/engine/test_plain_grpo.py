"""The loop of docs/other_loops.md: rollout and training without verl, on the CPU."""

import pytest

from recipes.tiny_arithmetic.plain_grpo import PROMPTS, RESPONSE_TOKENS, SAMPLES, THRESHOLD, train

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]


def test_three_steps_train_on_what_the_engine_drew():
    steps = list(train(3))
    for step in steps:
        assert len(step.rewards) == PROMPTS * SAMPLES and set(step.rewards) == {0.0, 1.0}
        assert step.report.switches >= 1 and 1 <= step.report.inflight_at_switch < THRESHOLD
        assert (step.report.responses, step.report.layout_at_end) == (PROMPTS * SAMPLES, "tp")
        assert 1 < step.report.longest_response <= RESPONSE_TOKENS
        # Steps 1 and 2 drew under weights that were sent, in both layouts: equal, so they have arrived in both.
        assert step.logprob_diff < 1e-4
    first = steps[0].weight_version
    assert [step.weight_version for step in steps] == [first, first + 1, first + 2]
    assert steps[0].report.weight_update_s == 0 < steps[1].report.weight_update_s
