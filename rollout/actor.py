"""RolloutActor: the engine as a Ray actor. Batches in, samples out; weights in; one report a step.

The class is plain Python, so a process can hold one without Ray; `remote_actor` is the one place that hands it to Ray.
Every wait has a deadline: the engine's own (SwitchConfig.timeout_s), and timeout_s of a batch.
"""

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import StepReport, UpdateRecord
from rollout.metrics import JsonLinesSink, Sink, WandbSink
from rollout.phases import step_report
from rollout.replay.dump import RequestDump

Sampling = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One response. `finish_reason` is SGLang's: {"type": "stop" | "length" | "abort", ...}; a row that was refused
    has type "abort", a "message" and "status_code" 400, and no tokens."""

    request_id: str
    output_ids: list[int]
    logprobs: list[float]  # of output_ids, under the weights that drew them
    finish_reason: dict[str, Any]
    weight_version_begin: int  # weight sets received when it was submitted
    weight_version_end: int  # the same when it ended; differs if an update came in between


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
        engine_factory: Callable[..., Any] | None = None,
    ) -> None:
        """Starts the engine (about 25 s on CPU).

        switch: a SwitchConfig or its fields. server_args: further arguments of SGLang's engine. metrics_dir: where
        `steps.jsonl` is appended to, one StepReport a line. dump_dir: where the requests of each step are written, a
        file a step, for `moebius-rollout replay`. wandb: arguments of `wandb.init` for a run of its own.
        engine_factory: called as SwitchingEngine, which it is by default. Raises ValueError for settings that do not
        fit, before any process starts.
        """
        config = switch if isinstance(switch, SwitchConfig) else SwitchConfig(**(switch or {}))
        self._config = config
        self._sinks: list[Sink] = []
        if metrics_dir is not None:
            self._sinks.append(JsonLinesSink(Path(metrics_dir) / "steps.jsonl"))
        if wandb is not None:
            self._sinks.append(WandbSink(dict(wandb)))
        self._dump = None if dump_dir is None else RequestDump(Path(dump_dir))
        # After the sinks: a folder or a wandb setting that does not work must not leave processes behind.
        self._engine = (engine_factory or _switching_engine())(
            model_path, ranks=ranks, switch=config, **(server_args or {})
        )
        self._live: Counter[str] = Counter()  # a duplicate id is the engine's to refuse, so an id can count twice
        self._numbers = itertools.count()  # of the samples, as they are sent
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
        sample i gets `sampling_seed` + i if that is given, which needs SwitchConfig(seeded=True).
        request_ids: one a sample. Both lists have
        len(prompts) * n entries, the samples of a prompt side by side. timeout_s: when it has passed, what is
        unfinished is aborted and returned with the tokens it has.

        A row that the engine refuses comes back as an "abort" sample and does not touch the others. Raises ValueError
        for arguments that do not fit together, TimeoutError if the engine does not answer the abort, and what the
        engine raised if it failed as a whole.
        """
        if n < 1 or timeout_s <= 0:
            raise ValueError(f"n must be at least 1 and timeout_s above 0, got n={n}, timeout_s={timeout_s}")
        count = len(prompts) * n
        samplings = _per_sample(sampling, count)
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
        version, number = self._weight_version, next(self._numbers)
        self._live[request_id] += 1
        try:
            answer = await self._engine.async_generate(
                input_ids=list(prompt), sampling_params=dict(sampling), rid=request_id, return_logprob=True
            )
        except ValueError as error:  # a bad row, refused at the door
            answer = {"output_ids": [], "meta_info": {"finish_reason": _refusal(error)}}
        except asyncio.CancelledError:  # nobody waits for it any more: do not let it run on
            await self._engine.async_abort(rid=request_id)
            raise
        finally:
            self._live[request_id] -= 1
            if not self._live[request_id]:
                del self._live[request_id]
        meta = answer["meta_info"]
        self._lengths.append(len(answer["output_ids"]))
        if self._dump is not None:
            self._dump.write(number, request_id, prompt, answer["output_ids"], sampling, meta["finish_reason"])
        return Sample(
            request_id=request_id,
            output_ids=list(answer["output_ids"]),
            logprobs=[logprob for logprob, *_ in meta.get("output_token_logprobs") or ()],
            finish_reason=meta["finish_reason"],
            weight_version_begin=version,
            weight_version_end=self._weight_version,
        )

    def progress(self) -> dict[str, int]:
        """Samples asked for since `begin_step`: {"total", "done", "inflight"}, also while a batch runs."""
        inflight = self._live.total()
        return {"total": self._total, "done": self._total - inflight, "inflight": inflight}

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], flush_cache: bool = True) -> UpdateRecord:
        """Loads a full set of (name, tensor) pairs, by their Hugging Face names. The weight version goes up by one.

        Raises ValueError for a missing, misnamed, misshapen or extra tensor.
        """
        record: UpdateRecord = await self._engine.async_update_weights(named_tensors, flush_cache=flush_cache)
        self._weight_update_s += record.seconds
        self._weight_version = (await self.health())["weight_version"]
        return record

    async def begin_step(self, step: int, requests: int | None = None) -> None:
        """Starts a rollout step; `requests` is how many samples will be asked for, if known."""
        await self._engine.async_begin_step(step, requests)
        self._total = self._live.total()
        self._lengths = []
        if self._dump is not None:
            self._dump.begin(step)

    async def end_step(self) -> StepReport:
        """Ends the step and reports it, also to the files and to wandb."""
        trace = await self._engine.async_end_step()
        if self._dump is not None:
            self._dump.end()
        report = step_report(trace, self._lengths, self._engine.config.high, self._weight_update_s)
        self._weight_update_s = 0.0
        self._reports.append(report)
        for sink in self._sinks:
            sink.write(report)
        return report

    async def abort(self, request_ids: Iterable[str] | None = None) -> list[str]:
        """Aborts these requests, or all; returns the ids that were in flight. An id means itself only, never the
        ids that begin with it; one that is not in flight is left out."""
        if request_ids is None:
            asked = list(self._live)
            await self._engine.async_abort(abort_all=True)
            return asked
        asked = [request_id for request_id in request_ids if request_id in self._live]
        for request_id in asked:
            await self._engine.async_abort(rid=request_id)
        return asked

    async def health(self) -> dict[str, Any]:
        """The engine's health: {"ok", "layout", "inflight", "weights_valid", "weight_version", ...}."""
        return await self._engine.async_health()

    def report(self) -> list[StepReport]:
        """The reports of all steps so far."""
        return list(self._reports)

    def shutdown(self) -> None:
        """Stops the engine and closes the files."""
        self._engine.shutdown()
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


def _per_sample(sampling: Sampling | Sequence[Sampling] | None, count: int) -> list[Sampling]:
    if sampling is not None and not isinstance(sampling, Mapping):
        if len(sampling) != count:
            raise ValueError(f"sampling has {len(sampling)} entries for {count} samples; give one for each, or one")
        return list(sampling)
    sampling = sampling or {}
    if "n" in sampling:
        raise ValueError(f"sampling must not hold 'n' (got {sampling['n']}): give it as the argument n")
    seed = sampling.get("sampling_seed")
    if seed is None:
        return [sampling] * count
    return [{**sampling, "sampling_seed": seed + index} for index in range(count)]


def _refusal(error: ValueError) -> dict[str, Any]:
    return {"type": "abort", "message": str(error), "status_code": 400}
