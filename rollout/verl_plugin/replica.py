"""verl's handle of one server: what starts it and passes on what the trainer asks."""

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from rollout.verl_plugin import settings
from rollout.verl_plugin.server import MoebiusServer
from rollout.verl_plugin.servers import servers


class MoebiusReplica(SGLangReplica):
    def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any):
        """Raises ValueError for settings that a moebius rollout cannot honour, before an actor is started."""
        settings.read(config)
        super().__init__(replica_rank, config, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("rollout.name=moebius serves the policy; reward models and teachers need sglang or vllm")
        self.server_class = ray.remote(MoebiusServer)

    async def launch_servers(self) -> None:
        await super().launch_servers()
        servers[self.replica_rank] = self.server_handle
