"""verl's rollout server with a SwitchingEngine inside: one Ray actor a replica.

verl talks to it by Ray calls alone. SGLang's HTTP server is not started: requests that come that way would pass by the
engine's door and belong to no step. The address that verl knows a replica by is the engine's own port.
"""

import itertools
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutMode, TokenOutput
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

from moebius_engine.engine import SwitchingEngine
from moebius_engine.telemetry import StepReport, UpdateRecord
from rollout.replay.dump import RequestDump
from rollout.verl_plugin import settings
from rollout.verl_plugin.seeds import Seeds
from rollout.verl_plugin.steps import Steps

_ABORTED = "Aborted"  # SGLang's message of a request that was asked to end (schedule_batch.FINISH_ABORT)


class MoebiusServer(SGLangHttpServer):
    engine: SwitchingEngine
    steps: Steps
    seeds: Seeds
    dump: RequestDump | None

    async def launch_server(self, master_address: str | None = None, master_port: int | None = None) -> None:
        """Starts the engine. Raises ValueError for settings or a model that do not fit, before its processes start."""
        found = settings.read(self.config)
        arguments = settings.engine_arguments(self.config, get_platform().device_name) | {
            "trust_remote_code": self.model_config.trust_remote_code,
            "base_gpu_id": self.base_gpu_id,
        }
        # Before the engine: a folder that cannot be made must not leave processes behind.
        self.dump = None
        if found.dump_dir is not None:
            self.dump = RequestDump(found.dump_dir / f"replica_{self.replica_rank}")
        self.engine = SwitchingEngine(
            str(self.model_config.local_path), ranks=found.ranks, switch=found.switch, **arguments | found.server_args
        )
        self.steps = Steps(self.engine, self.dump)
        self._released: set[str] = set()  # of the tags of memory
        self._numbers = itertools.count()  # of the requests, as they are sent
        self.seeds = Seeds(self.config.seed, self.replica_rank)
        self.tokenizer_manager = self.engine.tokenizer_manager
        self._server_port = self.engine.server_args.port

    # ---- generation

    async def generate(  # type: ignore[override]  # without the arguments of disaggregated prefill
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
    ) -> TokenOutput:
        """One response, as verl's server gives it. An aborted one has stop_reason "abort" and the tokens it got.

        extra_fields["global_steps"]: the version of the weights that it was generated with.

        Raises ValueError for a request that the engine refuses, RuntimeError if the engine cannot generate (EngineDead
        if it has died): verl would ask again for ever for what comes back as aborted.
        """
        if image_data or video_data:
            raise ValueError("rollout.name=moebius: images and video have no rule for a switch")
        sampling = dict(sampling_params)
        with_logprobs = sampling.pop("logprobs", False)
        sampling["max_new_tokens"] = self._budget(len(prompt_ids), sampling)
        async with self.steps.request(self._step) as lengths:
            number = next(self._numbers)
            version = self.global_steps  # of the weights; they stay until this request has ended (update_bucket)
            if self.engine.config.seeded:
                sampling["sampling_seed"] = self.seeds.draw(prompt_ids, self._step())
            answer = await self.engine.async_generate(
                input_ids=list(prompt_ids), sampling_params=sampling, rid=request_id, return_logprob=with_logprobs
            )
            lengths.append(len(answer["output_ids"]))
            reason = answer["meta_info"]["finish_reason"]
            if self.dump is not None:
                self.dump.write(number, request_id, prompt_ids, answer["output_ids"], sampling, reason)
        if reason["type"] == "abort" and reason["message"] != _ABORTED:
            error = ValueError if reason.get("status_code") == 400 else RuntimeError
            raise error(f"request {request_id}: {reason['message']}")
        tokens, logprobs = list(answer["output_ids"]), None
        if with_logprobs:
            logprobs = [float(logprob) for logprob, *_ in answer["meta_info"].get("output_token_logprobs") or ()]
            if len(logprobs) != len(tokens):  # as verl: a response without its logprobs cannot be trained on
                tokens, logprobs = [], []
        return TokenOutput(
            token_ids=tokens,
            log_probs=logprobs,
            stop_reason=reason["type"],
            extra_fields={"global_steps": version},  # verl's client makes the first and the last of several calls
        )

    def _budget(self, prompt_tokens: int, sampling: dict[str, Any]) -> int:
        """Tokens that a response may have, by verl's rule. Takes both names of the limit out of `sampling`."""
        config = self.config
        assert config.max_model_len is not None  # SGLangHttpServer has set it
        room = config.max_model_len - prompt_tokens - 1
        if room < 0:
            raise ValueError(f"a prompt of {prompt_tokens} tokens exceeds rollout.max_model_len={config.max_model_len}")
        asked = [sampling.pop(name, None) for name in ("max_new_tokens", "max_tokens")]
        limit = next((value for value in asked if value is not None), None)
        if limit is None:
            limit = min(config.response_length, config.prompt_length + config.response_length - prompt_tokens)
        return max(0, min(limit, room))

    def _step(self) -> int:
        """The trainer's step that the weights generate for."""
        return (self.global_steps or 0) + 1

    async def abort_all_requests(self) -> None:
        """Ends all requests with the tokens they have, and with them the step; new ones wait for resume_generation."""
        timeout_s = self.engine.config.timeout_s
        # Before SGLang's own pause: what it holds back counts as in flight, and would not end.
        await self.steps.pause()
        await self.engine.watch.until_dead(
            super().abort_all_requests(), timeout_s, lambda: f"requests did not end within {timeout_s} s of their abort"
        )
        await self.steps.end()

    async def resume_generation(self) -> None:
        """Requests that have waited go on, in a new step."""
        try:
            await self.engine.watch.until_dead(super().resume_generation())
        finally:
            await self.steps.resume()  # also if the engine has died, which they then learn

    # ---- steps

    async def end_step(self, keep: bool = True) -> None:
        """Ends the rollout step, if one is open; `keep` it for take_reports, or not where it was no training step."""
        await self.steps.end(keep)

    async def take_reports(self) -> tuple[list[StepReport], list[UpdateRecord]]:
        """Steps that have ended and weight updates that were taken since the last call."""
        return self.steps.take()

    # ---- weights

    async def update_bucket(self, request: UpdateWeightsFromTensorReqInput) -> None:
        """Takes one bucket of a weight update, once the requests in flight have ended.

        Raises ValueError if it is refused, TimeoutError if requests or ranks do not get there in time.
        """
        await self.steps.end()
        timeout_s = self.engine.config.timeout_s
        success, message = await self.engine.watch.until_dead(
            self.tokenizer_manager.update_weights_from_tensor(request, None),
            timeout_s,
            lambda: f"the ranks did not take a bucket of weights within {timeout_s} s",
        )
        if not success:
            raise ValueError(message.split(" | ")[0])  # SGLang joins the ranks' messages, which are equal

    async def fail_update(self) -> None:
        """After a bucket that was refused: no generation until a full set has come, even if nothing was written."""
        await self.engine.async_invalidate_weights()

    async def finish_update(self, seconds: float, tensors: int, size: int) -> None:
        """After the last bucket. seconds, tensors, size [bytes]: what the sender counted, for the step's report.

        Raises RuntimeError if the set is not full; the engine refuses to generate until a full one has come.
        """
        health = await self.engine.async_health()
        if not health["weights_valid"]:
            raise RuntimeError(health["weights_reason"])
        self.steps.updated(UpdateRecord(seconds=seconds, bytes=size, tensors=tensors, layout=health["layout"]))

    async def clear_kv_cache(self) -> None:
        """Drops cached prefixes. Raises RuntimeError while requests are in flight."""
        timeout_s = self.engine.config.timeout_s
        flushed = await self.engine.watch.until_dead(
            self.tokenizer_manager.flush_cache(),
            timeout_s,
            lambda: f"the ranks did not answer flush_cache within {timeout_s} s",
        )
        if not flushed.success:
            raise RuntimeError("cached prefixes cannot be dropped while requests are in flight")

    # ---- memory: both directions end in release_memory and resume_memory

    async def sleep(self) -> None:
        if self.config.free_cache_engine:
            await self.release_memory(self._sleeping())

    async def wake_up(self) -> None:
        if self.rollout_mode == RolloutMode.HYBRID:
            raise ValueError("a hybrid replica is woken by its weight update, not by wake_up")
        await self.resume_memory(self._sleeping())

    async def release_kv_cache(self) -> None:
        if self.config.free_cache_engine:
            await self.release_memory(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        if self.config.free_cache_engine:
            await self.resume_memory(["kv_cache"])

    def _sleeping(self) -> list[str]:
        """As verl: a standalone replica shares its devices with no trainer, so its weights stay."""
        return ["kv_cache"] if self.rollout_mode == RolloutMode.STANDALONE else ["kv_cache", "weights"]

    async def release_memory(self, tags: list[str]) -> None:
        """Gives device memory back by tag, "weights" or "kv_cache"; on a CPU in name only. The step has ended. What has
        been given back already is left out: verl releases the KV cache alone, and later all.

        Raises RuntimeError while requests are in flight.
        """
        if fresh := [tag for tag in tags if tag not in self._released]:
            await self.engine.async_release_memory_occupation(fresh)
            self._released |= set(fresh)

    async def resume_memory(self, tags: list[str]) -> None:
        """Takes it again. Weights come with the update that follows."""
        await self.engine.async_resume_memory_occupation(tags)
        self._released -= set(tags)
