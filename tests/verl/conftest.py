"""verl must find its CPU platform, which it looks for when it is imported."""

from rollout.verl_plugin.cpu.train import set_environment

set_environment()

from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

RolloutReplicaRegistry.get("sglang")  # verl's stand-in for vllm, without which its SGLang modules do not import
