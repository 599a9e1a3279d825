"""The door of the engine: each row of a batch is checked before SGLang sees it, and only the bad rows fail.

SGLang 0.5.12 lets some bad rows through to the scheduler, where an empty prompt ends the process, and fails the whole
batch for others.
"""

import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sglang.srt.entrypoints.engine import Engine

from moebius_engine.sglang.admission import (
    MOST_SAMPLES,
    Limits,
    check_logprobs,
    check_prompt,
    check_rid,
    check_sampling,
)

_GENERATE = inspect.signature(Engine.generate)
_SIGNATURE = _GENERATE.replace(parameters=list(_GENERATE.parameters.values())[1:])  # without self
ARGUMENTS = tuple(_SIGNATURE.parameters)

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
    "token_ids_logprob": "SGLang 0.5.12 crashes when it prefills such a request together with others (logprob.py:154)",
}

# What may be given once or for each row → SGLang's default, which it sets only where nothing is given for any row.
_LOGPROBS = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}


class _Sample(NamedTuple):
    """One request: the n samples of a row are n of them. refused: its answer if it is not let in."""

    rid: str
    prompt: Any
    params: dict[str, Any]
    logprobs: tuple[Any, ...]  # in the order of _LOGPROBS
    refused: dict[str, Any] | None


def generate(engine, upstream: Callable, args: tuple, kwargs: dict[str, Any]):
    """Blocking generate: dict, list of dicts, or an iterator of chunks, as upstream."""
    call = Call(engine, _arguments(args, kwargs))
    if call.stream:
        return call.stream_rows(upstream(**call.accepted()) if call.let_in else iter(()))
    return call.merge(upstream(**call.accepted()) if call.let_in else [])


async def async_generate(engine, upstream: Callable, args: tuple, kwargs: dict[str, Any]):
    """The same for use inside an event loop."""
    call = Call(engine, _arguments(args, kwargs))
    if call.stream:
        return call.astream_rows(await upstream(**call.accepted()) if call.let_in else _nothing())
    return call.merge(await upstream(**call.accepted()) if call.let_in else [])


async def refuse_score(*args: Any, **kwargs: Any) -> None:
    """In place of TokenizerManager.score_request, which asks for logprobs of given tokens. Raises ValueError."""
    raise ValueError(f"score is not supported by a switching engine: {_REFUSED['token_ids_logprob']}")


def _arguments(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


class Call:
    """One call of generate: its samples in the order of the answers, and which of them are let in.

    arguments: all of ARGUMENTS. Raises ValueError for what fails the call as a whole.

    A row's n samples stand together, with ids rid_0 ... rid_(n-1). They are given to SGLang as requests of their own:
    its own n > 1 gives them ids that nobody can abort, and leaves some in its table for ever.
    """

    def __init__(self, engine, arguments: dict[str, Any]):
        self._arguments = arguments
        for name, why in _REFUSED.items():
            if self._arguments[name]:
                raise ValueError(f"{name} is not supported by a switching engine: {why}")
        if self._arguments["return_hidden_states"] and not engine.server_args.enable_return_hidden_states:
            raise ValueError("return_hidden_states needs an engine started with enable_return_hidden_states=True")
        priority = self._arguments["priority"]
        if priority is not None and type(priority) is not int:
            raise ValueError(f"priority={priority!r} must be an integer")
        self.stream = self._arguments["stream"] = bool(self._arguments["stream"])
        rows, single = _prompts(self._arguments)
        samples = self._samples(engine, rows)
        self._one_answer = single and len(samples) == 1
        self._all = samples
        self.let_in = [index for index, sample in enumerate(samples) if sample.refused is None]

    def _samples(self, engine, rows: list[Any]) -> list[_Sample]:
        limits = _limits(engine)
        texts = self._arguments["prompt"] is not None
        columns = [_column(self._arguments[name], len(rows), name) for name in ("sampling_params", "rid", *_LOGPROBS)]
        live = engine.tokenizer_manager.rid_to_state
        seen: set[str] = set()
        samples: list[_Sample] = []
        for prompt, params, rid, return_logprob, start, top in zip(rows, *columns, strict=True):
            params = {} if params is None else params
            rid = uuid.uuid4().hex if rid is None else rid
            message, prompt = _tokenize(engine, prompt) if texts else (None, prompt)
            length = len(prompt) if isinstance(prompt, list) else 0
            message = (
                message
                or check_prompt(prompt, limits)
                or check_sampling(params, length, limits)
                or check_logprobs(return_logprob, start, top, length, limits)
                or check_rid(rid)
            )
            for sample_rid, sample_params in _expand(rid, params):
                own = message
                if not own and (sample_rid in live or sample_rid in seen):
                    own = f"rid {sample_rid!r} is already in use: give every request its own id"
                if not own:
                    seen.add(sample_rid)
                refused = _abort(sample_rid, own, length) if own else None
                logprobs = (return_logprob, start, top)
                samples.append(_Sample(sample_rid, prompt, sample_params, logprobs, refused))
        return samples

    def first_refusal(self) -> str | None:
        """What is wrong with the first bad row, or None."""
        answers = (sample.refused for sample in self._all if sample.refused is not None)
        return next((answer["meta_info"]["finish_reason"]["message"] for answer in answers), None)

    def accepted(self) -> dict[str, Any]:
        """Arguments for upstream: the samples that are let in."""
        samples = [self._all[index] for index in self.let_in]
        columns: dict[str, list[Any]] = {
            "input_ids": [sample.prompt for sample in samples],
            "sampling_params": [dict(sample.params) for sample in samples],
            "rid": [sample.rid for sample in samples],
        }
        for position, (name, default) in enumerate(_LOGPROBS.items()):
            given = [sample.logprobs[position] for sample in samples]
            columns[name] = [default if value is None else value for value in given]
        arguments = {**self._arguments, **columns, "prompt": None}
        if self._one_answer:
            return arguments | {name: value for name, (value,) in columns.items()}
        return arguments

    def merge(self, answers: Any) -> Any:
        """Answers of all samples in order, as upstream would return them."""
        if self._one_answer:
            return self._all[0].refused or answers
        given = iter(answers)
        return [next(given) if sample.refused is None else sample.refused for sample in self._all]

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
        for index, sample in enumerate(self._all):
            if sample.refused is not None:
                yield sample.refused if self._one_answer else {**sample.refused, "index": index}

    def _numbered(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A batch's chunk carries the index among the samples that upstream saw: give it the caller's."""
        return {**chunk, "index": self.let_in[chunk["index"]]} if "index" in chunk else chunk


def _limits(engine) -> Limits:
    arguments = engine.server_args
    return Limits(
        vocab_size=engine.shape.vocab_size,
        prompt_tokens=engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"] - 1,
        context_tokens=engine.context_len,
        has_tokenizer=not arguments.skip_tokenizer_init,
        has_grammars=not arguments.skip_tokenizer_init and arguments.grammar_backend != "none",
        seeded=engine.config.seeded,
    )


def _prompts(arguments: dict[str, Any]) -> tuple[list[Any], bool]:
    """The rows, and whether the caller gave one row rather than a batch. Raises ValueError without exactly one kind."""
    texts, ids = arguments["prompt"], arguments["input_ids"]
    if (texts is None) == (ids is None):
        raise ValueError("generate needs either input_ids or prompt, and not both")
    if texts is not None:
        if isinstance(texts, str):
            return [texts], True
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"prompt={texts!r:.60} must be a string or a list of strings")
        return texts, False
    batch = isinstance(ids, list) and any(hasattr(row, "__len__") and not isinstance(row, str) for row in ids)
    return (ids, False) if batch else ([ids], True)


def _column(value: Any, count: int, name: str) -> list[Any]:
    """One argument's value for each row, where it may be given once for all."""
    if name == "rid" and isinstance(value, str) and count > 1:
        return [f"{value}_{row}" for row in range(count)]  # as upstream
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for all or one each")
    return value


def _tokenize(engine, text: str) -> tuple[str | None, list[int]]:
    """(what is wrong with the text, its token ids). Here and not in SGLang, so that a text too long fails alone."""
    tokenizer = engine.tokenizer_manager.tokenizer
    if tokenizer is None:
        return "prompt needs a tokenizer, and the engine was started with skip_tokenizer_init=True: give input_ids", []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"prompt is not Unicode text: {error}", []
    ids = tokenizer(text)["input_ids"]
    return (None if ids else "prompt is empty: give at least one token"), ids


def _expand(rid: Any, params: Any) -> list[tuple[Any, Any]]:
    """(request id, sampling parameters) of a row's n samples. Parameters that were refused may be anything."""
    n = params.get("n") if isinstance(params, Mapping) else None
    if type(n) is not int or not 1 < n <= MOST_SAMPLES:
        return [(rid, params)]
    return [(f"{rid}_{sample}", {**params, "n": 1}) for sample in range(n)]


def _abort(rid: str, message: str, prompt_tokens: int) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "abort", "message": message, "status_code": 400},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
        },
    }


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    return
    yield  # makes it a generator
