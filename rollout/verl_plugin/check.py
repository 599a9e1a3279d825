"""A run's configuration, checked before Ray starts, and completed with what the step metrics need."""

import math
from typing import Any

from omegaconf import DictConfig, open_dict

from moebius_engine.checkpoint import read_hf_config
from moebius_engine.layout.heads import holders_per_head
from moebius_engine.layout.shape import ModelShape, check_ranks
from rollout.verl_plugin import settings


def validate_config(upstream, config: DictConfig, *args: Any, **kwargs: Any) -> None:
    """verl's validate_config; with rollout.name=moebius our own checks first.

    Raises ValueError for what a moebius rollout cannot honour.
    """
    if config.actor_rollout_ref.rollout.name == "moebius":
        check(config)
        bring_sampler(config)
    upstream(config, *args, **kwargs)


def check(config: DictConfig) -> None:
    """Raises ValueError for a configuration that a moebius rollout cannot honour; says what it has less room for."""
    rollout = config.actor_rollout_ref.rollout
    found = settings.read(rollout)
    model = config.actor_rollout_ref.model
    lora = model.get("lora") or {}
    rank = max(model.get("lora_rank") or 0, lora.get("rank") or 0)
    if rank and not lora.get("merge"):
        raise ValueError(
            f"a LoRA of rank {rank}: adapters have one layout; set actor_rollout_ref.model.lora.merge=True, which "
            "sends full weights"
        )
    if not config.trainer.use_v1:
        raise ValueError("trainer.use_v1=False: rollout.name=moebius runs with verl's V1 trainer")
    shape = _shape(model)
    check_ranks(shape, found.ranks)
    holders = holders_per_head(shape.kv_heads, found.ranks)
    if holders > 1:
        print(
            f"moebius: {found.ranks} ranks hold the model's {shape.kv_heads} KV heads {holders} times in TP, so TP has "
            f"room for 1/{holders} of EP's tokens. A switch to TP with more in flight is refused, and counted in "
            "moebius/refused_switches"
        )
    burst, most = _burst(config, found.ranks), found.server_args.get("max_running_requests") or rollout.max_num_seqs
    if burst > most:
        print(
            f"moebius: a step has {burst} requests on each replica, and rollout.max_num_seqs lets {most} run at once, "
            f"which cuts its burst off; set actor_rollout_ref.rollout.max_num_seqs={burst}"
        )


def _burst(config: DictConfig, ranks: int) -> int:
    """Requests of a training step on each replica, where they are spread evenly."""
    rollout = config.actor_rollout_ref.rollout
    hosts = rollout if config.trainer.v1.trainer_mode == "separate_async" else config.trainer
    replicas = max(1, hosts.nnodes * hosts.n_gpus_per_node // ranks)
    return math.ceil(config.data.train_batch_size * rollout.n / replicas)


def _shape(model: DictConfig) -> ModelShape:
    from verl.utils.fs import copy_to_local

    path = copy_to_local(model.get("hf_config_path") or model.path, use_shm=model.get("use_shm", False))
    return ModelShape.from_hf_config(read_hf_config(path, {"trust_remote_code": model.trust_remote_code}))


def bring_sampler(config: DictConfig) -> None:
    """Names the sampler that adds the step metrics (sampler.py), unless the user named one.

    verl keeps the settings of its group filter from a custom sampler, so they go with it as sampler_kwargs: the same
    as trainer_base.PPOTrainer._build_replay_buffer gives its own.
    """
    sampler = config.trainer.v1.sampler
    if sampler.custom_sampler.path or sampler.custom_sampler.name:
        print("moebius: trainer.v1.sampler.custom_sampler is yours, so moebius/* metrics come only if it adds them")
        return
    sync = config.trainer.v1.trainer_mode == "sync"
    groups = config.algorithm.get("filter_groups") or {}
    metric = groups["metric"] if groups.get("enable") else None
    refill = bool(sampler.get("sync_refill_failed_groups"))
    given: dict[str, Any] = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
    if sync:
        batch = config.data.train_batch_size
        given |= {
            "train_batch_size": batch,
            "gen_batch_size": 1 if metric or refill else config.data.get("gen_batch_size") or batch,
            "max_inflight_gen_batches": groups.get("max_inflight_gen_batches", 1) if metric else 1,
        }
    with open_dict(config):
        sampler.custom_sampler.path = "pkg://rollout.verl_plugin.sampler"
        sampler.custom_sampler.name = "StepSampler" if sync else "StepSamplerAsync"
        sampler.sampler_kwargs = {**sampler.sampler_kwargs, "replay_buffer": given}
