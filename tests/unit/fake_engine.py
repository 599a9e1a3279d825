"""An engine that dies when it is told to. tests/engine/test_recovery.py holds it to the real one (`contract`)."""

import asyncio
import zlib
from typing import Any

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import StepTrace, UpdateRecord
from moebius_engine.vitals import EngineDead, State

BUNDLE = 4  # tokens after which an unfinished request is reported; the real engine's is 50


def next_token(context: list[int], weights: int = 0) -> int:
    """Greedy: depends on all that came before, so that a wrong prompt of a resumed request shows."""
    return zlib.crc32(repr((context, weights)).encode()) % 500


def response(prompt: list[int], length: int, weights: int = 0) -> list[int]:
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(next_token([*prompt, *tokens], weights))
    return tokens


class FakeEngine:
    """Generates when `advance` is called."""

    def __init__(self, prompt_limit: int = 10_000):
        self.prompt_limit, self.config = prompt_limit, SwitchConfig()
        self.weights, self.version = 0, 0
        self.dead: EngineDead | None = None
        self.vitals = ()
        self.down = False
        self._died = asyncio.Event()
        self._step = 0
        self._live: dict[str, dict[str, Any]] = {}

    def die(self, message: str = "rank 1 (pid 7) was ended by SIGKILL (exit code -9)") -> None:
        self.dead = EngineDead(message)
        self._died.set()
        for request in self._live.values():
            if not request["answer"].done():
                request["answer"].set_exception(EngineDead(message))

    def advance(self, tokens: int = 1) -> None:
        """That many tokens for every request in flight."""
        for rid, request in list(self._live.items()):
            got = request["tokens"]
            for _ in range(min(tokens, request["wanted"] - len(got))):
                got.append(next_token([*request["prompt"], *got], self.weights))
            if len(got) == request["wanted"]:
                self._end(rid, {"type": "length", "length": len(got)})

    def _end(self, rid: str, reason: dict[str, Any]) -> None:
        request = self._live.pop(rid)
        if not request["answer"].done():
            request["answer"].set_result(_answer(request["tokens"], reason))

    def _check(self) -> None:
        if self.dead is not None:
            raise EngineDead(*self.dead.args)

    async def async_generate(self, input_ids, sampling_params, rid, return_logprob):
        self._check()
        if len(input_ids) > self.prompt_limit:
            return _answer([], {"type": "abort", "message": "shorten the prompt", "status_code": 400})
        if sampling_params["max_new_tokens"] == 0:
            return _answer([], {"type": "length", "length": 0})
        future = asyncio.get_running_loop().create_future()
        self._live[rid] = {
            "prompt": list(input_ids), "wanted": sampling_params["max_new_tokens"], "tokens": [], "answer": future,
        }  # fmt: skip
        return await future

    def so_far(self, rid):
        tokens = self._live[rid]["tokens"] if rid in self._live else []
        known = tokens[: len(tokens) // BUNDLE * BUNDLE]
        return list(known), [-1.0] * len(known)

    async def async_wait_dead(self):
        await self._died.wait()
        return self.dead

    def state(self):
        return State.READY if self.dead is None else State.DEAD

    async def async_health(self):
        self._check()
        return {"ok": True, "layout": "ep", "inflight": len(self._live), "weight_version": self.version}

    async def async_update_weights(self, named_tensors, flush_cache=True):
        self._check()
        pairs = list(named_tensors)
        await asyncio.sleep(0)
        self._check()
        self.weights, self.version = sum(int(tensor) for _, tensor in pairs), self.version + 1
        return UpdateRecord(seconds=0.5, bytes=1, tensors=len(pairs), layout="ep")

    async def async_begin_step(self, step, requests=None):
        self._check()
        self._step = step

    async def async_end_step(self):
        self._check()
        return StepTrace(step=self._step)

    async def async_abort(self, rid="", abort_all=False):
        self._check()
        for name in list(self._live):
            if abort_all or name == rid:
                self._end(name, {"type": "abort", "message": "Aborted"})

    def shutdown(self):
        self.down = True


def _answer(tokens, reason):
    logprobs = [(-1.0, token, None) for token in tokens]
    return {"output_ids": list(tokens), "meta_info": {"finish_reason": reason, "output_token_logprobs": logprobs}}


class Fleet:
    """Starts one FakeEngine after the other. failures: how many starts fail first."""

    def __init__(self, **arguments: Any):
        self.engines: list[FakeEngine] = []
        self.failures = 0
        self._arguments = arguments

    def __call__(self, model_path, ranks, switch, **server_args) -> FakeEngine:
        if self.engines and self.failures:
            self.failures -= 1
            raise RuntimeError("no memory for a new engine")
        self.engines.append(FakeEngine(**self._arguments))
        return self.engines[-1]

    @property
    def last(self) -> FakeEngine:
        return self.engines[-1]
