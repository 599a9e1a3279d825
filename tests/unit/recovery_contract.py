"""What RolloutActor relies on when an engine dies: of the fake engine and of the real one."""

import asyncio

import pytest

from moebius_engine.vitals import EngineDead, State

LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 150}
PROMPTS = {"one": [1, 2, 3], "two": [7, 8]}


async def check_death(engine, kill, advance, expected: dict[str, list[int]], names: str) -> None:
    """Kills an engine under two requests.

    advance: lets it generate a little. expected: each prompt's tokens, undisturbed. names: what the error must match.
    """
    assert engine.state() == State.READY
    assert engine.config.high >= 1
    waiting = asyncio.ensure_future(engine.async_wait_dead())
    calls = [
        asyncio.ensure_future(
            engine.async_generate(input_ids=prompt, sampling_params=LONG, rid=rid, return_logprob=True)
        )
        for rid, prompt in PROMPTS.items()
    ]
    async with asyncio.timeout(60):
        while not all(engine.so_far(rid)[0] for rid in PROMPTS):
            await advance()
    kill()
    for call in calls:
        with pytest.raises(EngineDead, match=names):
            await asyncio.wait_for(call, 20)
    assert str(await asyncio.wait_for(waiting, 1)) == str(calls[0].exception())
    assert engine.state() == State.DEAD
    for rid in PROMPTS:
        tokens, logprobs = engine.so_far(rid)
        assert 0 < len(tokens) == len(logprobs) < 150
        assert tokens == expected[rid][: len(tokens)]
        assert all(type(logprob) is float for logprob in logprobs)
    assert engine.so_far("three") == ([], [])
    for later in (
        engine.async_generate(input_ids=[1], sampling_params=LONG, rid="four", return_logprob=True),
        engine.async_health(),
        engine.async_abort(rid="one"),
        engine.async_begin_step(1),
        engine.async_end_step(),
        engine.async_update_weights([]),
    ):
        with pytest.raises(EngineDead, match=names):
            await asyncio.wait_for(later, 1)
    engine.shutdown()
    engine.shutdown()
