"""What the plug-in changes in verl (ROWS, when verl is imported) and relies on in it (SUBCLASSED, when it is used)."""

from rollout.verl_plugin import check, table
from rollout.verl_plugin.table import Kind, Row


def load_replica():
    """The replica class, for verl's registry; imports SGLang."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.get("sglang")  # verl's stand-in for vllm, without which its SGLang modules do not import
    table.check(SUBCLASSED)
    from rollout.verl_plugin.replica import MoebiusReplica

    return MoebiusReplica


ROWS = (
    Row(
        "verl.workers.rollout.replica.RolloutReplicaRegistry.register",
        Kind.CALLS,
        ("moebius", load_replica),
        ("name", "loader"),
        "the server side of rollout.name=moebius",
    ),
    Row(
        "verl.workers.rollout.base._ROLLOUT_REGISTRY",
        Kind.ADDS,
        {("moebius", "async"): "rollout.verl_plugin.adapter.MoebiusAdapter"},
        (),
        "the trainer's side of rollout.name=moebius; verl has no function to add one",
    ),
    Row(
        "verl.utils.config.validate_config",
        Kind.WRAPS,
        check.validate_config,
        ("config", "use_reference_policy", "use_critic"),
        "settings that do not fit fail before Ray starts, and the step metrics need no setting of the user's",
    ),
)

_SGLANG = "verl.workers.rollout.sglang_rollout."


def _overridden(owner: str, why: str, **methods: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(
        Row(f"{owner}.{name}", Kind.OVERRIDES, None, ("self", *parameters), why) for name, parameters in methods.items()
    )


SUBCLASSED = (
    *_overridden(
        _SGLANG + "async_sglang_server.SGLangHttpServer",
        "server.MoebiusServer overrides or calls it",
        launch_server=("master_address", "master_port"),
        generate=("prompt_ids", "sampling_params", "request_id", "image_data", "video_data"),
        abort_all_requests=(),
        resume_generation=(),
        set_global_steps=("global_steps",),
        get_server_address=(),
        sleep=(),
        wake_up=(),
        clear_kv_cache=(),
        release_kv_cache=(),
        resume_kv_cache=(),
    ),
    *_overridden(
        _SGLANG + "async_sglang_server.SGLangReplica",
        "replica.MoebiusReplica overrides it",
        __init__=("replica_rank", "config"),
        launch_servers=(),
    ),
    *_overridden(
        _SGLANG + "sglang_rollout.ServerAdapter",
        "adapter.MoebiusAdapter overrides it",
        _init_server_adapter=(),
        update_weights=("weights", "global_steps", "wire_format"),
    ),
    *_overridden(
        _SGLANG + "http_server_engine.AsyncHttpServerAdapter",
        "adapter.ServerCalls stands in for it",
        update_weights_from_tensor=("req",),
        flush_cache=(),
        release_memory_occupation=("tags",),
        resume_memory_occupation=("tags",),
    ),
    *_overridden(
        "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer",
        "sampler.StepSampler overrides it",
        sample=("global_steps", "partition_id", "batch_size"),
    ),
    *_overridden(
        "verl.trainer.ppo.v1.replay_buffer.ReplayBufferAsync",
        "sampler.StepSamplerAsync overrides it",
        sample=("global_steps", "partition_id", "batch_size"),
    ),
)
