"""Requests that arrive in the very step of a switch."""

import asyncio

import pytest

from tests.engine.inflight import GREEDY, prompts

TRIES = 25
REQUEST = {"input_ids": prompts(4), "sampling_params": GREEDY | {"max_new_tokens": 6}}


@pytest.mark.timeout(240)
def test_requests_that_arrive_with_a_switch_go_to_all_ranks(engine):
    """A rank once kept those that it received in the step in which the command for TP came. The ranks' batches differed
    then, and in the next forward step they waited for each other, or died of it."""
    engine.switch("ep")
    expected = [answer["output_ids"] for answer in engine.generate(**REQUEST)]

    async def once(delay_s: float, target: str) -> list[list[int]]:
        switch = asyncio.ensure_future(engine.async_switch(target))
        await asyncio.sleep(delay_s)
        answers = await engine.async_generate(**REQUEST)
        await switch
        return [answer["output_ids"] for answer in answers]

    for number in range(TRIES):
        for target in ("tp", "ep"):
            assert engine._run(once(1e-4 * number, target)) == expected
