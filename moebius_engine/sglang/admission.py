"""Is this request one that SGLang can run? Returns reasons instead of raising, so that only a bad row fails."""

import inspect
import math
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

_KNOWN = frozenset(inspect.signature(SamplingParams.__init__).parameters) - {"self"}
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_NEEDS_TOKENIZER = ("stop", "stop_regex", "min_new_tokens")


def check_prompt(input_ids: list[int], *, vocab_size: int, context_len: int) -> str | None:
    """What is wrong with a prompt of token ids, or None. context_len: tokens of prompt and response together."""
    if not input_ids:
        return "input_ids is empty: give at least one token"
    if len(input_ids) >= context_len:
        return f"input_ids has {len(input_ids)} tokens, the context holds {context_len}: shorten the prompt"
    for position, token in enumerate(input_ids):
        if type(token) is not int:
            return f"input_ids[{position}]={token!r} is not an integer"
        if not 0 <= token < vocab_size:
            return f"input_ids[{position}]={token} lies outside the vocabulary of {vocab_size} tokens"
    return None


def check_sampling(params: dict[str, Any], *, vocab_size: int, has_tokenizer: bool) -> str | None:
    """What is wrong with sampling parameters, or None. Ranges are SGLang's own (SamplingParams.verify)."""
    unknown = params.keys() - _KNOWN
    if unknown:
        return f"sampling_params: unknown {sorted(unknown)}; SGLang knows {sorted(_KNOWN)}"
    for name in (*_GRAMMARS, "custom_params"):
        if params.get(name) is not None:
            return f"sampling_params.{name} is not supported by a switching engine: its state has no rule for a switch"
    for name in _INTEGERS:
        value = params.get(name)
        if value is not None and (type(value) is not int):
            return f"sampling_params.{name}={value!r} must be an integer"
    for name in _NUMBERS:
        value = params.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"sampling_params.{name}={value!r} must be a number"
        if value is not None and not math.isfinite(value):
            return f"sampling_params.{name}={value} must be finite"
    for name in _NEEDS_TOKENIZER:
        if params.get(name) and not has_tokenizer:
            return f"sampling_params.{name} needs a tokenizer, and the engine was started with skip_tokenizer_init=True"
    try:
        SamplingParams(**params).verify(vocab_size)
    except (ValueError, TypeError) as error:
        return f"sampling_params: {error}"
    return None
