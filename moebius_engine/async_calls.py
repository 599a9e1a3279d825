"""What SwitchingEngine can be asked besides generating, in its `async_` form."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import MultiprocessingSerializer

from moebius_engine.calibration.start import BUDGET_S, CONTEXT, calibrate, calibrate_at_start
from moebius_engine.calibration.store import Calibration
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape
from moebius_engine.sglang.commands import STATIC_COMMANDS, Command
from moebius_engine.sglang.occupation import check_tags
from moebius_engine.sglang.watch import Watch
from moebius_engine.switch.faults import Fault
from moebius_engine.telemetry import StepTrace, SwitchRecord, UpdateRecord
from moebius_engine.vitals import EngineDead, State, state_of
from moebius_engine.weights.buckets import NamedTensors, buckets
from moebius_engine.weights.manifest import qwen3_moe_manifest
from moebius_engine.weights.update import check_full

Result = TypeVar("Result")


class AsyncCalls:
    """The part of SwitchingEngine (engine.py) that talks to its ranks. blocking.py has the plain forms."""

    config: SwitchConfig
    ranks: int
    shape: ModelShape
    tokenizer_manager: Any  # SGLang's TokenizerManager; None before the start and after shutdown
    watch: Watch
    vitals: Sequence[Any]
    calibration: Calibration | None  # that the policy now reckons with
    _calibration: asyncio.Future[None] | None

    # ---- layouts and steps

    async def async_switch(self, layout: str) -> SwitchRecord | None:
        """Switch now, with whatever is in flight. Returns None if `layout` is live already.

        A refused switch returns its record with `refused` saying why. Raises ValueError for an unknown layout, or if
        switching is off.
        """
        if layout not in set(Layout):
            raise ValueError(f"layout {layout!r} is unknown; use one of {[str(x) for x in Layout]}")
        record = (await self._command("switch", layout=layout))[0]["record"]
        return None if record is None else SwitchRecord(**record)

    async def async_begin_step(self, step: int, requests: int | None = None) -> None:
        """Begin a rollout step: a fresh trace, and the layout that the policy starts with.

        requests: how many the step will have, if known; a step that never reaches the threshold runs in TP at once.
        """
        await self._calibrated()
        await self._command("begin_step", step=step, requests=requests)

    async def async_end_step(self) -> StepTrace:
        """What happened since begin_step (or the start)."""
        return StepTrace(**(await self._command("end_step"))[0]["trace"])

    def state(self) -> State:
        """Whether the engine lives, and what it does: at once, from the ranks' last signs of life."""
        return state_of(self.vitals) if self.watch.dead is None else State.DEAD

    async def async_wait_dead(self) -> EngineDead:
        """What the engine died of, once it has."""
        return await self.watch.wait_dead()

    def so_far(self, rid: str) -> tuple[list[int], list[float]]:
        """Tokens and logprobs that a request which has not ended has got, also after the engine's death.

        They come in bundles of 50 tokens, so up to 49 may be missing.
        """
        return self.watch.so_far(rid)

    async def async_health(self) -> dict[str, Any]:
        """State of the engine: layout, in-flight counts, whether the weights are a full set and all memory is there,
        per rank details."""
        ranks = await self._command("state")
        layout, valid = ranks[0]["layout"], all(rank["weights_valid"] for rank in ranks)
        inflight = [rank["inflight"] for rank in ranks]
        return {
            "state": self.state(),
            "pids": [vital.pid for vital in self.vitals],
            "ok": valid and not ranks[0]["released"] and len({rank["layout"] for rank in ranks}) == 1,
            "layout": layout,
            "inflight": sum(inflight) if layout == Layout.EP else inflight[0],
            "weights_valid": valid,
            "weights_reason": ranks[0]["weights_reason"],
            "weight_version": ranks[0]["weight_version"],
            "released": ranks[0]["released"],
            "ranks": ranks,
        }

    async def async_set_policy(self, config: SwitchConfig, calibration: Calibration | None = None) -> None:
        """From now on switch as `config` says: policy, thresholds, calibrate, window, cooldown, payoff; nothing else of
        it counts. calibration: what payoff reckons with; with one nothing is left to be measured."""
        names = ("policy", "threshold", "calibrate", "low_threshold", "window", "cooldown_s", "payoff")
        self.config = replace(self.config, **{name: getattr(config, name) for name in names})
        self.calibration = calibration
        if calibration is not None and self._calibration is None:
            self._calibration = asyncio.get_running_loop().create_future()
            self._calibration.set_result(None)
        await self._command("set_policy", config=self.config, calibration=calibration)

    async def async_step_times(self) -> list[tuple[Layout, int, list[float]]]:
        """Decode steps since the last call: layout, requests in flight, seconds of each of the latest."""
        return (await self._command("step_times"))[0]["seen"]

    async def async_calibrate(self, context: int = CONTEXT, budget_s: float = BUDGET_S) -> Calibration:
        """Measure from how many requests on EP is faster. The engine must be idle; its policy stays as it is.

        context: tokens that each request holds. budget_s: seconds after which no larger batch is begun. Raises
        ValueError if requests of this length do not fit.
        """
        return await calibrate(self, context, budget_s)

    async def _calibrated(self) -> None:
        """Wait until the policy has its threshold (SwitchConfig.calibrate); the first caller makes it. Not done in the
        constructor, because a caller's event loop may be running there."""
        if self._calibration is None:
            if self.config.calibrate == "off":
                return
            self._calibration = asyncio.ensure_future(calibrate_at_start(self))
        awaited = self._calibration
        try:
            await asyncio.shield(awaited)
        except Exception:
            if self._calibration is awaited:  # all that wait for this one get its error; the next call tries again
                self._calibration = None
            raise

    # ---- weights

    async def async_update_weights(self, named_tensors: NamedTensors, flush_cache: bool = True) -> UpdateRecord:
        """Load a full set of weights, in whichever layout is live; afterwards both layouts hold it.

        named_tensors: every tensor of the model by its Hugging Face name (moebius_engine.weights.manifest); none at
        all changes nothing. With nothing in flight in TP, the engine goes back to EP first, which moves nothing.
        flush_cache: drop cached prefixes, which belong to the old weights; needs an idle engine.

        Raises ValueError for an unknown, misshapen, repeated or missing tensor. A collection (a list, dict.items()) is
        checked as a whole before anything is written. A generator is checked piece by piece: if some tensors have
        been written when a fault shows, generation is refused until a full set has arrived.
        """
        began, count, size = time.perf_counter(), 0, 0
        if isinstance(named_tensors, Collection):
            check_full(qwen3_moe_manifest(self.shape), [(name, tuple(tensor.shape)) for name, tensor in named_tensors])
        for bucket in buckets(named_tensors):
            count, size = count + len(bucket), size + sum(tensor.nbytes for _, tensor in bucket)
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[MultiprocessingSerializer.serialize(bucket) for _ in range(self.ranks)],
                flush_cache=flush_cache,
            )
            success, message = await self._within(
                self.tokenizer_manager.update_weights_from_tensor(request, None), "the weight update"
            )
            if not success:
                raise ValueError(message.split(" | ")[0])
        health = await self.async_health()
        if count and not health["weights_valid"]:
            raise ValueError(health["weights_reason"])
        return UpdateRecord(seconds=time.perf_counter() - began, bytes=size, tensors=count, layout=health["layout"])

    async def async_invalidate_weights(self) -> None:
        """Refuse to generate until a full set of weights has arrived: for a sender whose update has failed."""
        await self._command("invalidate_weights")

    async def async_release_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Give device memory back to a trainer: content is lost, addresses and captured graphs stay.

        tags: of "weights" and "kv_cache", both by default. After "weights", generation is refused until they have been
        resumed and a full update has arrived. On a CPU nothing is freed, all else is the same. Raises ValueError for
        an unknown tag, RuntimeError if requests are in flight, if it has been given back already, or if it cannot be.
        """
        refused = (await self._command("release", tags=check_tags(tags)))[0]["refused"]
        if refused:
            raise RuntimeError(refused)

    async def async_resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again, of undefined content.

        Raises ValueError for an unknown tag, RuntimeError if a device has no room: all stays released, and may be
        resumed later.
        """
        refused = (await self._command("resume", tags=check_tags(tags)))[0]["refused"]
        if refused:
            raise RuntimeError(refused)

    async def async_weight_digests(self) -> list[dict[str, tuple[str, int]]]:
        """Per rank: name → (digest, bytes) of every parameter of the live layout."""
        return (await self._command("weight_digests"))[0]["digests"]

    async def async_addresses(self) -> list[dict[str, int]]:
        """Per rank: name → address of every parameter and KV buffer of both layouts."""
        return [rank["addresses"] for rank in await self._command("addresses")]

    async def async_memory(self) -> list[dict[str, int]]:
        """Per rank: component → bytes that it takes now (memory/budget.py has the components)."""
        return [rank["components"] for rank in await self._command("memory")]

    # ---- the rest

    async def async_inject(self, fault: Fault) -> None:
        """Let the next switch that comes to this state go wrong. Raises ValueError without
        SwitchConfig(inject_faults=True), or for a rank or a layer that there is not."""
        if not self.config.inject_faults:
            raise ValueError(f"{fault} needs SwitchConfig(inject_faults=True)")
        if fault.rank >= self.ranks or fault.layer >= self.shape.layers:
            raise ValueError(f"{fault}: there are {self.ranks} ranks and {self.shape.layers} layers")
        await self._command("inject", fault=fault)

    async def async_abort(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort exactly this request, or all. An id that is not in flight is left alone."""
        self.watch.check()
        self.tokenizer_manager.abort_request(rid, abort_all)

    async def _command(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        """Run a command on all ranks in the same step. Returns their answers in rank order."""
        if self.config.policy == "off" and name not in STATIC_COMMANDS:
            raise ValueError(f"{name} needs switching, which is off (SwitchConfig(policy='off'))")
        self.tokenizer_manager.auto_create_handle_loop()
        answers = await self._within(
            self.tokenizer_manager.get_internal_state_communicator(Command(name=name, arguments=arguments)), name
        )
        return sorted((answer.internal_state for answer in answers), key=lambda state: state["rank"])

    async def _within(self, answer: Awaitable[Result], what: str) -> Result:
        timeout_s = 2 * self.config.timeout_s  # the ranks' own deadlines pass first, and their error says more
        return await self.watch.until_dead(
            answer, timeout_s, lambda: f"the ranks did not answer {what} within {timeout_s} s"
        )
