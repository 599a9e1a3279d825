"""Scripts of requests, controls and switches on the fake engine: what must come back comes back. (tests/engine/
test_fuzz.py plays the same rules on SGLang.)"""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fake_engine import FakeEngine
from tests.fuzz.fake_rank import VOCAB, response
from tests.fuzz.play import Play
from tests.fuzz.script import Steps, Submit, Switch, scripts

LONGEST = 16
# Short ones; some that share a prefix up to within a page; and many long ones, of several chunks each.
PROMPTS = [
    [3, 5],
    [7 * token % VOCAB for token in range(22)],
    [7 * token % VOCAB for token in range(18)] + [1, 2, 3],
    *([number, *(11 * token % VOCAB for token in range(60 + number))] for number in range(8)),
    [0, *(11 * token % VOCAB for token in range(50)), 9, 8, 7, 6],
]
REFERENCE = {index: response(prompt, LONGEST) for index, prompt in enumerate(PROMPTS)}
SCRIPTS = scripts(prompts=len(PROMPTS), tokens=LONGEST, steps=5, rounds=6)


def play(page: int, events: list) -> Play:
    async def go() -> Play:
        engine = FakeEngine(page)
        played = Play(engine, PROMPTS, REFERENCE)
        try:
            await played.run(events)
        finally:
            await engine.stop()
        return played

    return asyncio.run(go())


EVERY_STATE = [
    *(Submit(prompt, 12, prompt % 2 == 0) for prompt in (0, 0, 3, 4, 5, 6)),
    Steps(2),
    Switch("tp", False),
    Steps(1),
    Switch("ep", False),
]
"""Requests that decode, wait and are half-prefilled at both switches."""


def test_a_script_with_requests_in_every_state(monkeypatch):
    commit, states = FakeEngine._commit, []

    def seen(self, target, given, *rest):
        states.append([len(reqs) for reqs in vars(given[0].roster).values() if isinstance(reqs, list)])
        commit(self, target, given, *rest)

    monkeypatch.setattr(FakeEngine, "_commit", seen)
    assert play(4, EVERY_STATE).switches == 2
    assert len(states) == 2 and all(map(all, states)), states


def test_kv_in_the_wrong_place_is_noticed(monkeypatch):
    move = FakeEngine._move

    def wrong(self, target, places, taken):
        move(self, target, places, taken)
        for rank in self.ranks:
            rank.kv[target] = rank.kv[target].roll(1)

    monkeypatch.setattr(FakeEngine, "_move", wrong)
    with pytest.raises(AssertionError, match="is right"):
        play(1, EVERY_STATE)


@pytest.mark.parametrize("state", ["running", "prefilling", "waiting"])
def test_a_lost_request_is_noticed(monkeypatch, state):
    commit = FakeEngine._commit

    def losing(self, target, given, *rest):
        for one in given:
            getattr(one.roster, state)[:] = []
        commit(self, target, given, *rest)

    monkeypatch.setattr(FakeEngine, "_commit", losing)
    monkeypatch.setattr("tests.fuzz.play.DEADLINE_S", 2.0)
    with pytest.raises((AssertionError, TimeoutError, KeyError)):
        play(1, EVERY_STATE)


@settings(max_examples=80)
@given(st.sampled_from([1, 4]), SCRIPTS)
def test_any_script(page, events):
    play(page, events)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000)
@given(st.sampled_from([1, 4]), SCRIPTS)
def test_any_script_nightly(page, events):
    play(page, events)
