"""The plain forms of SwitchingEngine's `async_` methods, for scripts: each waits for its namesake."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any

from moebius_engine.async_calls import AsyncCalls
from moebius_engine.calibration.start import BUDGET_S, CONTEXT
from moebius_engine.calibration.store import Calibration
from moebius_engine.config import SwitchConfig
from moebius_engine.switch.faults import Fault
from moebius_engine.telemetry import StepTrace, SwitchRecord, UpdateRecord
from moebius_engine.weights.buckets import NamedTensors


class BlockingCalls(AsyncCalls):
    """The part of SwitchingEngine (engine.py) that waits in SGLang's event loop."""

    loop: asyncio.AbstractEventLoop

    def _run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def _each(self, chunks: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._run(anext(chunks))
            except StopAsyncIteration:
                return

    def switch(self, layout: str) -> SwitchRecord | None:
        return self._run(self.async_switch(layout))

    def begin_step(self, step: int, requests: int | None = None) -> None:
        self._run(self.async_begin_step(step, requests))

    def end_step(self) -> StepTrace:
        return self._run(self.async_end_step())

    def inject(self, fault: Fault) -> None:
        self._run(self.async_inject(fault))

    def set_policy(self, config: SwitchConfig, calibration: Calibration | None = None) -> None:
        self._run(self.async_set_policy(config, calibration))

    def calibrate(self, context: int = CONTEXT, budget_s: float = BUDGET_S) -> Calibration:
        return self._run(self.async_calibrate(context, budget_s))

    def health(self) -> dict[str, Any]:
        return self._run(self.async_health())

    def update_weights(self, named_tensors: NamedTensors, flush_cache: bool = True) -> UpdateRecord:
        return self._run(self.async_update_weights(named_tensors, flush_cache))

    def release_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        self._run(self.async_release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        self._run(self.async_resume_memory_occupation(tags))

    def weight_digests(self) -> list[dict[str, tuple[str, int]]]:
        return self._run(self.async_weight_digests())

    def addresses(self) -> list[dict[str, int]]:
        return self._run(self.async_addresses())

    def memory(self) -> list[dict[str, int]]:
        return self._run(self.async_memory())

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        self._run(self.async_abort(rid, abort_all))
