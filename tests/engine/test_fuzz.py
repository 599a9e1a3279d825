"""The rules of the fake engine on SGLang: scripts of requests, controls and switches (tests/fuzz/play.py)."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

from moebius_engine.switch.faults import Fault
from tests.engine.inflight import GREEDY
from tests.fuzz.play import Play
from tests.fuzz.script import Steps, Submit, Switch, scripts

LONGEST = 40
# As the fake's: short, of several chunks, two that share a prefix, and long ones that fill a rank.
PROMPTS = [
    [3, 5],
    [7 * token % 500 for token in range(150)],
    [7 * token % 500 for token in range(140)] + [1, 2, 3],
    *([number, *(11 * token % 500 for token in range(900 + number))] for number in range(3)),
]


class RealEngine:
    """The shared engine under the names of play.Engine."""

    def __init__(self, engine, weights):
        self._engine, self._weights = engine, weights
        self.async_generate, self.async_switch = engine.async_generate, engine.async_switch
        self.async_abort, self.async_health = engine.async_abort, engine.async_health
        self.async_release_memory_occupation = engine.async_release_memory_occupation
        self.async_resume_memory_occupation = engine.async_resume_memory_occupation

    async def pause(self, mode: str) -> None:
        await self._engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def go_on(self) -> None:
        await self._engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput())

    async def flush(self) -> bool:
        return (await self._engine.tokenizer_manager.flush_cache()).success

    async def update(self, flush: bool) -> str:
        return (await self._engine.async_update_weights(self._weights.items(), flush_cache=flush)).layout

    async def break_next_switch(self) -> None:
        await self._engine.async_inject(Fault("refuse", "verify", rank=1))

    def live_ids(self) -> list[str]:
        return list(self._engine.tokenizer_manager.rid_to_state)


@pytest.fixture(scope="module")
def reference(switching_engine) -> dict[int, list[int]]:
    params = GREEDY | {"max_new_tokens": LONGEST}
    answers = [switching_engine.generate(input_ids=row, sampling_params=params) for row in PROMPTS]
    return {index: answer["output_ids"] for index, answer in enumerate(answers)}


@pytest.fixture
def play(engine, reference, tiny_moe):
    weights = load_file(f"{tiny_moe}/model.safetensors")

    def play(events: list) -> Play:
        engine.switch("ep")
        played = Play(RealEngine(engine, weights), PROMPTS, reference)
        engine.loop.run_until_complete(asyncio.wait_for(played.run(events), 200))
        return played

    return play


def test_a_script_with_requests_in_every_state(play):
    burst = [Submit(prompt, 30, prompt % 2 == 0) for prompt in (0, 1, 2, 3, 4, 5)]
    assert play([*burst, Steps(4), Switch("tp", False), Steps(2), Switch("ep", False)]).switches == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
# Without shrinking: every example takes seconds here. The fake engine shrinks what both have in common.
@settings(
    max_examples=25,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(scripts(prompts=len(PROMPTS), tokens=LONGEST, steps=6, rounds=6))
def test_any_script(play, events):
    play(events)
