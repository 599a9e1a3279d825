"""Grammars that are built again: the same masks as the matcher that stayed, with SGLang's own back ends."""

import importlib.util
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.layout import Layout
from moebius_engine.sglang import grammars
from recipes.tiny_moe import byte_tokenizer

VOCAB = 257
ASKED = [
    {"regex": "(ab|cd)+e?"},
    {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    {"regex": "[0-9]{3,}"},
]
NO_XGRAMMAR = pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="xgrammar needs apache-tvm-ffi")


def xgrammar_backend():
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    return XGrammarGrammarBackend(byte_tokenizer(4096), vocab_size=VOCAB, model_eos_token_ids=[256])


@pytest.fixture(params=["llguidance", pytest.param("xgrammar", marks=NO_XGRAMMAR)], scope="module")
def backends(request):
    """Two ranks' back ends."""
    make = xgrammar_backend if request.param == "xgrammar" else lambda: GuidanceBackend(byte_tokenizer(4096))
    return make(), make()


def request(rid: str, asked: dict, grammar=None):
    return SimpleNamespace(
        rid=rid,
        sampling_params=SamplingParams(**asked),
        grammar=grammar,
        require_reasoning=False,
        output_ids=[],
        to_finish=None,
    )


def allowed(grammar) -> list[int]:
    mask = grammar.allocate_vocab_mask(VOCAB, 1, "cpu")
    mask.fill_(-1)
    grammar.fill_vocab_mask(mask, 0)
    bits = mask[0, torch.arange(VOCAB) // 32] >> (torch.arange(VOCAB) % 32) & 1
    return torch.nonzero(bits).flatten().tolist()


@given(st.data())
@settings(max_examples=30)
def test_a_built_grammar_goes_on_where_the_other_was(backends, data):
    here, there = backends
    asked = data.draw(st.sampled_from(ASKED))
    stays = request("a", asked)
    stays.grammar = grammars.build(here, [stays], 60).built["a"]
    for _ in range(data.draw(st.integers(0, 12))):
        token = data.draw(st.sampled_from(allowed(stays.grammar)))
        if token == 256:
            break
        stays.grammar.accept_token(token)
        stays.output_ids.append(token)
    moved = request("a", asked)
    moved.output_ids = stays.output_ids
    grammars.hand_out(there, [moved], grammars.build(there, [moved], 60), Layout.EP)
    assert allowed(moved.grammar) == allowed(stays.grammar)


def test_all_ranks_of_tp_have_the_same_grammars_cached(backends):
    """What only one of them has cached, a request would wait for on the others alone: they would part."""
    for rank, backend in enumerate(backends):
        backend.cache.clear()
        backend.set_cache(("regex", f"only on rank {rank}"), backend.dispatch_regex("x"))
        reqs = [request("a", ASKED[0]), request("b", ASKED[1]), request("c", {}), request("d", ASKED[2])]
        reqs[3].to_finish = object()  # aborted: it needs none
        grammars.hand_out(backend, reqs, grammars.build(backend, reqs, 60), Layout.TP)
        assert [req.grammar is not None for req in reqs] == [True, True, False, False]
    assert list(backends[0].cache) == list(backends[1].cache)
    assert [kind for kind, _ in backends[0].cache] == ["regex", "json"]


def test_what_is_no_grammar_ends_its_request(backends):
    bad = request("a", {"regex": "(ab"}, grammar=Future())
    grammars.hand_out(backends[0], [bad], grammars.build(backends[0], [bad], 60), Layout.TP)
    assert "Failed to compile" in bad.to_finish.message and bad.grammar is None and not backends[0].cache


@pytest.mark.parametrize("thinks", [(False, True), (True, False)])
def test_requests_that_think_share_a_grammar_with_those_that_do_not(thinks):
    """SGLang's copy keeps the phase, and maybe_init_reasoning(True) does not set it back: the thoughts of the second
    request were held against its grammar, and a switch aborted it."""
    tokenizer = byte_tokenizer(4096)
    parser = SimpleNamespace(detector=SimpleNamespace(think_end_token="X", think_excluded_tokens=None))
    inner = GuidanceBackend(tokenizer)
    for name in ("allocate_vocab_mask", "move_vocab_mask", "apply_vocab_mask"):  # SGLang asks it for them in vain
        setattr(inner, name, getattr(GuidanceGrammar, name))
    backend = ReasonerGrammarBackend(inner, parser, tokenizer)
    reqs = [request(str(thought), ASKED[0]) for thought in thinks]
    for req, thought in zip(reqs, thinks, strict=True):
        req.require_reasoning = thought
        req.output_ids = tokenizer.encode("no such letters X" * thought + "ab")
    built = grammars.build(backend, reqs, 60).built
    assert allowed(built["True"]) == allowed(built["False"])
    reqs[thinks.index(True)].output_ids.append(tokenizer.encode("b")[0])  # control: it is held against what follows
    assert isinstance(grammars.build(backend, reqs, 60).built["True"], InvalidGrammarObject)


NEVER: Future = Future()


class Slow(BaseGrammarBackend):
    """Compiles nothing: raises for "broken", and never comes to an end with anything else."""

    def dispatch_regex(self, key_string):
        raise OSError("broken")

    def get_cached_or_future_value(self, key, require_reasoning):
        return super().get_cached_or_future_value(key, require_reasoning) if key[1] == "broken" else (NEVER, False)


def test_a_grammar_that_is_not_ready_refuses_the_switch_and_keeps_its_request():
    waiting = request("a", {"regex": "slow"}, grammar=NEVER)
    with pytest.raises(TimeoutError, match="the regex grammar of request a is not compiled yet"):
        grammars.build(Slow(), [waiting], 0.01)
    assert waiting.grammar is NEVER


def test_what_the_library_raises_is_the_requests_answer():
    built = grammars.build(Slow(), [request("a", {"regex": "broken"})], 10).built["a"]
    assert isinstance(built, InvalidGrammarObject) and "broken" in built.error_message
