"""The trainer's side of a server: verl's own weight path, sent by Ray calls instead of HTTP."""

import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter
from verl.workers.rollout.utils import ensure_async_iterator


class MoebiusAdapter(ServerAdapter):
    """Every trainer rank goes through an update; the first of each replica sends it on (`_engine` is not None)."""

    _engine: Any
    server_actor: Any

    async def _init_server_adapter(self) -> None:
        if self._engine is None:
            await super()._init_server_adapter()
            if self._engine is not None:
                self._engine = ServerCalls(self.server_actor)

    async def update_weights(  # type: ignore[override]  # in verl's own order, which its base class does not have
        self, weights: Any, global_steps: Any = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """A full set of (name, tensor) pairs. On failure the engine refuses to generate until a full set has come.

        Raises ValueError for another wire format and for a set that the engine refuses.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: rollout.name=moebius takes named_tensors only")
        counted = _Counted(weights)
        pairs: Any = counted.pairs()
        began = time.perf_counter()
        await super().update_weights(pairs, global_steps=global_steps, **kwargs)
        if self._engine is not None:
            await self._engine.raise_refusal()
            seconds = time.perf_counter() - began
            await self.server_actor.finish_update.remote(seconds, counted.tensors, counted.bytes)


class ServerCalls:
    """What verl's adapter calls on SGLang's HTTP client, as calls of the server actor.

    HTTP would send a bucket again after a time-out, which starts the set anew, and would not raise for a refused one.
    """

    def __init__(self, server: Any):
        self._server = server
        self._refusal: Exception | None = None

    async def update_weights_from_tensor(self, request: UpdateWeightsFromTensorReqInput) -> None:
        """Sends a bucket. A refusal is kept: the other ranks gather each bucket with this one, which must go on."""
        if self._refusal is None:
            try:
                await self._server.update_bucket.remote(request)
            except Exception as error:
                self._refusal = error

    async def raise_refusal(self) -> None:
        """After the last bucket: raises what a bucket was refused for."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            await self._server.fail_update.remote()
            raise refusal

    async def flush_cache(self) -> None:
        if self._refusal is None:
            await self._server.clear_kv_cache.remote()

    async def release_memory_occupation(self, tags: list[str]) -> None:
        await self._server.release_memory.remote(tags)

    async def resume_memory_occupation(self, tags: list[str]) -> None:
        await self._server.resume_memory.remote(tags)


class _Counted:
    """(name, tensor) pairs, counted as they pass. bytes: of the full tensors."""

    def __init__(self, pairs: Any):
        self._pairs = pairs
        self.tensors = self.bytes = 0

    async def pairs(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for name, tensor in ensure_async_iterator(self._pairs):
            self.tensors += 1
            self.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
