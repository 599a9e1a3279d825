"""The whole loop on a CPU: verl's trainer, Ray, the engine that switches, FSDP; weights from one to the other."""

import pytest

from tests.verl.loop import run

pytestmark = [pytest.mark.loop, pytest.mark.timeout(1200)]

# In fp32 the trainer and the rollout differ by rounding. The engine starts with random weights of its own
# (load_format=dummy), so probabilities that are equal prove that the trainer's have arrived, in both layouts.
MAX_DIFF = 1e-6


# Replicas of their own, and no prompts ahead: each step generates under the weights that the one before has made.
STANDALONE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.v1.separate_async.num_warmup_batches=0",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=tcp_store",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rollout.verl_plugin.cpu.checkpoint_engine",
    "ray_kwargs.ray_init.num_gpus=4",
)


def check_switch(step) -> None:
    assert step["moebius/switches"] >= 1 and step["moebius/inflight_at_switch"] >= 1
    assert step["moebius/layout_at_end"] == 1.0
    assert step["moebius/tokens_burst"] > 0 and step["moebius/tokens_tail"] > 0


def check_weights(steps) -> None:
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < MAX_DIFF
        assert step["moebius/weight_update_bytes"] == steps[0]["moebius/weight_update_bytes"] > 0
        assert step["moebius/weight_update_s"] > 0


def test_two_steps_of_grpo_switch_in_mid_rollout(tmp_path):
    steps = run(tmp_path)
    check_weights(steps)
    for step in steps:
        check_switch(step)
        assert step["moebius/longest_response"] == step["response_length/max"]


def test_a_standalone_rollout_gets_every_update_too(tmp_path):
    steps = run(tmp_path, *STANDALONE)
    check_weights(steps)
    assert "moebius/step_s" not in steps[0]  # the first rollout step ended with the update after it
    check_switch(steps[1])
