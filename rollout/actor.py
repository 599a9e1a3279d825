"""RolloutActor: the engine as a Ray actor. Batches in, samples out; weights in; one report a step.

The class is plain Python, so a process can hold one without Ray; `remote_actor` is the one place that hands it to Ray.
Every wait has a deadline: the engine's own (SwitchConfig.timeout_s), that of a restart (RecoveryConfig.wait_s), and
timeout_s of a batch.
"""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from moebius_engine.config import SwitchConfig
from moebius_engine.prometheus import HealthCollector
from moebius_engine.switch.faults import Fault
from moebius_engine.telemetry import StepReport, StepTrace, SwitchRecord, UpdateRecord
from moebius_engine.vitals import EngineDead
from rollout.metrics import JsonLinesSink, Sink, WandbSink
from rollout.phases import step_report
from rollout.recovery.asking import keep
from rollout.recovery.collector import LossCollector
from rollout.recovery.gate import Gate
from rollout.recovery.journal import Journal
from rollout.recovery.keeper import Keeper
from rollout.recovery.losses import Losses
from rollout.recovery.open_step import OpenStep
from rollout.recovery.settings import RecoveryConfig
from rollout.recovery.weights import LastWeights
from rollout.replay.dump import RequestDump
from rollout.sample import Sample, Sampling, per_sample


class RolloutActor:
    def __init__(
        self,
        model_path: str,
        ranks: int = 2,
        switch: SwitchConfig | Mapping[str, Any] | None = None,
        server_args: Mapping[str, Any] | None = None,
        metrics_dir: str | Path | None = None,
        dump_dir: str | Path | None = None,
        wandb: Mapping[str, Any] | None = None,
        recovery: RecoveryConfig | Mapping[str, Any] | None = None,
        engine_factory: Callable[..., Any] | None = None,
    ) -> None:
        """Starts the engine (about 25 s on CPU).

        switch: a SwitchConfig or its fields. server_args: further arguments of SGLang's engine. metrics_dir: where
        `steps.jsonl` is appended to, one StepReport a line. dump_dir: where the requests of each step are written, a
        file a step, for `moebius-rollout replay`. wandb: arguments of `wandb.init` for a run of its own. recovery: a
        RecoveryConfig or its fields: what happens if the engine dies (docs/recovery.md).
        engine_factory: called as SwitchingEngine, which it is by default. Raises ValueError for settings that do not
        fit, before any process starts.
        """
        config = switch if isinstance(switch, SwitchConfig) else SwitchConfig(**(switch or {}))
        rules = recovery if isinstance(recovery, RecoveryConfig) else RecoveryConfig(**(recovery or {}))
        self._config = config
        self._sinks: list[Sink] = []
        if metrics_dir is not None:
            self._sinks.append(JsonLinesSink(Path(metrics_dir) / "steps.jsonl"))
        if wandb is not None:
            self._sinks.append(WandbSink(dict(wandb)))
        self._dump = None if dump_dir is None else RequestDump(Path(dump_dir))
        self._journal, self._losses, self._reported = Journal(rules.on_policy), Losses(), Losses()
        self._weights, self._gate = LastWeights(rules.keep_weights), Gate()
        self._stale = ""  # why the engine's weights are not those that were asked for
        # After the sinks: a folder or a wandb setting that does not work must not leave processes behind.
        start = engine_factory or _switching_engine()
        self._keeper = Keeper(
            lambda: start(model_path, ranks=ranks, switch=config, **(server_args or {})),
            self._prepare,
            rules,
            self._losses,
        )
        self._numbers = itertools.count()  # of the samples, as they are sent
        self._step = OpenStep()
        self._total = 0
        self._lengths: list[int] = []
        self._weight_version = 0
        self._weight_update_s = 0.0
        self._reports: list[StepReport] = []

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        sampling: Sampling | Sequence[Sampling] | None = None,
        request_ids: Sequence[str] | None = None,
        timeout_s: float = 3600.0,
    ) -> list[list[Sample]]:
        """n samples for each prompt, in the order of the prompts.

        prompts: token ids. sampling: SGLang's sampling parameters for all, or one mapping a sample; with one for all,
        sample i gets `sampling_seed` + i if that is given, which needs SwitchConfig(seeded=True). request_ids: one a
        sample. Both lists have len(prompts) * n entries, the samples of a prompt side by side. timeout_s: when it has
        passed, what is unfinished is aborted and returned with the tokens it has.

        A row that the engine refuses comes back as an "abort" sample and does not touch the others. If the engine
        dies, the batch goes on with the next one. Raises ValueError for arguments that do not fit together,
        TimeoutError if the engine does not answer the abort, and EngineDead if the engine cannot be started again.
        """
        if n < 1 or timeout_s <= 0:
            raise ValueError(f"n must be at least 1 and timeout_s above 0, got n={n}, timeout_s={timeout_s}")
        count = len(prompts) * n
        samplings = per_sample(sampling, count)
        ids = [f"{uuid.uuid4().hex}-{index}" for index in range(count)] if request_ids is None else list(request_ids)
        if len(ids) != count:
            raise ValueError(f"request_ids has {len(ids)} entries for {count} samples; give one for each")
        if count == 0:
            return []
        tasks = {
            asyncio.create_task(self._sample(prompts[index // n], samplings[index], ids[index])): ids[index]
            for index in range(count)
        }
        self._total += count
        for task in tasks:  # the first error is raised; where all fail, asyncio would log each of the others
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            done, late = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((error for task in done if (error := task.exception())), None)
            if failed is not None:
                raise failed
            if late:
                await self.abort([tasks[task] for task in late])
                _, silent = await asyncio.wait(late, timeout=self._config.timeout_s)
                if silent:
                    raise TimeoutError(
                        f"{len(silent)} of {count} requests were aborted after {timeout_s} s and did not end within "
                        f"{self._config.timeout_s} s more; check the engine with health()"
                    )
            samples = [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        return [samples[index : index + n] for index in range(0, count, n)]

    async def _sample(self, prompt: Sequence[int], sampling: Sampling, request_id: str) -> Sample:
        number, first_version = next(self._numbers), self._weight_version
        with self._journal.promised(request_id, prompt, sampling) as promise:
            finish_reason = await keep(promise, self._keeper, self._gate, self._usable_version)
        parts = promise.parts
        tokens = promise.tokens
        self._lengths.append(len(tokens))
        if promise.deaths:
            self._losses.resumed += 1
        if self._dump is not None:
            self._dump.write(number, request_id, prompt, tokens, sampling, finish_reason)
        return Sample(
            request_id=request_id,
            output_ids=tokens,
            logprobs=promise.logprobs,
            finish_reason=finish_reason,
            weight_version_begin=parts[0].weight_version if parts else first_version,
            weight_version_end=self._weight_version,
            resumed=promise.deaths,
            weight_versions=tuple(part.weight_version for part in parts),
        )

    def _usable_version(self) -> int:
        if self._stale:
            raise EngineDead(self._stale)
        return self._weight_version

    def progress(self) -> dict[str, int]:
        """Samples asked for since `begin_step`: {"total", "done", "inflight"}, also while a batch runs."""
        inflight = len(self._journal)
        return {"total": self._total, "done": self._total - inflight, "inflight": inflight}

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], flush_cache: bool = True) -> UpdateRecord:
        """Loads a full set of (name, tensor) pairs, by their Hugging Face names. The weight version goes up by one.

        Waits for the requests in flight; those that come meanwhile wait for it. flush_cache=False keeps cached
        prefixes, whose KV is that of the old weights. Raises ValueError for a missing, misnamed, misshapen or extra
        tensor; EngineDead if the engine dies meanwhile and the pairs cannot be read again, as those of a generator: the
        next engine has the weights before them.
        """
        copies: list[tuple[str, Any]] = []
        async with self._gate.update():
            if isinstance(named_tensors, Collection):  # the engine looks at all of its names before it writes anything
                record = await self._keeper.run(
                    lambda engine: engine.async_update_weights(named_tensors, flush_cache=flush_cache)
                )
                list(self._weights.copying(named_tensors, copies))
            else:
                engine, pairs = await self._keeper.ready(), self._weights.copying(named_tensors, copies)
                record = await engine.async_update_weights(pairs, flush_cache=flush_cache)
            if record.tensors:
                self._weights.complete(copies)
                self._weight_version += 1
                self._stale = ""
            self._weight_update_s += record.seconds
        return record

    async def _prepare(self, engine: Any) -> None:
        """Brings a new engine to where the last one was: its weights, its step."""
        if self._weights.pairs is not None:
            await engine.async_update_weights(self._weights.pairs)
        elif self._weights.lost:
            self._stale = (
                "the engine died and was started again with the checkpoint's weights: recovery.keep_weights=False kept "
                "none of a later update; update the weights, then send the requests again"
            )
        if self._step.number is not None:
            await engine.async_begin_step(self._step.number, len(self._journal))
            self._step.begun_again(sum(self._lengths) + self._journal.tokens(), len(self._journal))

    async def switch(self, layout: str) -> SwitchRecord | None:
        """SwitchingEngine.async_switch; by the next engine, if one dies under it."""
        return await self._keeper.run(lambda engine: engine.async_switch(layout))

    async def inject(self, fault: Fault) -> None:
        """SwitchingEngine.async_inject: needs SwitchConfig(inject_faults=True)."""
        await self._keeper.run(lambda engine: engine.async_inject(fault))

    async def begin_step(self, step: int, requests: int | None = None) -> None:
        """Starts a rollout step; `requests` is how many samples will be asked for, if known."""
        await self._keeper.run(lambda engine: engine.async_begin_step(step, requests))
        self._step = OpenStep(step)
        self._total = len(self._journal)
        self._lengths = []
        if self._dump is not None:
            self._dump.begin(step)

    async def end_step(self) -> StepReport:
        """Ends the step and reports it, also to the files and to wandb."""

        async def ended(engine: Any) -> tuple[StepTrace, int]:
            return await engine.async_end_step(), engine.config.high  # where a calibration found the threshold, its own

        last, threshold = await self._keeper.run(ended)
        trace = self._step.whole(last)
        if self._dump is not None:
            self._dump.end()
        losses = replace(self._losses)
        report = step_report(trace, self._lengths, threshold, self._weight_update_s, losses.since(self._reported))
        self._weight_update_s, self._reported = 0.0, losses
        self._reports.append(report)
        for sink in self._sinks:
            sink.write(report)
        return report

    async def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """Aborts these requests, or all; returns the ids that were in flight. An id means itself only, never the
        ids that begin with it; one that is not in flight is left out."""
        live = {promise.request_id: promise for promise in self._journal}
        asked = [request_id for request_id in (live if request_ids is None else request_ids) if request_id in live]
        for request_id in asked:
            live[request_id].aborted = True  # it may wait for the next engine, or have to
        await self._keeper.wake()
        await self._gate.wake()
        if engine := self._keeper.engine:
            with contextlib.suppress(EngineDead):
                if request_ids is None:
                    await engine.async_abort(abort_all=True)
                else:
                    for request_id in asked:
                        await engine.async_abort(rid=request_id)
        return asked

    async def health(self) -> dict[str, Any]:
        """{"ok", "state", "inflight", "weight_version", "restarts", "died_of"}, at once where there is no engine to
        ask; else with what the engine's own health says: {"layout", "weights_valid", ...}.

        state: a moebius_engine.vitals.State. died_of: of the last engine that died; empty if none did.
        """
        own = {
            "state": self._keeper.state(),
            "weight_version": self._weight_version,
            "restarts": self._losses.restarts,
            "died_of": self._keeper.died_of,
        }
        if engine := self._keeper.engine:
            with contextlib.suppress(EngineDead):
                return {**await engine.async_health(), **own}
        return {"ok": False, "inflight": len(self._journal), **own, "state": self._keeper.state()}

    def prometheus(self) -> str:
        """Health, restarts and what they cost, in the text format of Prometheus: at once, whatever the engine does."""
        registry = CollectorRegistry()
        registry.register(HealthCollector(self._keeper.state, self._keeper.vitals))
        registry.register(LossCollector(self._losses, self._journal))
        return generate_latest(registry).decode()

    def report(self) -> list[StepReport]:
        """The reports of all steps so far."""
        return list(self._reports)

    def shutdown(self) -> None:
        """Stops the engine and closes the files."""
        self._keeper.close()
        for sink in self._sinks:
            sink.close()
        if self._dump is not None:
            self._dump.end()


def _switching_engine() -> Callable[..., Any]:
    from moebius_engine.engine import SwitchingEngine  # imports SGLang, which takes seconds

    return SwitchingEngine


def remote_actor(**options: Any) -> Any:
    """RolloutActor as a Ray actor class with these Ray options (num_cpus, num_gpus, name, ...).

    `remote_actor(num_gpus=8).remote(model_path, ranks=8)` starts one.
    """
    import ray

    return ray.remote(RolloutActor).options(**options)
