"""Switching an engine while requests are in flight, and comparing with a run that was not switched."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import psutil
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 48}


@dataclass
class Run:
    """Answers of a switched run and the records of its switches."""

    answers: list[dict]
    records: list

    @property
    def tokens(self) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.answers]


def prompts(count: int, length: int = 6) -> list[list[int]]:
    """Distinct prompts, pairs of which share all but the last token."""
    middle = [20 + position * 7 % 240 for position in range(length - 2)]
    return [[7 + row // 2, *middle, 300 + row] for row in range(count)]


def switched_run(engine, layouts, *, after: int = 4, together: bool = False, **request) -> Run:
    """Generate a batch and switch through `layouts`, each time once every request has `after` more tokens or so.

    A switch without requests in flight would prove nothing, so it fails. together: all rows reach a rank in one step.
    SGLang's penalties depend on that: a decode step after another row's prefill is fed another token.
    """

    async def go() -> Run:
        if together:
            with stopped_schedulers():
                task = asyncio.ensure_future(engine.async_generate(**request))
                await asyncio.sleep(0.5)
        else:
            task = asyncio.ensure_future(engine.async_generate(**request))
        records = []
        for layout in layouts:
            await wait_for_steps(engine, after)
            records.append(await engine.async_switch(layout))
        return Run(await task, records)

    run = engine.loop.run_until_complete(go())
    for record in run.records:
        assert record is not None and record.inflight > 0, f"nothing in flight at {record}"
    return run


@contextmanager
def stopped_schedulers() -> Iterator[None]:
    """Within it no rank takes a step (SIGSTOP); what is sent meanwhile is received at once afterwards."""
    ranks = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("sglang::sched")]
    assert ranks
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            rank.resume()


@asynccontextmanager
async def paused(engine, mode: str = "in_place") -> AsyncIterator[None]:
    """Within it the engine runs no steps."""
    manager = engine.tokenizer_manager
    await manager.pause_generation(PauseGenerationReqInput(mode=mode))
    try:
        yield
    finally:
        await manager.continue_generation(ContinueGenerationReqInput())


async def until(engine, reached, deadline_s: float = 60) -> dict:
    """Wait for a state of health. Returns it; fails after the deadline."""
    began = time.monotonic()
    while not reached(health := await engine.async_health()):
        assert time.monotonic() - began < deadline_s, health
        await asyncio.sleep(0.01)
    return health


async def wait_for_steps(engine, steps: int, deadline_s: float = 30) -> None:
    """Wait until rank 0 has run that many more forward steps. Fails if that takes longer than the deadline."""
    began = time.monotonic()
    target = (await engine.async_health())["ranks"][0]["forward_ct"] + steps
    while True:
        health = await engine.async_health()
        if health["ranks"][0]["forward_ct"] >= target:
            return
        assert time.monotonic() - began < deadline_s, f"no {steps} steps within {deadline_s} s: {health}"
        await asyncio.sleep(0.002)


def logprob_difference(left: list[dict], right: list[dict]) -> float:
    """Largest difference between the two runs' output logprobs."""
    return max(
        abs(a[0] - b[0])
        for one, other in zip(left, right, strict=True)
        for a, b in zip(
            one["meta_info"]["output_token_logprobs"], other["meta_info"]["output_token_logprobs"], strict=True
        )
    )
