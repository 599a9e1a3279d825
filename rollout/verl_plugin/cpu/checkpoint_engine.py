"""Weights from verl's trainer to standalone rollouts on a CPU, through a TCP store of torch.

verl's own engines for that (nccl, nixl, ...) need GPUs. Chosen by `rollout.checkpoint_engine`: backend "tcp_store" and
custom_backend_module "rollout.verl_plugin.cpu.checkpoint_engine".
"""

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import ray
import torch
from safetensors.torch import load, save
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

_TIMEOUT = timedelta(seconds=300)
_END = b""


@CheckpointEngineRegistry.register("tcp_store")
class TCPStoreCheckpointEngine(CheckpointEngine):
    """A key a tensor, `<update>/<number>`; an empty value ends an update. The trainer's first rank serves the store."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        """bucket_size: of no use here, where each tensor travels by itself [bytes]."""
        self._is_master = is_master
        self._store: TCPStore | None = None
        self._updates = self._sent = 0

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        address = metadata[0]
        return {"address": [address] * actor_wg_world_size}, {"address": [address] * rollout_world_size}

    def init_process_group(self, address: dict[str, Any]) -> None:  # type: ignore[override]  # what build_topology gives
        if self._store is None:
            self._store = TCPStore(address["host"], address["port"], is_master=False, timeout=_TIMEOUT)

    def finalize(self) -> None:
        """Everyone has received the update: forget it."""
        if self._is_master:
            for number in range(self._sent):
                self._the_store.delete_key(self._key(number))
        self._updates += 1

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        self._sent = 0
        for name, tensor in weights:  # on all ranks, since each tensor is gathered from all of them
            if self._is_master:
                self._send(save({name: tensor.contiguous()}))
        if self._is_master:
            self._send(_END)

    def _send(self, value: bytes) -> None:
        self._the_store.set(self._key(self._sent), value)  # type: ignore[arg-type]  # torch takes bytes too
        self._sent += 1

    def receive_weights(  # type: ignore[override]  # verl iterates over it without awaiting it
        self, global_steps: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for number in itertools.count():
            value = self._the_store.get(self._key(number))
            if value == _END:
                return
            yield from load(value).items()  # no pickle: any host that reaches the store can write to it

    def _key(self, number: int) -> str:
        return f"{self._updates}/{number}"

    @property
    def _the_store(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError("the checkpoint engine was not initialised: verl calls prepare and init_process_group")
        return self._store
