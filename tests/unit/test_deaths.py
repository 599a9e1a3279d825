"""Requests, updates, aborts and deaths of the engine in any order: all requests are answered, and rightly."""

import asyncio
from concurrent.futures import Executor, Future

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moebius_engine.vitals import EngineDead, State
from tests.unit.fake_engine import response
from tests.unit.recovery_fleet import finish, make, sampling, settled


def _asked(machine) -> bool:
    return bool(machine.answers)


def _idle(machine) -> bool:
    return all(call.done() for call, *_ in machine.answers.values())


class Held(Executor):
    """In place of the thread that starts engines: a start takes until it is let go. With a thread's own pace, the same
    rules would sometimes find the engine back and sometimes not, and hypothesis wants to see the same again."""

    def __init__(self):
        self._held = []

    def submit(self, function, /, *args, **kwargs):
        self._held.append((Future(), function, args))
        return self._held[-1][0]

    def let_go(self):
        while self._held:
            future, function, args = self._held.pop(0)
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)


class Deaths(RuleBasedStateMachine):
    """Requests, updates, aborts and deaths in any order. At the end all must have been answered, and rightly."""

    @initialize(on_policy=st.booleans())
    def start(self, on_policy):
        self.runner = asyncio.Runner()
        self.actor, self.fleet = make(on_policy=on_policy)
        self.starts = self.actor._keeper._thread = Held()
        self.version = self.weights = self.deaths = 0
        self.answers: dict[str, tuple] = {}
        self.aborted: set[str] = set()

    def run(self, coroutine):
        """Without starting an engine."""
        return self.runner.run(coroutine)

    def run_starting(self, coroutine):
        """Until it is done, starting engines meanwhile."""

        async def go():
            task = asyncio.ensure_future(coroutine)
            while not task.done():
                self.starts.let_go()
                await asyncio.sleep(0)
            return await task

        return self.run(go())

    @rule(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=3), length=st.integers(0, 40), stop=st.booleans())
    def ask(self, prompt, length, stop):
        rid = f"r{len(self.answers)}"

        async def go():
            params = sampling(length, **({"stop_regex": "never"} if stop else {}))
            call = asyncio.ensure_future(self.actor.generate_batch([prompt], sampling=params, request_ids=[rid]))
            await settled()
            return call

        self.answers[rid] = (self.run(go()), response(prompt, length, self.weights), self.version)

    @rule(tokens=st.integers(1, 12))
    def generate(self, tokens):
        async def go():
            if self.fleet.last.dead is None:
                self.fleet.last.advance(tokens)
            await settled()

        self.run(go())

    @rule(fails=st.integers(0, 2), wait=st.booleans())
    def die(self, fails, wait):
        async def go():
            self.fleet.failures = fails
            self.fleet.last.die()
            if wait:
                await self.actor._keeper.ready()
            await settled()

        self.deaths += self.fleet.last.dead is None
        (self.run_starting if wait else self.run)(go())

    @rule()
    def start_again(self):
        async def go():
            for _ in range(3):  # two starts may fail
                self.starts.let_go()
                await settled()

        self.run(go())

    @precondition(_asked)
    @rule(data=st.data())
    def abort(self, data):
        rid = data.draw(st.sampled_from(sorted(self.answers)))

        async def go():
            aborted = await self.actor.abort([rid])
            await settled()
            return aborted

        self.aborted |= set(self.run_starting(go()))

    @precondition(_idle)
    @rule(value=st.integers(1, 9), again=st.booleans())
    def update(self, value, again):
        pairs = [("a", torch.tensor(value))]
        try:
            self.run_starting(self.actor.update_weights(pairs if again else iter(pairs)))
        except EngineDead:
            assert not again
        else:
            self.version, self.weights = self.version + 1, value

    @rule()
    def look(self):
        health = self.run(self.actor.health())
        assert health["state"] in (State.READY, State.STARTING)
        assert health["weight_version"] == self.version
        assert self.actor.progress()["inflight"] <= sum(not call.done() for call, *_ in self.answers.values())

    def teardown(self):
        async def go():
            for call, expected, version in self.answers.values():
                ((sample,),) = await finish(self.fleet, call)
                assert len(sample.logprobs) == len(sample.output_ids)
                assert sample.weight_version_begin == version and set(sample.weight_versions) <= {version}
                assert sample.resumed <= self.deaths
                if sample.finish_reason["type"] == "length":
                    assert sample.output_ids == expected
                else:
                    assert sample.request_id in self.aborted
                    assert sample.output_ids == expected[: len(sample.output_ids)]
            self.actor.shutdown()

        if hasattr(self, "runner"):
            try:
                self.run_starting(go())
            finally:
                self.runner.close()


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(max_examples=100, stateful_step_count=30)
