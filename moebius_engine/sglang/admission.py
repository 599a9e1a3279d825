"""Is this request one that SGLang can run? Returns reasons instead of raising, so that only a bad row fails.

SGLang 0.5.12 checks some of this in its tokenizer manager, where one bad row fails the whole batch, and some not at
all: what reaches a scheduler as a bad index or type ends the process.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from moebius_engine.sglang.grammars import PARAMETERS

_KNOWN = frozenset(inspect.signature(SamplingParams.__init__).parameters) - {"self"}
_UNSUPPORTED = ("custom_params",)
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_NEEDS_TOKENIZER = ("stop", "stop_regex", "min_new_tokens")

MOST_SAMPLES = 1 << 16
"""Most samples of one row: each is a request of its own."""

# Parameter → (least, most). Counts become int32 tensors, TOP_K_ALL is SGLang's own "no limit", a seed is an int64.
_INTEGERS = {
    "max_new_tokens": (0, TOP_K_ALL),
    "min_new_tokens": (0, TOP_K_ALL),
    "top_k": (-1, TOP_K_ALL),
    "n": (1, MOST_SAMPLES),
    "stream_interval": (1, TOP_K_ALL),
    "sampling_seed": (-(2**63), 2**63 - 1),
}
_FLOAT32_MAX = 3.4e38
# Logits are divided by the repetition penalty and, with the bias, by a temperature of 1e-6 or more. Beyond these bounds
# they overflow, and sampling from what is not a number ends the scheduler.
_LEAST_REPETITION_PENALTY = 1e-6
_MOST_LOGIT_BIAS = 1e30


class Limits(NamedTuple):
    """What requests must fit into. prompt_tokens: a prompt's most. context_tokens: prompt and response together."""

    vocab_size: int
    prompt_tokens: int
    context_tokens: int
    has_tokenizer: bool = True
    has_grammars: bool = True  # a grammar back end
    seeded: bool = False  # SwitchConfig.seeded


def check_rid(rid: Any) -> str | None:
    """What is wrong with a request id, or None."""
    if not isinstance(rid, str) or not rid:
        return f"rid={_show(rid)} must be a string of at least one character"
    if rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return f"rid={_show(rid)}: SGLang takes ids that start with {HEALTH_CHECK_RID_PREFIX!r} for health checks"
    return None


def check_prompt(input_ids: Any, limits: Limits) -> str | None:
    """What is wrong with a prompt of token ids, or None."""
    if not isinstance(input_ids, list):
        return f"input_ids={_show(input_ids)} is a {type(input_ids).__name__}: give a list of integers"
    if not input_ids:
        return "input_ids is empty: give at least one token"
    if len(input_ids) > limits.prompt_tokens:
        return (
            f"input_ids has {len(input_ids)} tokens, a prompt may have {limits.prompt_tokens} "
            f"(context {limits.context_tokens}): shorten the prompt"
        )
    return _check_tokens(input_ids, "input_ids", limits)


def check_sampling(params: Any, prompt_tokens: int, limits: Limits) -> str | None:
    """What is wrong with the sampling parameters of a prompt of so many tokens, or None.

    Ranges are SGLang's own (SamplingParams.verify) except where a comment says why.
    """
    if not isinstance(params, Mapping):
        return f"sampling_params={_show(params)} is a {type(params).__name__}: give a dict"
    unknown = params.keys() - _KNOWN
    if unknown:
        return f"sampling_params: unknown {sorted(unknown, key=str)}; SGLang knows {sorted(_KNOWN)}"
    given = {name: value for name, value in params.items() if value is not None}
    for name in _UNSUPPORTED:
        if name in given:
            return f"sampling_params.{name} is not supported by a switching engine: its state has no rule for a switch"
    message = (
        _check_scalars(given)
        or _check_stops(given, limits)
        or _check_logit_bias(given, limits)
        or _check_grammars(given, limits)
    )
    if message:
        return message
    if "sampling_seed" in given and not limits.seeded:
        return "sampling_seed has no effect unless the engine is started with SwitchConfig(seeded=True)"
    if given.get("min_p") and limits.seeded:  # upstream asserts, which ends the rank (sampler.py:488)
        return f"sampling_params.min_p={given['min_p']} does not work with SwitchConfig(seeded=True): leave one of them"
    room = limits.context_tokens - prompt_tokens
    if given.get("max_new_tokens", 0) > room:
        return (
            f"sampling_params.max_new_tokens={given['max_new_tokens']} and a prompt of {prompt_tokens} tokens exceed "
            f"the context of {limits.context_tokens} tokens: ask for at most {room}"
        )
    for name in _NEEDS_TOKENIZER:
        if given.get(name) and not limits.has_tokenizer:
            return f"sampling_params.{name} needs a tokenizer, and the engine was started with skip_tokenizer_init=True"
    try:
        sampling = SamplingParams(**params)
        sampling.verify(limits.vocab_size)
        sampling.normalize(None)
    except (ValueError, TypeError) as error:
        return f"sampling_params: {error}"
    except (re.error, OverflowError, RecursionError) as error:
        return f"sampling_params.stop_regex={_show(params['stop_regex'])} is not a regular expression: {error}"
    return None


def check_logprobs(return_logprob: Any, start: Any, top: Any, prompt_tokens: int, limits: Limits) -> str | None:
    """What is wrong with the logprob arguments of a prompt of so many tokens, or None.

    start, top: generate's logprob_start_len and top_logprobs_num; None is SGLang's default.
    """
    if return_logprob is not None and not isinstance(return_logprob, bool):
        return f"return_logprob={_show(return_logprob)} must be True or False"
    for name, value, least, most in (
        ("logprob_start_len", start, -1, prompt_tokens),
        ("top_logprobs_num", top, 0, limits.vocab_size),
    ):
        if value is not None and (type(value) is not int or not least <= value <= most):
            return f"{name}={_show(value)} must be an integer from {least} to {most}"
    return None


def _check_scalars(given: Mapping[str, Any]) -> str | None:
    for name, (least, most) in _INTEGERS.items():
        value = given.get(name, least)
        if type(value) is not int:
            return f"sampling_params.{name}={_show(value)} must be an integer"
        if not least <= value <= most:
            return f"sampling_params.{name}={_show(value)} must lie between {least} and {most}"
    for name in _NUMBERS:
        message = _check_number(given.get(name, 0), f"sampling_params.{name}")
        if message:
            return message
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            return f"sampling_params.{name}={_show(given[name])} must be True or False"
    if 0 < given.get("repetition_penalty", 1) < _LEAST_REPETITION_PENALTY:
        return (
            f"sampling_params.repetition_penalty={given['repetition_penalty']} must be at least "
            f"{_LEAST_REPETITION_PENALTY}"
        )
    return None


def _check_number(value: Any, name: str) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name}={_show(value)} must be a number"
    if not abs(value) <= _FLOAT32_MAX:  # also for nan
        return f"{name}={_show(value)} must be finite in float32"
    return None


def _check_stops(given: Mapping[str, Any], limits: Limits) -> str | None:
    for name in ("stop", "stop_regex"):
        value = given.get(name, [])
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            return f"sampling_params.{name}={_show(value)} must be a string or a list of strings"
    return _check_tokens(given.get("stop_token_ids", []), "sampling_params.stop_token_ids", limits)


def _check_logit_bias(given: Mapping[str, Any], limits: Limits) -> str | None:
    bias = given.get("logit_bias", {})
    if not isinstance(bias, Mapping):
        return f"sampling_params.logit_bias={_show(bias)} must map token ids to numbers"
    for key, value in bias.items():
        name = f"sampling_params.logit_bias[{_show(key)}]"
        if isinstance(key, bool) or not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal())):
            return f"{name}: keys must be token ids"
        if not 0 <= int(key) < limits.vocab_size:
            return f"{name} lies outside the vocabulary of {limits.vocab_size} tokens"
        message = _check_number(value, name)
        if message:
            return message
        if abs(value) > _MOST_LOGIT_BIAS:
            return f"{name}={_show(value)} must lie between {-_MOST_LOGIT_BIAS} and {_MOST_LOGIT_BIAS}"
    return None


def _check_grammars(given: Mapping[str, Any], limits: Limits) -> str | None:
    asked = [name for name in PARAMETERS if given.get(name) is not None]
    for name in asked:
        if not isinstance(given[name], str) or not given[name]:
            return f"sampling_params.{name}={_show(given[name])} must be a string of at least one character"
        if not limits.has_grammars:
            return f"sampling_params.{name} needs an engine with a grammar back end: start it with grammar_backend=..."
    return f"sampling_params: {asked} are given, and a request has one of them" if len(asked) > 1 else None


def _check_tokens(tokens: Any, name: str, limits: Limits) -> str | None:
    if not isinstance(tokens, list):
        return f"{name}={_show(tokens)} must be a list of integers"
    # Most prompts are good and long, so all tokens are checked at once before a bad one is looked for.
    if not tokens or (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < limits.vocab_size):
        return None
    for position, token in enumerate(tokens):
        if type(token) is not int:
            return f"{name}[{position}]={_show(token)} is not an integer"
        if not 0 <= token < limits.vocab_size:
            return f"{name}[{position}]={_show(token)} lies outside the vocabulary of {limits.vocab_size} tokens"
    return None


def _show(value: Any) -> str:
    """A value in a message: its repr, cut where it is long."""
    return f"{value!r:.60}" if not isinstance(value, int) or abs(value) < 2**64 else "an integer beyond 64 bits"
