"""verl's PPO trainer on a CPU: `python -m rollout.verl_plugin.cpu.train key=value ...`, verl's own settings."""

import os
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # At INFO, trainer_separate_async.py:182 passes `flush` to a logger, which raises.
    "VERL_LOGGING_LEVEL": "WARN",
    "OMP_NUM_THREADS": "1",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_NO_GPU = 1000


def set_environment() -> None:
    """What verl and Ray read when they are imported; what is set already stays, but for VERL_PLATFORM."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VERL_PLATFORM"] = "cpu"


def hide_gpus(slots: int) -> None:
    """Gives Ray so many "GPUs" to count, which no machine has: CUDA sees no device under these numbers.

    Without it a laptop with a GPU would run on that, and one whose GPU is hidden (CUDA_VISIBLE_DEVICES="") not at all:
    Ray refuses to count what an empty list hides.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(_NO_GPU + slot) for slot in range(slots))


def compose(overrides: Sequence[str]) -> DictConfig:
    """verl's configuration, completed for a CPU by config/moebius_cpu.yaml, with these hydra overrides."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("rollout.verl_plugin.cpu.config", version_base=None):
        return compose("moebius_cpu", overrides=list(overrides))


def train(config: DictConfig) -> None:
    """Runs verl's trainer to its end, as verl.trainer.main_ppo.main does; before it, set_environment() and
    hide_gpus()."""
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo, validate_config
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    set_environment()
    config = compose(sys.argv[1:])
    hide_gpus(config.ray_kwargs.ray_init.num_gpus)
    train(config)
