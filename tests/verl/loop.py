"""Runs verl's trainer in processes of its own, as a user does, on a tiny model; returns the step lines."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.rows import verl_rows
from recipes.tiny_moe import byte_tokenizer, make_tiny_moe

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}<|im_end|>"


def make_model(path: Path) -> Path:
    """A tiny Qwen3-MoE that verl takes: its agent loop wants Qwen's end-of-turn token, and a chat template."""
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return make_tiny_moe(path, layers=2, hidden=32, max_position=512, tokenizer=tokenizer)


def run(
    folder: Path, *overrides: str, answers: Sequence[str] = ("x",) * 8, timeout_s: float = 900
) -> list[dict[str, Any]]:
    """Two GRPO steps of 4 prompts with 4 responses each, in waves of 8. Raises CalledProcessError if the run fails.

    answers: one a prompt; reward.py says what they mean.
    """
    prompts = [f"Say something about {number}." for number in range(len(answers))]
    verl_rows("tiny", prompts, answers).to_parquet(folder / "train.parquet")
    steps = folder / "steps.jsonl"
    settings = {
        "actor_rollout_ref.model.path": make_model(folder / "model"),
        "actor_rollout_ref.actor.optim.lr": "1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.max_num_seqs": 8,
        "+actor_rollout_ref.rollout.engine_kwargs.moebius.threshold": 10,
        "+actor_rollout_ref.rollout.engine_kwargs.moebius.timeout_s": 120,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 32,
        "reward.custom_reward_function.path": Path(__file__).with_name("reward.py"),
        "trainer.total_training_steps": 2,
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": folder / "checkpoints",
    }
    command = [sys.executable, "-m", "rollout.verl_plugin.cpu.train"]
    command += [f"{name}={value}" for name, value in settings.items()] + list(overrides)
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command,
            check=True,
            timeout=timeout_s,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VERL_FILE_LOGGER_PATH": str(steps)},
        )
    return [json.loads(line)["data"] for line in steps.read_text().splitlines()]
