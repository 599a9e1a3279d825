"""verl's replay buffers with the step metrics of the moebius servers: check.bring_sampler names them."""

from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rollout.verl_plugin.curves import log_curves
from rollout.verl_plugin.metrics import merge
from rollout.verl_plugin.servers import servers

_TIMEOUT_S = 600.0  # for all servers to answer; each wait of theirs has a shorter deadline


class StepSampler(ReplayBuffer):
    """For the trainer mode "sync": a batch is sampled when its last response is there, so the rollout step ends."""

    def __init__(self, sampler_kwargs: DictConfig, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, **sampler_kwargs.get("replay_buffer", {}), **kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        training = partition_id == "train"
        _ask("end_step", keep=training)
        return batch, metrics | (step_metrics(global_steps) if training else {})


class StepSamplerAsync(ReplayBufferAsync):
    """For the asynchronous modes: requests go on while a batch is sampled, so a rollout step ends with the next weight
    update, and its numbers stand in the next step line."""

    def __init__(self, sampler_kwargs: DictConfig, **kwargs: Any):
        super().__init__(sampler_kwargs=sampler_kwargs, **sampler_kwargs.get("replay_buffer", {}), **kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        return batch, metrics | (step_metrics(global_steps) if partition_id == "train" else {})


def step_metrics(step: int) -> dict[str, float]:
    """Metrics of the rollout steps that have ended since the last call, for the trainer's step line of `step`."""
    results = _ask("take_reports")
    log_curves(results, step)
    return merge(results)


def _ask(method: str, **arguments: Any) -> list[Any]:
    """The answers of all servers, in the order of their ranks, which verl counts from 0 without a gap."""
    calls = [getattr(server, method).remote(**arguments) for _, server in sorted(servers.items())]
    return ray.get(calls, timeout=_TIMEOUT_S)
