"""Structured output across a switch: a request's grammar is built again from its tokens where the request lands.

A matcher's state cannot be sent, but it follows from the grammar and the tokens that it has accepted, which are the
request's output. A switch leaves nothing waiting for its grammar: what has not been compiled yet is waited for.
"""

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject, InvalidGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.layout import Layout

PARAMETERS = {"json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
"""Sampling parameter → kind of grammar, in the order of GrammarManager.process_req_with_grammar."""

Key = tuple[str, str]
"""Kind and text of a grammar: SGLang's own key."""


@dataclass(frozen=True)
class Grammars:
    """templates: each grammar as it is before the first token. built: those of requests that came without, by id."""

    templates: dict[Key, BaseGrammarObject] = field(default_factory=dict)
    built: dict[str, BaseGrammarObject] = field(default_factory=dict)


def key_of(params: SamplingParams) -> Key | None:
    """The grammar that a request asks for, if any."""
    for name, kind in PARAMETERS.items():
        if (text := getattr(params, name)) is not None:
            return kind, text
    return None


def build(backend: BaseGrammarBackend | None, reqs: Iterable[Req], deadline_s: float) -> Grammars:
    """The grammars of requests that have moved here, and of those that still wait for theirs. Changes no request.

    Raises TimeoutError if they are not compiled within the deadline.
    """
    grammars, until = Grammars(), time.monotonic() + deadline_s
    for req in reqs:
        key = key_of(req.sampling_params)
        if backend is None or key is None or req.to_finish is not None:
            continue
        if key not in grammars.templates:
            grammars.templates[key] = _template(backend, key, req, until - time.monotonic())
        if not isinstance(req.grammar, BaseGrammarObject):
            grammars.built[req.rid] = _replay(grammars.templates[key], req)
    return grammars


def hand_out(backend: BaseGrammarBackend | None, reqs: Iterable[Req], grammars: Grammars, target: Layout) -> None:
    """Give the requests their grammars. A request whose grammar is none ends with the reason in its next step."""
    for req in reqs:
        grammar = grammars.built.get(req.rid)
        if isinstance(grammar, InvalidGrammarObject):
            req.to_finish = FINISH_ABORT(f"Failed to compile grammar {key_of(req.sampling_params)}: {grammar!r}")
            req.grammar = None  # not what it waited for
        elif grammar is not None:
            req.grammar = grammar
        elif isinstance(req.grammar, Future):
            req.grammar = None  # it ends before it would be needed
    if backend is not None and target == Layout.TP:
        # A request whose grammar is cached does not wait for it, and in TP all ranks must agree whether one waits.
        backend.cache.clear()
        valid = {key: grammar for key, grammar in grammars.templates.items() if _is_valid(grammar)}
        backend.cache.update(valid)


def follow_layout(scheduler) -> None:
    """In TP all ranks agree on which grammars are ready; in EP each has its own requests."""
    manager = scheduler.grammar_manager
    manager.grammar_sync_group = scheduler.dp_tp_cpu_group
    manager.grammar_sync_size = scheduler.dp_tp_group.world_size
    manager.grammar_sync_entry = scheduler.dp_tp_group.first_rank
    manager.is_grammar_sync_entry = scheduler.dp_tp_group.is_first_rank


def _is_valid(grammar: BaseGrammarObject) -> bool:
    return not isinstance(grammar, InvalidGrammarObject)


def _template(backend: BaseGrammarBackend, key: Key, req: Req, timeout_s: float) -> BaseGrammarObject:
    value, _ = backend.get_cached_or_future_value(key, req.require_reasoning)
    if not isinstance(value, Future):
        return value
    try:
        return value.result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"the {key[0]} grammar of request {req.rid} is not compiled yet") from error
    except Exception as error:  # whatever the library raises; upstream answers the request with it, too
        return InvalidGrammarObject(f"Grammar compilation failed: {error}")


def _replay(template: BaseGrammarObject, req: Req) -> BaseGrammarObject:
    grammar = template.copy()
    if not _is_valid(grammar):
        return grammar
    if isinstance(grammar, ReasonerGrammarObject):
        grammar.tokens_after_end = -1  # a copy is in the phase of the request that the template was made for
    grammar.maybe_init_reasoning(req.require_reasoning)
    try:
        for token in req.output_ids:
            grammar.accept_token(token)
    except ValueError as error:  # upstream aborts a request whose token its grammar does not take
        return InvalidGrammarObject(str(error))
    return grammar
