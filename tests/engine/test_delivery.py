"""A receiver that is behind gets a request's tokens in order, though a switch has given it to another rank."""

import asyncio
import signal
from contextlib import contextmanager

import psutil
import pytest

from tests.engine.inflight import GREEDY, prompts, wait_for_steps

REQUEST = {"input_ids": prompts(4), "sampling_params": GREEDY | {"max_new_tokens": 60}}


@contextmanager
def stopped_detokenizer(engine):
    """It reads nothing meanwhile, while the ranks go on."""
    (process,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid in engine.get_all_child_pids() and "detokenizer" in " ".join(process.cmdline())
    )
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("targets", [["tp", "ep"], ["ep", "tp"], ["tp", "ep", "tp"]])
def test_tokens_keep_their_order_at_a_receiver_that_is_behind(engine, targets):
    """Seen: what rank 1 made after a switch came in between rank 0's last tokens, and would be lost behind an end."""
    expected = [answer["output_ids"] for answer in engine.generate(**REQUEST)]
    engine.switch(targets[0])

    async def last_chunk(prompt: list[int]) -> dict:
        stream = await engine.async_generate(input_ids=prompt, sampling_params=REQUEST["sampling_params"], stream=True)
        return [chunk async for chunk in stream][-1]

    async def go() -> list[list[int]]:
        streams = [asyncio.ensure_future(last_chunk(prompt)) for prompt in REQUEST["input_ids"]]
        await wait_for_steps(engine, 4)
        with stopped_detokenizer(engine):
            for target in targets[1:]:
                await wait_for_steps(engine, 5)
                record = await engine.async_switch(target)
                assert record is not None and record.inflight == len(streams)
            await wait_for_steps(engine, 5)
        return [chunk["output_ids"] for chunk in await asyncio.gather(*streams)]

    assert engine._run(go()) == expected
