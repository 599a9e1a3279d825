"""What users of such engines have reported, each with a switch in its middle: stops, streams, aborts, ids, balance."""

import asyncio
import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from tests.engine.inflight import GREEDY, logprob_difference, prompts, switched_run, until, wait_for_steps

LAYOUTS = pytest.mark.parametrize("layout", ["ep", "tp"])
END_OF_TEXT = 256  # the tiny model's


def other(layout: str) -> str:
    return "tp" if layout == "ep" else "ep"


def ids_of_logprobs(answer: dict) -> list[int]:
    return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]


def test_a_stop_token_is_in_ids_and_logprobs_alike(engine):
    """Each row stops at its own 30th token, some switches after its first."""
    rows = prompts(6)
    free = engine.generate(input_ids=rows, sampling_params=GREEDY)
    # SGLang heeds stop tokens only where it heeds the model's end token.
    params = [GREEDY | {"ignore_eos": False, "stop_token_ids": [answer["output_ids"][29]]} for answer in free]
    request = {"input_ids": rows, "sampling_params": params, "return_logprob": True}
    expected = engine.generate(**request)
    run = switched_run(engine, ["tp", "ep", "tp"], after=2, **request)
    assert run.tokens == [answer["output_ids"] for answer in expected]
    assert logprob_difference(run.answers, expected) < 1e-4
    for answer, param in zip(run.answers, params, strict=True):
        (stop,) = param["stop_token_ids"]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["output_ids"][-1] == stop and answer["output_ids"].count(stop) == 1
        assert ids_of_logprobs(answer) == answer["output_ids"]


def test_a_stop_string_that_a_switch_cuts_in_two_is_found(engine):
    """A switch between almost all tokens, so also within a stop string of three characters, each a token."""
    rows = prompts(24)
    free = engine.generate(input_ids=rows, sampling_params=GREEDY)
    stops = [re.search("[ -~]{3}", answer["text"][6:]) for answer in free]
    rows = [row for row, stop in zip(rows, stops, strict=True) if stop]
    params = [GREEDY | {"stop": [stop.group()]} for stop in stops if stop]
    assert len(rows) >= 3
    # One that does not stop, so that there is something in flight at every switch.
    rows, params = [*rows, [9, 8, 7]], [*params, GREEDY | {"max_new_tokens": 200}]
    expected = engine.generate(input_ids=rows, sampling_params=params)
    run = switched_run(engine, ["tp", "ep"] * 3, after=1, input_ids=rows, sampling_params=params)
    assert run.tokens == [answer["output_ids"] for answer in expected]
    assert [answer["text"] for answer in run.answers] == [answer["text"] for answer in expected]
    reasons, others = ([answer["meta_info"]["finish_reason"] for answer in of] for of in (run.answers, expected))
    assert reasons == others and sum(reason["type"] == "stop" for reason in reasons) >= 3


def test_the_least_number_of_tokens_holds_across_a_switch(engine):
    """The end token is always the likeliest, and forbidden for 30 tokens."""
    params = GREEDY | {"ignore_eos": False, "min_new_tokens": 30, "logit_bias": {str(END_OF_TEXT): 1e4}}
    run = switched_run(engine, ["tp", "ep"], after=3, input_ids=prompts(4), sampling_params=params)
    for row in run.tokens:
        assert len(row) == 31 and row.index(END_OF_TEXT) == 30


def test_a_stream_of_samples_has_no_gap_and_no_repeat(engine):
    """Three prompts, n = 2: of each sample the chunks grow by new tokens only, up to the whole answer."""
    rows, params = prompts(3), GREEDY | {"n": 2}
    expected = engine.generate(input_ids=rows, sampling_params=params, return_logprob=True)
    engine.flush_cache()

    async def go() -> tuple[dict[int, list[dict]], list]:
        chunks: dict[int, list[dict]] = {index: [] for index in range(6)}
        records, layouts = [], iter(["tp", "ep", "tp"])
        async for chunk in await engine.async_generate(
            input_ids=rows, sampling_params=params, return_logprob=True, stream=True
        ):
            chunks[chunk["index"]].append(chunk)
            if chunk["index"] == 0 and chunk["meta_info"]["completion_tokens"] in (8, 20, 32):
                records.append(await engine.async_switch(next(layouts)))
        return chunks, records

    streams, records = engine._run(go())
    assert [record.running for record in records] == [6, 6, 6]
    for index, chunks in streams.items():
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(set(counts)), "a chunk brought nothing new"
        for chunk, following in itertools.pairwise(chunks):
            assert following["text"].startswith(chunk["text"])
            assert following["output_ids"][: len(chunk["output_ids"])] == chunk["output_ids"]
            assert chunk["meta_info"]["finish_reason"] is None
        assert chunks[-1]["output_ids"] == expected[index]["output_ids"] == ids_of_logprobs(chunks[-1])
        assert chunks[-1]["text"] == expected[index]["text"]


@LAYOUTS
@pytest.mark.parametrize("state", ["prefilling", "queued"])
def test_an_abort_before_the_first_token_ends_once_and_frees_the_id(engine, layout, state):
    """One terminal chunk, with a switch between the abort and the request's end or right after it; then the same id
    serves another request."""
    engine.switch(layout)
    victim = prompts(1, length=1900)[0] if state == "prefilling" else [5, 6, 7]
    short = GREEDY | {"max_new_tokens": 8}
    again = engine.generate(input_ids=[9, 8, 7], sampling_params=short)["output_ids"]

    async def chunks(rid: str, row: list[int], params: dict) -> list[dict]:
        stream = await engine.async_generate(input_ids=row, sampling_params=params, rid=rid, stream=True)
        return [chunk async for chunk in stream]

    async def go() -> tuple[list[dict], list[dict], list[dict]]:
        others = []
        if state == "queued":  # 32 places
            task = engine.async_generate(input_ids=prompts(66), sampling_params=GREEDY | {"max_new_tokens": 24})
            others.append(asyncio.ensure_future(task))
            await wait_for_steps(engine, 2)
        task = asyncio.ensure_future(chunks("victim", victim, GREEDY))
        if state == "prefilling":
            await until(engine, lambda health: any(rank["prefilling"] for rank in health["ranks"]))
        else:
            await until(engine, lambda health: health["inflight"] == 67)
        await engine.async_abort("victim")
        record = await engine.async_switch(other(layout))
        assert record.refused is None
        ended = await asyncio.wait_for(task, 60)
        reused = await asyncio.wait_for(chunks("victim", [9, 8, 7], short), 60)
        return ended, reused, [await task for task in others]

    ended, reused, others = engine._run(go())
    assert [chunk["meta_info"]["finish_reason"]["type"] for chunk in ended] == ["abort"]
    finishes = [chunk["meta_info"]["finish_reason"] for chunk in reused]
    assert finishes[:-1] == [None] * (len(finishes) - 1) and finishes[-1]["type"] == "length"
    assert reused[-1]["output_ids"] == again
    assert all(len(answer["output_ids"]) == 24 for batch in others for answer in batch)
    assert engine.health()["inflight"] == 0 and not engine.tokenizer_manager.rid_to_state
    assert engine.flush_cache().success


def test_new_requests_balance_over_ranks_that_a_switch_left_unequal(engine):
    """One long request outweighs seven short ones: after the switch to EP they are on different ranks."""
    engine.switch("tp")
    rows = [prompts(1, length=1500)[0], *prompts(15)]
    params = GREEDY | {"max_new_tokens": 300}

    async def go() -> tuple[list[int], list[int]]:
        first = asyncio.ensure_future(engine.async_generate(input_ids=rows[:8], sampling_params=params))
        await until(engine, lambda health: health["inflight"] == 8 and not any(r["waiting"] for r in health["ranks"]))
        await until(engine, lambda health: not any(rank["prefilling"] for rank in health["ranks"]))
        await engine.async_switch("ep")
        await wait_for_steps(engine, 3)
        left = [rank["inflight"] for rank in (await engine.async_health())["ranks"]]
        second = asyncio.ensure_future(engine.async_generate(input_ids=rows[8:], sampling_params=params))
        health = await until(engine, lambda health: health["inflight"] == 16)
        await engine.async_abort(abort_all=True)
        await asyncio.gather(first, second)
        return left, [rank["inflight"] for rank in health["ranks"]]

    left, balanced = engine._run(go())
    assert abs(left[0] - left[1]) >= 4, left
    assert balanced == [8, 8]


@LAYOUTS
def test_a_duplicate_id_fails_at_once_and_the_first_request_goes_on(engine, layout):
    row = prompts(1)[0]
    engine.switch(layout)
    expected = engine.generate(input_ids=row, sampling_params=GREEDY)["output_ids"]

    async def go() -> tuple[dict, list[dict]]:
        first = asyncio.ensure_future(engine.async_generate(input_ids=row, sampling_params=GREEDY, rid="same"))
        refused = []
        for target in (other(layout), layout):
            await wait_for_steps(engine, 3)
            record = await engine.async_switch(target)
            assert record.inflight == 1
            second = engine.async_generate(input_ids=row, sampling_params=GREEDY, rid="same")
            refused.append(await asyncio.wait_for(second, 20))
            assert not first.done()
        return await first, refused

    first, refused = engine._run(go())
    assert first["output_ids"] == expected
    for answer in refused:
        assert "'same' is already in use" in answer["meta_info"]["finish_reason"]["message"]


@pytest.mark.slow
def test_samples_find_their_prompts_prefix_after_a_switch_as_without_one(engine):
    """n = 8 samples of each of eight prompts, more than there are places: those that start after a switch find the
    prefix of those that decode. (scripts/bench_prefix.py measures more runs.)"""
    spec = importlib.util.spec_from_file_location("bench_prefix", Path(__file__).parents[2] / "scripts/bench_prefix.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    plain = bench.hit_rate(engine._run(bench.one_step(engine, [])))
    engine.switch("ep")
    engine.flush_cache()
    switched = bench.hit_rate(engine._run(bench.one_step(engine, ["tp", "ep", "tp"])))
    assert plain > 0.5
    assert switched > 0.95 * plain
