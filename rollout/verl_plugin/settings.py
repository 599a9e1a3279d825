"""Settings of a moebius rollout, from verl's `actor_rollout_ref.rollout`; what does not fit is refused by name."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from moebius_engine.config import SwitchConfig
from moebius_engine.sglang import arguments as server_arguments

OWN_KEYS = ("ranks", "dump_dir")
KEYS = (*OWN_KEYS, *(field.name for field in fields(SwitchConfig)))
"""Keys of rollout.engine_kwargs.moebius; the own ones are no fields of SwitchConfig."""

# Setting of `rollout` → (the one value that works, why).
_ONLY = {
    "pipeline_model_parallel_size": (1, "a layout spans one pipeline stage"),
    "disaggregation.enabled": (False, "prefill and decode run in one engine"),
    "enable_rollout_routing_replay": (False, "expert routes are recorded by KV row, which a switch changes"),
    "quantization": (None, "the arena holds unquantised experts"),
    "mtp.enable_rollout": (False, "draft models have one layout"),
    "prometheus.enable": (False, "the server has no HTTP port; its numbers are in verl's step metrics"),
}


@dataclass(frozen=True)
class Settings:
    """ranks: P. switch: when and how to switch. server_args: SGLang's, as the user gave them. dump_dir: where the
    requests of each step are written, in a folder a replica; None for nowhere."""

    ranks: int
    switch: SwitchConfig
    server_args: dict[str, Any]
    dump_dir: Path | None = None


def read(rollout: Any) -> Settings:
    """Settings of `actor_rollout_ref.rollout`, hydra's DictConfig or verl's RolloutConfig.

    P is what verl counts as one replica, tensor_model_parallel_size * data_parallel_size. engine_kwargs.moebius may
    repeat it as `ranks`, and has `dump_dir` and the fields of SwitchConfig. engine_kwargs.sglang: SGLang's server
    arguments. Raises ValueError for an unknown key, and for what a moebius rollout cannot honour.
    """
    for path, (value, why) in _ONLY.items():
        if (given := _at(rollout, path, value)) != value:
            raise ValueError(f"rollout.{path}={given!r}: only {value!r} works with rollout.name=moebius ({why})")
    backend = _at(rollout, "checkpoint_engine.backend", "naive")
    if backend.startswith("delta"):
        raise ValueError(
            f"rollout.checkpoint_engine.backend={backend!r} sends changes, in the wire format delta_flush: "
            "rollout.name=moebius takes full tensors only; use naive, nccl or nixl"
        )
    kwargs: Any = rollout["engine_kwargs"]
    if isinstance(kwargs, DictConfig):
        kwargs = OmegaConf.to_container(kwargs, resolve=True)
    ours, server_args = dict(kwargs.get("moebius") or {}), dict(kwargs.get("sglang") or {})
    unknown = sorted(set(ours) - set(KEYS))
    if unknown:
        raise ValueError(f"rollout.engine_kwargs.moebius: unknown {unknown}; known are {list(KEYS)}")
    ranks = _ranks(rollout, ours.pop("ranks", None))
    server_arguments.check(ranks, server_args)
    if server_args.get("enable_memory_saver"):
        raise ValueError(
            "rollout.engine_kwargs.sglang.enable_memory_saver=True: a switching engine's memory is an arena of its "
            "own; leave it out"
        )
    dump_dir = ours.pop("dump_dir", None)
    switch = SwitchConfig(**ours)
    if switch.policy == "off":
        raise ValueError(
            "engine_kwargs.moebius.policy='off' is stock SGLang: use rollout.name=sglang, or policy='ep' or 'tp'"
        )
    return Settings(ranks, switch, server_args, None if dump_dir is None else Path(dump_dir))


def engine_arguments(rollout: Any, device: str) -> dict[str, Any]:
    """verl's settings as SGLang's server arguments; engine_kwargs.sglang wins over them. device: "cpu" or "cuda"."""
    arguments = {
        "dtype": rollout["dtype"],
        "load_format": rollout["load_format"],
        "mem_fraction_static": rollout["gpu_memory_utilization"],
        "max_running_requests": rollout["max_num_seqs"],
        "skip_tokenizer_init": rollout["skip_tokenizer_init"],
    }
    if device == "cpu":
        return arguments  # the engine knows what else a CPU needs
    # FlashAttention 3 does not capture graphs in SGLang 0.5.12, says verl, whose default is flashinfer too.
    return arguments | {"disable_cuda_graph": rollout["enforce_eager"], "attention_backend": "flashinfer"}


def _ranks(rollout: Any, asked: Any) -> int:
    tp, dp, ep = (rollout[f"{kind}_parallel_size"] for kind in ("tensor_model", "data", "expert"))
    ranks = tp * dp
    if asked is not None and asked != ranks:
        raise ValueError(
            f"rollout.engine_kwargs.moebius.ranks={asked}, but verl gives a replica tensor_model_parallel_size * "
            f"data_parallel_size = {tp} * {dp} = {ranks} GPUs: make them equal"
        )
    if ep not in (1, ranks):
        raise ValueError(f"rollout.expert_parallel_size={ep}: the experts are shared by all {ranks} ranks; use {ranks}")
    host = rollout["n_gpus_per_node"]
    if ranks > host:
        raise ValueError(f"{ranks} ranks need one host, and rollout.n_gpus_per_node={host}: use {host} ranks or fewer")
    return ranks


def _at(config: Any, path: str, default: Any) -> Any:
    """The value at a dotted path; `default` where a part is missing or None."""
    for key in path.split("."):
        config = config.get(key)
        if config is None:
            return default
    return config
