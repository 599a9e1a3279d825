"""Where a rollout step begins and ends. The engine stands in by the two calls that Steps makes of it."""

import asyncio

import pytest

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import UpdateRecord
from rollout.verl_plugin.steps import Steps
from tests.unit.test_phases import trace


class Engine:
    def __init__(self):
        self.calls: list = []
        self.config = SwitchConfig(threshold=2, timeout_s=0.5)

    async def async_begin_step(self, step, requests=None):
        await asyncio.sleep(0)
        self.calls.append(step)

    async def async_end_step(self):
        self.calls.append("end")
        return trace((0.0, 2, 0), (1.0, 0, 7))


async def respond(steps: Steps, step: int, tokens: int, release: asyncio.Event) -> None:
    async with steps.request(step) as lengths:
        await release.wait()
        lengths.append(tokens)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def steps(engine):
    return Steps(engine)


async def test_a_step_is_begun_once_however_many_requests_come(engine, steps):
    release = asyncio.Event()
    release.set()
    await asyncio.gather(*(respond(steps, 3, tokens, release) for tokens in (5, 9, 2)))
    await steps.end()
    await steps.end()
    (report,), _ = steps.take()
    assert engine.calls == [3, "end"]
    assert (report.responses, report.longest_response, report.tokens_burst) == (3, 9, 7)
    assert steps.take() == ([], [])


async def test_the_end_waits_for_what_is_in_flight(engine, steps):
    release = asyncio.Event()
    request = asyncio.create_task(respond(steps, 1, 4, release))
    await asyncio.sleep(0.05)
    ending = asyncio.create_task(steps.end())
    await asyncio.sleep(0.05)
    assert engine.calls == [1]
    release.set()
    await asyncio.gather(request, ending)
    assert engine.calls == [1, "end"]


async def test_the_end_does_not_wait_for_ever(steps):
    request = asyncio.create_task(respond(steps, 1, 4, asyncio.Event()))
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"1 requests are in flight after 0.5 s"):
        await steps.end()
    request.cancel()


async def test_a_request_that_fails_is_not_in_flight(steps):
    with pytest.raises(RuntimeError, match="refused"):
        async with steps.request(1):
            raise RuntimeError("refused")
    await steps.end()
    assert steps.take()[0][0].responses == 0


async def test_a_validation_is_no_step_and_keeps_the_update(engine, steps):
    update = UpdateRecord(seconds=1, bytes=1, tensors=1, layout="ep")
    steps.updated(update)
    release = asyncio.Event()
    release.set()
    await respond(steps, 1, 4, release)
    await steps.end(keep=False)
    assert steps.take() == ([], [update])
