"""Control requests in both layouts and around a switch, retraction, and what TP holds that EP cannot."""

import asyncio

import pytest

from tests.engine.inflight import GREEDY, paused, prompts, switched_run, until, wait_for_steps

LAYOUTS = pytest.mark.parametrize("layout", ["ep", "tp"])
MODES = pytest.mark.parametrize("mode", ["in_place", "retract"])


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def one_by_one(engine, request: dict) -> list[list[int]]:
    """Tokens of the same requests with the engine to themselves, so with enough memory."""
    params = request["sampling_params"]
    return tokens([engine.generate(input_ids=row, sampling_params=params) for row in request["input_ids"]])


def waiting(health: dict) -> int:
    return sum(rank["waiting"] for rank in health["ranks"])


def all_decode(health: dict) -> bool:
    return health["inflight"] > 0 and not any(rank["waiting"] or rank["prefilling"] for rank in health["ranks"])


@LAYOUTS
def test_abort_of_all_leaves_nothing(engine, layout):
    """Running, waiting and half-prefilled requests; afterwards the cache can be flushed, so no KV is left behind."""
    engine.switch(layout)

    async def go() -> list[dict]:
        task = asyncio.ensure_future(
            engine.async_generate(input_ids=prompts(70, length=150), sampling_params=GREEDY | {"max_new_tokens": 400})
        )
        await wait_for_steps(engine, 6)
        await engine.async_abort(abort_all=True)
        return await asyncio.wait_for(task, 30)

    answers = engine._run(go())
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert engine.health()["inflight"] == 0 and not engine.tokenizer_manager.rid_to_state
    assert engine.flush_cache().success


@LAYOUTS
@MODES
def test_pause_keeps_every_request_and_continue_goes_on(engine, layout, mode):
    """With a half-prefilled request among them: prompts of three chunks."""
    request = {"input_ids": prompts(6, length=300), "sampling_params": GREEDY | {"max_new_tokens": 100}}
    engine.switch(layout)
    expected = tokens(engine.generate(**request))
    engine.flush_cache()

    async def go() -> list[dict]:
        task = asyncio.ensure_future(engine.async_generate(**request))
        for _ in range(3):
            await wait_for_steps(engine, 4)
            async with paused(engine, mode):
                before = await engine.async_health()
                assert before["inflight"] == 6 and all(rank["paused"] for rank in before["ranks"])
                if mode == "retract":
                    assert all(rank["waiting"] == rank["inflight"] for rank in before["ranks"])
                await asyncio.sleep(0.1)
                after = await engine.async_health()
                assert after["ranks"][0]["forward_ct"] == before["ranks"][0]["forward_ct"]
        return await task

    assert tokens(engine._run(go())) == expected
    assert engine.flush_cache().success


@LAYOUTS
@MODES
def test_a_switch_while_paused(engine, layout, mode):
    target = "tp" if layout == "ep" else "ep"
    request = {"input_ids": prompts(6, length=300), "sampling_params": GREEDY | {"max_new_tokens": 40}}
    engine.switch(layout)
    expected = tokens(engine.generate(**request))
    engine.flush_cache()

    async def go() -> list[dict]:
        task = asyncio.ensure_future(engine.async_generate(**request))
        await wait_for_steps(engine, 8)
        async with paused(engine, mode):
            record = await engine.async_switch(target)
            assert record.refused is None and record.inflight == 6
            assert (record.waiting == 6) == (mode == "retract")
        return await task

    assert tokens(engine._run(go())) == expected


@LAYOUTS
def test_abort_while_paused_answers_at_once(engine, layout):
    engine.switch(layout)

    async def go() -> tuple[dict, dict]:
        stay, leave = (
            asyncio.ensure_future(engine.async_generate(input_ids=row, sampling_params=GREEDY, rid=f"paused-{index}"))
            for index, row in enumerate(prompts(2))
        )
        await wait_for_steps(engine, 5)
        async with paused(engine):
            await engine.async_abort("paused-1")
            left = await asyncio.wait_for(leave, 20)
            assert (await engine.async_health())["inflight"] == 1
        return await stay, left

    stay, left = engine._run(go())
    assert len(stay["output_ids"]) == 48 and 0 < len(left["output_ids"]) < 48
    assert left["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.flush_cache().success


@LAYOUTS
def test_flush_health_and_state(engine, layout):
    engine.switch(layout)
    engine.generate(input_ids=prompts(2, length=100), sampling_params=GREEDY)
    assert engine.flush_cache().success
    health = engine.health()
    assert health["ok"] and health["layout"] == layout and health["inflight"] == 0
    assert [rank["rank"] for rank in health["ranks"]] == [0, 1]
    states = engine.get_server_info()["internal_states"]
    assert [state["dp_size"] for state in states] == [2, 2] if layout == "ep" else [1, 1]

    async def under_load():
        task = asyncio.ensure_future(engine.async_generate(input_ids=prompts(4), sampling_params=GREEDY))
        await wait_for_steps(engine, 3)
        flushed = await engine.tokenizer_manager.flush_cache()
        return flushed.success, (await engine.async_health())["inflight"], await task

    flushed, inflight, answers = engine._run(under_load())
    assert (flushed, inflight) == (False, 4)
    assert all(len(answer["output_ids"]) == 48 for answer in answers)


@pytest.mark.parametrize("target", ["tp", "ep"])
def test_control_requests_sent_with_a_switch_wait_and_succeed(engine, target):
    rows = prompts(8)
    alone = tokens(engine.generate(input_ids=rows, sampling_params=GREEDY))
    engine.switch("ep" if target == "tp" else "tp")

    async def go():
        rids = [f"row-{row}" for row in range(6)]
        task = asyncio.ensure_future(engine.async_generate(input_ids=rows[:6], sampling_params=GREEDY, rid=rids))
        await wait_for_steps(engine, 4)
        switch = asyncio.ensure_future(engine.async_switch(target))
        await asyncio.sleep(0)  # sent
        await engine.async_abort("row-2")
        late = asyncio.ensure_future(engine.async_generate(input_ids=rows[7], sampling_params=GREEDY))
        flush = engine.tokenizer_manager.flush_cache()
        state = engine.tokenizer_manager.get_internal_state()
        record, flushed, states, health = await asyncio.gather(switch, flush, state, engine.async_health())
        return record, flushed, states, health, await task, await late

    record, flushed, states, health, answers, late = engine._run(go())
    assert record.refused is None and record.target == target and record.inflight >= 5
    assert not flushed.success and len(states) == 2  # requests are in flight
    assert health["layout"] == target and health["ok"]
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers].count("abort") == 1
    assert answers[2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert late["output_ids"] == alone[7]
    assert [row for index, row in enumerate(tokens(answers)) if index != 2] == alone[:2] + alone[3:6]


def test_requests_of_both_layouts_mix_and_each_is_answered_once(engine):
    """Some arrive in EP, some in TP by way of either rank, some in EP again."""
    rows = prompts(12)
    expected = tokens(engine.generate(input_ids=rows, sampling_params=GREEDY))
    engine.flush_cache()

    async def go() -> list[dict]:
        tasks = []
        for first, layout in ((0, None), (4, "tp"), (8, "ep")):
            if layout:
                record = await engine.async_switch(layout)
                assert record.inflight == first
            for row in rows[first : first + 4]:
                tasks.append(asyncio.ensure_future(engine.async_generate(input_ids=row, sampling_params=GREEDY)))
                await asyncio.sleep(0.005)
            await wait_for_steps(engine, 3)
            health = await engine.async_health()
            assert health["inflight"] == first + 4
            if layout == "tp":
                assert [rank["inflight"] for rank in health["ranks"]] == [8, 8]
        return [await task for task in tasks]

    answers = engine._run(go())
    assert tokens(answers) == expected
    assert all(answer["meta_info"]["completion_tokens"] == 48 for answer in answers)


def test_retracted_requests_survive_switches(engine):
    """Three requests of 1,280 tokens a rank leave 256 of 4,096 rows, and want 330: SGLang takes one out again."""
    request = {"input_ids": prompts(12, length=1280)[::2], "sampling_params": GREEDY | {"max_new_tokens": 110}}
    expected = one_by_one(engine, request)
    engine.flush_cache()

    async def go() -> tuple[list[dict], list]:
        task = asyncio.ensure_future(engine.async_generate(**request))
        await until(engine, all_decode)
        await until(engine, waiting)
        records = []
        for layout in ("tp", "ep", "tp"):
            records.append(await engine.async_switch(layout))
            await wait_for_steps(engine, 3)
        return await task, records

    answers, records = engine._run(go())
    assert [record.refused for record in records] == [None] * 3
    assert records[0].waiting >= 1 and all(record.inflight == 6 for record in records)
    assert any(answer["meta_info"]["num_retractions"] for answer in answers)
    assert tokens(answers) == expected


@LAYOUTS
def test_a_flush_does_not_wait(engine, layout):
    """Upstream's would: until each rank is idle, at different times in EP, and then TP's ranks would not have the same
    prefixes cached."""
    engine.switch(layout)

    async def go():
        task = asyncio.ensure_future(engine.async_generate(input_ids=prompts(3), sampling_params=GREEDY))
        await wait_for_steps(engine, 4)
        refused = await engine.tokenizer_manager.flush_cache(timeout_s=30)
        health = await engine.async_health()
        await task
        return refused, health, await engine.tokenizer_manager.flush_cache(timeout_s=30)

    refused, health, flushed = engine._run(go())
    assert health["inflight"] == 3 and not refused.success
    assert refused.message.startswith("3 requests are in flight, and a switching engine does not wait to flush")
    assert flushed.success


@LAYOUTS
def test_a_profile_is_taken_once_by_each_rank(engine, layout, tmp_path):
    """Upstream's controller sends these messages to all ranks, and here each rank hands on what it receives: two
    answers too many came, after which no other answer was the right one."""
    engine.switch(layout)
    engine.start_profile(output_dir=str(tmp_path), activities=["CPU"])
    engine.generate(input_ids=prompts(2), sampling_params=GREEDY | {"max_new_tokens": 4})
    engine.stop_profile()
    assert len(list(tmp_path.iterdir())) == 2
    assert engine.health()["ok"] and engine.flush_cache().success


def test_a_union_that_no_partition_holds_loses_no_tokens(engine):
    """Five requests of 1,500 tokens fit into TP's 8,192 rows, but only two of them on each EP rank of 4,096."""
    request = {"input_ids": prompts(10, length=1500)[::2], "sampling_params": GREEDY | {"max_new_tokens": 40}}
    expected = one_by_one(engine, request)
    engine.switch("tp")
    engine.flush_cache()

    async def go():
        task = asyncio.ensure_future(engine.async_generate(**request))
        await until(engine, lambda health: health["inflight"] == 5 and all_decode(health))
        record = await engine.async_switch("ep")
        return record, await engine.async_health(), await task

    record, health, answers = engine._run(go())
    assert (record.refused, record.running) == (None, 5)
    assert waiting(health) == 1 and health["inflight"] == 5
    assert [answer["meta_info"]["num_retractions"] for answer in answers].count(1) == 1
    assert tokens(answers) == expected


def test_a_stopped_batch_does_not_hold_back_the_next(engine):
    """A switch right after the last request of a batch ended, and requests right after the switch."""
    for _ in range(3):
        run = switched_run(engine, ["tp", "ep"], after=2, input_ids=prompts(3), sampling_params=GREEDY)
        assert all(len(row) == 48 for row in run.tokens)
