"""The whole loop on a CPU: verl's trainer, Ray, the engine that switches, FSDP; weights from one to the other."""

import json
import subprocess

import pytest

from tests.verl.loop import run

pytestmark = [pytest.mark.loop, pytest.mark.timeout(1200)]

# In fp32 the trainer and the rollout differ by rounding. The engine starts with random weights of its own
# (load_format=dummy), so probabilities that are equal prove that the trainer's have arrived, in both layouts.
# About once in 400,000 tokens two experts of this model tie within rounding. Trainer and rollout may then take
# different ones, and probabilities differ by up to 2e-3: a run of 1,000 tokens fails once in 400.
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
        # Every sample has begun and ended with the weights of the step before (versions, as verl counts them).
        assert step["training/off_policy/trajectory_spans/max"] == 1
        assert step["training/off_policy/trajectory_staleness/max"] == 0
        assert step["training/off_policy/trajectory_staleness_worst/max"] == 0


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


def test_two_replicas_and_a_validation(tmp_path):
    steps = run(
        tmp_path,
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_gpus=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "actor_rollout_ref.rollout.engine_kwargs.moebius.threshold=6",
        "trainer.val_before_train=true",
        "trainer.test_freq=1",
        "data.val_max_samples=4",
        timeout_s=1100,
    )
    before, *steps = steps
    assert set(before) == {key for key in before if key.startswith("val-")} != set()
    check_weights(steps)
    for step in steps:
        check_switch(step)
        assert {key for key in step if key.startswith("val-core/")}
        for replica in ("moebius/replica_0", "moebius/replica_1"):
            assert step[f"{replica}/switches"] >= 1 and step[f"{replica}/tokens_burst"] > 0
        # The validations' tokens are in no step: only those of its 16 responses are.
        tokens = step["moebius/tokens_burst"] + step["moebius/tokens_tail"]
        assert tokens == pytest.approx(16 * step["response_length/mean"])


def test_groups_without_signal_or_reward_are_replaced(tmp_path):
    """DAPO's dynamic sampling, and a reward function that raises."""
    steps = run(
        tmp_path,
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_inflight_gen_batches=2",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
        "data.shuffle=false",
        answers=("x", "flat", "raise", "x") * 8,
    )
    check_weights(steps)
    for step in steps:
        check_switch(step)
        assert step["training/filter_groups/evicted_samples"] >= 1
        assert step["training/rollout_failure/evicted_samples"] >= 1


def test_a_partial_rollout_goes_on_token_by_token_in_a_training_loop(tmp_path):
    """verl's colocate_async: what is unfinished when a batch is full is aborted, put to sleep, updated and resumed.

    The first update has the learning rate 0. So in the second step the trainer must find the probability of every token
    of a response that was cut, in its whole context: a token lost or doubled at the cut would change those after it.
    The second update is a real one, and the third step is the control: the tokens before the cut are the old weights'.
    """
    steps = run(
        tmp_path,
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=2",  # of 48 requests 16 fill the batch
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.engine_kwargs.moebius.threshold=36",
        "data.max_response_length=256",
        answers=("x",) * 32,
    )
    assert len(steps) == 3
    for step in steps[1:]:
        assert step["training/off_policy/trajectory_spans/max"] >= 2
        # Of the step that the abort ended, in TP: what it cut was in flight at the switch, and went on in EP.
        check_switch(step)
    # The mean of 3,000 tokens: one token lost in one response moves it by 3e-5, a tie of two experts by less than 1e-5.
    diffs = [step["training/rollout_probs_diff_mean"] for step in steps]
    assert max(diffs[:2]) < 1e-5 < diffs[2]


def test_a_reward_that_raises_costs_its_responses_and_a_batch_of_them_ends_the_run(tmp_path):
    """Without refill: the step goes on with what has a reward, and where nothing has, the run ends and says why."""
    with pytest.raises(subprocess.CalledProcessError):
        run(tmp_path, "data.shuffle=false", answers=("x", "raise", "x", "x") + ("raise",) * 4)
    (step,) = (json.loads(line)["data"] for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    check_switch(step)
    assert step["training/rollout_probs_diff_max"] < MAX_DIFF
    # All 16 were generated, and 12 were trained on.
    assert step["moebius/tokens_burst"] + step["moebius/tokens_tail"] > 12 * step["response_length/mean"]
    log = (tmp_path / "log.txt").read_text()
    assert "ValueError: this row has no reward" in log
    assert "Enable trainer.v1.sampler.sync_refill_failed_groups to replace failed groups" in log
