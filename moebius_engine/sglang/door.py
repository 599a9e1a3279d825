"""The door of the engine: each row of a batch is checked before SGLang sees it, and only the bad rows fail.

SGLang 0.5.12 lets some bad rows through to the scheduler, where an empty prompt ends the process, and fails the whole
batch for others.
"""

import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from sglang.srt.entrypoints.engine import Engine

from moebius_engine.sglang.admission import check_prompt, check_sampling

_SIGNATURE = inspect.signature(Engine.generate)

# What a switch cannot carry yet. Argument → why.
_REFUSED = {
    "image_data": "multimodal input has no rule for a switch",
    "audio_data": "multimodal input has no rule for a switch",
    "video_data": "multimodal input has no rule for a switch",
    "lora_path": "adapters have one layout",
    "custom_logit_processor": "its state has no rule for a switch",
    "return_routed_experts": "routes are recorded by KV row, which a switch changes",
    "session_params": "a session's KV has no rule for a switch",
    "bootstrap_host": "prefill and decode run in one engine",
}

Refused = dict[int, dict[str, Any]]


def generate(engine, upstream: Callable, args: tuple, kwargs: dict[str, Any]):
    """Blocking generate: dict, list of dicts, or an iterator of chunks, as upstream."""
    call = _Call(engine, args, kwargs)
    if call.stream:
        return call.stream_rows(upstream(**call.accepted()) if call.rows else iter(()))
    return call.merge(upstream(**call.accepted()) if call.rows else [])


async def async_generate(engine, upstream: Callable, args: tuple, kwargs: dict[str, Any]):
    """The same for use inside an event loop."""
    call = _Call(engine, args, kwargs)
    if call.stream:
        return call.astream_rows(await upstream(**call.accepted()) if call.rows else _nothing())
    return call.merge(await upstream(**call.accepted()) if call.rows else [])


class _Call:
    """One call of generate: its rows that pass, and answers for those that do not."""

    def __init__(self, engine, args: tuple, kwargs: dict[str, Any]):
        bound = _SIGNATURE.bind(engine, *args, **kwargs)
        bound.apply_defaults()
        self._arguments = dict(bound.arguments)
        del self._arguments["self"]
        for name, why in _REFUSED.items():
            if self._arguments[name]:
                raise ValueError(f"{name} is not supported by a switching engine: {why}")
        self.stream = self._arguments["stream"]
        key = "input_ids" if self._arguments["input_ids"] is not None else "prompt"
        prompts = self._arguments[key]
        if prompts is None:
            raise ValueError("generate needs input_ids or prompt")
        self._single = isinstance(prompts, str) or not prompts or isinstance(prompts[0], int)
        self._key, self._prompts = key, [prompts] if self._single else list(prompts)
        count = len(self._prompts)
        self._params = _rows(self._arguments["sampling_params"] or {}, count, "sampling_params")
        self._rids = self._request_ids(count)
        self.refused: Refused = {}
        seen: set[str] = set()
        live = engine.tokenizer_manager.rid_to_state
        for row, (prompt, params, rid) in enumerate(zip(self._prompts, self._params, self._rids, strict=True)):
            message = self._check(engine, prompt, params)
            if rid in live or rid in seen:
                message = f"rid {rid!r} is already in use: give every request its own id"
            seen.add(rid)
            if message:
                self.refused[row] = _abort(rid, message, prompt)
        self.rows = [row for row in range(count) if row not in self.refused]

    def _request_ids(self, count: int) -> list[str]:
        rid = self._arguments["rid"]
        if rid is None:
            return [uuid.uuid4().hex for _ in range(count)]
        return _rows(rid, count, "rid")

    def _check(self, engine, prompt, params: dict[str, Any]) -> str | None:
        vocab_size = engine.shape.vocab_size
        if self._key == "input_ids":
            message = check_prompt(prompt, vocab_size=vocab_size, context_len=engine.context_len)
        else:
            message = None if prompt else "prompt is empty: give at least one token"
        has_tokenizer = not engine.server_args.skip_tokenizer_init
        return message or check_sampling(params, vocab_size=vocab_size, has_tokenizer=has_tokenizer)

    def accepted(self) -> dict[str, Any]:
        """Arguments for upstream: the rows that passed."""
        arguments = dict(self._arguments)
        count = len(self._prompts)
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "priority"):
            value = arguments[name]
            if isinstance(value, list) and len(value) == count and not self._single:
                arguments[name] = [value[row] for row in self.rows]
        arguments[self._key] = [self._prompts[row] for row in self.rows]
        arguments["sampling_params"] = [self._params[row] for row in self.rows]
        arguments["rid"] = [self._rids[row] for row in self.rows]
        if self._single:
            for name in (self._key, "sampling_params", "rid"):
                (arguments[name],) = arguments[name]
        return arguments

    def merge(self, answers) -> Any:
        """Answers of all rows in order, as upstream would return them."""
        if self._single:
            return self.refused[0] if self.refused else answers
        samples = len(answers) // len(self.rows) if self.rows else 1  # n > 1 samples a row
        merged: list[dict[str, Any]] = []
        given = iter(answers)
        for row in range(len(self._prompts)):
            merged.extend([self.refused[row]] if row in self.refused else [next(given) for _ in range(samples)])
        return merged

    def stream_rows(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        yield from self._refused_chunks()
        for chunk in chunks:
            yield self._numbered(chunk)

    async def astream_rows(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        for chunk in self._refused_chunks():
            yield chunk
        async for chunk in chunks:
            yield self._numbered(chunk)

    def _refused_chunks(self) -> Iterator[dict[str, Any]]:
        for row, answer in self.refused.items():
            yield answer if self._single else {**answer, "index": row}

    def _numbered(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A batch's chunk carries the index among the rows that upstream saw: give it the caller's."""
        return {**chunk, "index": self.rows[chunk["index"]]} if "index" in chunk else chunk


def _rows(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for all or one each")
    return value


def _abort(rid: str, message: str, prompt) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "abort", "message": message, "status_code": 400},
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else 0,
            "completion_tokens": 0,
        },
    }


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    for chunk in ():
        yield chunk
