"""What serves beside plain decoding survives a switch: pages, priorities, grammars, retraction, an odd vocabulary."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from moebius_engine.config import SwitchConfig
from tests.engine.inflight import GREEDY, logprob_difference, prompts, switched_run, until, wait_for_steps

THERE_AND_BACK = ["tp", "ep", "tp", "ep"]
VOCAB, PAGE = 509, 16
# xgrammar, SGLang's default, where what it needs is installed.
GRAMMARS = "xgrammar" if importlib.util.find_spec("tvm_ffi") else "llguidance"
SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["one", "two"]}, "b": {"type": "boolean"}}, ' + (
    '"required": ["a", "b"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    from recipes.tiny_moe import make_tiny_moe

    return str(make_tiny_moe(tmp_path_factory.mktemp("models") / "odd", vocab_size=VOCAB))


@pytest.fixture(scope="module")
def serving_engine(path):
    from moebius_engine.engine import SwitchingEngine

    engine = SwitchingEngine(
        path,
        ranks=2,
        switch=SwitchConfig(policy="ep", timeout_s=120, silent_s=60),
        page_size=PAGE,
        enable_priority_scheduling=True,
        grammar_backend=GRAMMARS,
        constrained_json_disable_any_whitespace=True,  # a random model would write nothing else
        max_running_requests=16,
        chunked_prefill_size=64,
        max_total_tokens=1024,
        context_length=512,
    )
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(serving_engine):
    """Idle and in EP with an empty cache."""
    serving_engine.switch("ep")
    assert serving_engine.flush_cache().success
    return serving_engine


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def queued(health: dict) -> bool:
    return any(rank["waiting"] or rank["prefilling"] for rank in health["ranks"])


def alone(engine, request: dict) -> list[list[int]]:
    """Tokens of the same requests, each with the engine to itself."""
    params = request["sampling_params"]
    return tokens([engine.generate(input_ids=row, sampling_params=params) for row in request["input_ids"]])


_REFERENCE = """
import json, sys, torch
from transformers import Qwen3MoeForCausalLM
model = Qwen3MoeForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    logits_V = model(torch.tensor([json.loads(sys.argv[2])])).logits[0, -1]
print(json.dumps(logits_V.log_softmax(-1).tolist()))
"""


@pytest.fixture(scope="module")
def reference(path) -> list[float]:
    """Log-probabilities of the token after prompts(1), by transformers, which SGLang patches in its process."""
    command = [sys.executable, "-c", _REFERENCE, path, json.dumps(prompts(1)[0])]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_an_odd_vocabulary_is_padded_right(engine, reference, layout):
    """Every token's probability is the reference model's, and no row of the padding is one."""
    engine.switch(layout)
    answer = engine.generate(
        input_ids=prompts(1)[0], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=VOCAB
    )
    given = {token: logprob for logprob, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}
    assert sorted(given) == list(range(VOCAB))
    assert max(abs(given[token] - reference[token]) for token in given) < 1e-4


def test_pages_and_their_shared_prefixes_are_carried(engine):
    """Prompts that end within a page; pairs that share whole pages, and differ in their last."""
    rows = [row[: 40 + 3 * index] for index, row in enumerate(prompts(8, length=80))]
    request = {"input_ids": rows + [[*rows[-1], 5, number] for number in range(4)], "sampling_params": GREEDY}
    request["return_logprob"] = True
    engine.generate(input_ids=rows[-1], sampling_params=GREEDY)  # into the tree
    expected = engine.generate(**request)
    run = switched_run(engine, THERE_AND_BACK, **request)
    assert [record.refused for record in run.records] == [None] * 4
    assert run.tokens == tokens(expected)
    assert logprob_difference(run.answers, expected) < 1e-4
    # Four requests share rows of at least three pages on each of two ranks.
    assert run.records[0].kv_tokens <= sum(map(len, request["input_ids"])) + 12 * 48 - 2 * 3 * PAGE


def test_structured_output_goes_on_in_its_grammar(engine):
    """Grammars of every kind of state: decoding, waiting, compiled on one rank only, or not compiled yet."""
    asked = [{"json_schema": SCHEMA}, {"regex": "(ab|cd){9}(ef)?"}, {"regex": "[0-9]{12,}x"}, {"regex": "(yes|no){9}"}]
    params = [GREEDY | {"max_new_tokens": 40, "ignore_eos": False} | asked[row % 4] for row in range(20)]
    request = {"input_ids": prompts(20), "sampling_params": params}
    expected = engine.generate(**request)
    engine.flush_cache()
    run = switched_run(engine, THERE_AND_BACK, after=3, **request)
    assert any(record.waiting for record in run.records)
    assert run.tokens == tokens(expected)
    for row, answer in enumerate(run.answers):
        if row % 4 == 0:
            assert set(json.loads(answer["text"])) == {"a", "b"}
        elif answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(asked[row % 4]["regex"], answer["text"])
        else:
            assert row % 4 == 2 and answer["text"].isdecimal() and len(answer["text"]) == 40


def test_a_grammar_known_to_one_rank_only_does_not_part_the_ranks_of_tp(engine):
    """In EP only one rank has compiled it; in TP all of them must find it, or all must wait for it."""
    known, new = (GREEDY | {"regex": regex, "max_new_tokens": 30} for regex in ("(pq|rs){20}", "(tu|vw){20}"))
    rows = prompts(3)

    async def go() -> list[dict]:
        await engine.async_generate(input_ids=rows[0], sampling_params=known)
        running = asyncio.ensure_future(engine.async_generate(input_ids=rows[1], sampling_params=GREEDY))
        await wait_for_steps(engine, 2)
        await engine.async_switch("tp")
        answers = await asyncio.wait_for(
            asyncio.gather(*(engine.async_generate(input_ids=rows[2], sampling_params=p) for p in (known, new))), 60
        )
        return [*answers, await running]

    first, second, plain = engine._run(go())
    assert re.fullmatch("(pq|rs){15}", first["text"]) and re.fullmatch("(tu|vw){15}", second["text"])
    assert len(plain["output_ids"]) == 48


def test_what_is_no_grammar_is_answered_and_an_abort_while_it_compiles_too(engine):
    rows = prompts(3)
    bad, good = engine.generate(
        input_ids=rows[:2], sampling_params=[GREEDY | {"regex": "(ab"}, GREEDY | {"regex": "a{50}"}]
    )
    assert "Failed to compile" in bad["meta_info"]["finish_reason"]["message"]
    assert good["text"] == "a" * 48

    async def aborted() -> list[dict]:
        params = GREEDY | {"regex": "(never|seen|before){9}[a-z]{40}x"}
        task = asyncio.ensure_future(engine.async_generate(input_ids=rows, sampling_params=params, rid=list("abc")))
        await until(engine, lambda health: health["inflight"] == 3)
        await engine.async_abort(abort_all=True)
        return await asyncio.wait_for(task, 60)

    for answer in engine._run(aborted()):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.health()["inflight"] == 0 and not engine.tokenizer_manager.rid_to_state
    assert engine.flush_cache().success


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_priorities_hold_in_both_layouts(engine, layout):
    """Sixteen places are taken by long requests; important ones come, take places, and those go on afterwards."""
    other = "tp" if layout == "ep" else "ep"
    request = {"input_ids": prompts(40), "sampling_params": GREEDY}
    expected = tokens(engine.generate(**request))
    engine.switch(layout)
    engine.flush_cache()
    finished: list[int] = []

    async def one(row: int, priority: int) -> dict:
        answer = await engine.async_generate(
            input_ids=request["input_ids"][row], sampling_params=GREEDY, priority=priority
        )
        finished.append(row)
        return answer

    async def go() -> tuple[list[dict], list]:
        unimportant = [asyncio.ensure_future(one(row, 0)) for row in range(32)]
        await wait_for_steps(engine, 3)
        important = [asyncio.ensure_future(one(row, 100)) for row in range(32, 40)]
        records = []
        for target in (other, layout, other):
            await wait_for_steps(engine, 3)
            records.append(await engine.async_switch(target))
        return [await task for task in (*unimportant, *important)], records

    answers, records = engine._run(go())
    assert tokens(answers) == expected
    assert [record.refused for record in records] == [None] * 3 and all(record.waiting for record in records)
    assert any(answer["meta_info"]["num_retractions"] for answer in answers[:32]), "nothing was preempted"
    assert set(range(32, 40)) <= set(finished[:24]), "an important request waited for the end of the others"


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "new_tokens"), [("ep", 60), ("tp", 50)])
def test_retraction_in_both_layouts(engine, layout, new_tokens):
    """Each rank's share fills nine tenths of its rows with prompts, and its responses want more than the rest. SGLang
    reckons with 0.7 of what the admitted ones may still write: in TP, 60 each would keep the last prompt waiting."""
    other = "tp" if layout == "ep" else "ep"
    request = {"input_ids": prompts(12, length=300)[::2], "sampling_params": GREEDY | {"max_new_tokens": new_tokens}}
    expected = alone(engine, request)
    engine.switch(layout)
    engine.flush_cache()

    async def go() -> tuple[list[dict], list]:
        task = asyncio.ensure_future(engine.async_generate(**request))
        await until(
            engine,
            lambda health: health["inflight"] == 6 and not any(r["prefilling"] + r["waiting"] for r in health["ranks"]),
        )
        await until(engine, lambda health: any(rank["waiting"] for rank in health["ranks"]))  # a retracted one
        records = []
        for target in (other, layout):
            records.append(await engine.async_switch(target))
            await wait_for_steps(engine, 2)
        return await task, records

    answers, records = engine._run(go())
    assert [record.refused for record in records] == [None] * 2 and records[0].waiting
    assert any(answer["meta_info"]["num_retractions"] for answer in answers)
    assert tokens(answers) == expected


@pytest.mark.slow
def test_several_half_prefilled_requests_and_new_ones_do_not_overcommit_a_rank(engine):
    """A switch lands two half-prefilled requests on one rank while others arrive: the pool is nearly full."""
    request = {"input_ids": prompts(10, length=390)[::2], "sampling_params": GREEDY | {"max_new_tokens": 12}}
    late = {"input_ids": prompts(8, length=200)[::2], "sampling_params": GREEDY}
    expected = alone(engine, request), alone(engine, late)
    engine.flush_cache()
    most = 0

    async def go() -> tuple[list[dict], list[dict]]:
        nonlocal most
        first = asyncio.ensure_future(engine.async_generate(**request))
        second = None
        for target in ["tp", "ep"] * 4:
            await wait_for_steps(engine, 1)
            record = await engine.async_switch(target)
            most = max(most, record.prefilling)
            second = second or asyncio.ensure_future(engine.async_generate(**late))
        return await first, await second

    first, second = engine._run(go())
    assert most >= 2
    assert (tokens(first), tokens(second)) == expected
