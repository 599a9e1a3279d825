"""Where a rollout step begins and ends. The engine stands in by the two calls that Steps makes of it."""

import asyncio

import pytest

from moebius_engine.config import SwitchConfig
from moebius_engine.telemetry import UpdateRecord
from rollout.replay.dump import RequestDump
from rollout.verl_plugin.steps import Steps
from tests.unit.test_phases import trace


class Engine:
    def __init__(self):
        self.calls: list = []
        self.begin: asyncio.Event | None = None  # what async_begin_step waits for
        self.config = SwitchConfig(threshold=2, timeout_s=0.5)

    async def async_begin_step(self, step, requests=None):
        await (asyncio.sleep(0) if self.begin is None else self.begin.wait())
        self.calls.append(step)

    async def async_end_step(self):
        self.calls.append("end")
        return trace((0.0, 2, 0), (1.0, 0, 7))


async def respond(steps: Steps, step: int, tokens: int, release: asyncio.Event) -> None:
    async with steps.request(lambda: step) as lengths:
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
        async with steps.request(lambda: 1):
            raise RuntimeError("refused")
    await steps.end()
    assert steps.take()[0][0].responses == 0


async def test_what_comes_while_a_step_begins_is_paused_with_it(engine, steps):
    """An abort in that moment: one request is in flight, the others have not begun and belong to the next step."""
    release, version = asyncio.Event(), [1]
    engine.begin = asyncio.Event()

    async def request() -> None:
        async with steps.request(lambda: version[0]) as lengths:
            await release.wait()
            lengths.append(1)

    first = asyncio.create_task(request())
    await asyncio.sleep(0.01)
    pausing = asyncio.create_task(steps.pause())
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0.01)
    engine.begin.set()
    await pausing
    release.set()
    await steps.end()
    assert first.done() and not any(other.done() for other in others)
    version[0] = 2
    await steps.resume()
    await asyncio.gather(*others)
    await steps.end()
    assert engine.calls == [1, "end", 2, "end"]
    assert [report.responses for report in steps.take()[0]] == [1, 3]


async def test_a_validation_is_no_step_and_keeps_the_update(engine, steps):
    update = UpdateRecord(seconds=1, bytes=1, tensors=1, layout="ep")
    steps.updated(update)
    release = asyncio.Event()
    release.set()
    await respond(steps, 1, 4, release)
    await steps.end(keep=False)
    assert steps.take() == ([], [update])


async def test_a_steps_requests_are_written_to_a_file_of_their_own(engine, tmp_path):
    dump = RequestDump(tmp_path)
    steps = Steps(engine, dump)
    for number in (1, 2):
        async with steps.request(lambda number=number: number):
            dump.write(number, f"r{number}", [5], [6, 7], {"temperature": 1.0}, {"type": "stop"})
        await steps.end()
        dump.write(9, "late", [5], [6], {}, {"type": "stop"})  # between two steps: left out
    files = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert files == {"step_1.jsonl": 1, "step_2.jsonl": 1}
