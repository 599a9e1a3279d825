"""Faults of a switch that end the engine: the actor starts the next one, and no request is lost.

Each costs a start, so all of them are slow. docs/faults.md is their table.
"""

import asyncio

import pytest

from moebius_engine.config import SwitchConfig
from moebius_engine.switch.faults import Fault
from rollout.actor import RolloutActor
from tests.engine.inflight import GREEDY, prompts

TIMEOUT_S = 8.0  # of the ranks' waits for each other, and half as long without a sign of life
SAMPLING = GREEDY | {"max_new_tokens": 120}
STATES = ("settle", "move_weights", "share", "prepare", "move_kv", "finish", "verify", "commit")
TOGETHER = tuple(state for state in STATES if state != "prepare")  # alone, an exception is undone
WAITED_FOR = ("move_weights", "share", "move_kv", "verify", "roll_back")

ENDING = [
    *(Fault("die", state, rank=1) for state in (*STATES, "roll_back")),
    *(Fault("stop", state) for state in (*STATES, "roll_back")),
    *(Fault("raise", state, rank=1) for state in (*TOGETHER, "roll_back")),
    *(Fault("no_memory", state) for state in ("move_weights", "commit")),
    *(Fault("slow", state, rank=1, seconds=3 * TIMEOUT_S) for state in WAITED_FOR),
    *(Fault(kind, "roll_back", rank=1, layer=2) for kind in ("corrupt", "drop")),
]


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def actor(tiny_moe, runner):
    switch = SwitchConfig(
        policy="ep", check_bytes=True, inject_faults=True, timeout_s=TIMEOUT_S, silent_s=TIMEOUT_S / 2
    )
    actor = RolloutActor(
        tiny_moe,
        switch=switch,
        server_args={"max_running_requests": 32, "max_total_tokens": 4096},
        recovery={"max_restarts": 1000, "backoff_s": 0.0},
    )
    yield actor
    actor.shutdown()


@pytest.fixture(scope="module")
def undisturbed(actor, runner):
    samples = runner.run(actor.generate_batch(prompts(8), sampling=SAMPLING))
    return [sample.output_ids for (sample,) in samples]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ENDING, ids=lambda fault: f"{fault.kind}-{fault.at}")
def test_the_engine_ends_and_the_next_one_ends_the_requests(actor, runner, undisturbed, fault):
    async def go():
        health = await actor.health()
        before, target = health["restarts"], "tp" if health["layout"] == "ep" else "ep"
        batch = asyncio.create_task(actor.generate_batch(prompts(8), sampling=SAMPLING))
        while not (await actor.health())["inflight"]:
            await asyncio.sleep(0.05)
        if fault.at == "roll_back":
            await actor.inject(Fault("refuse", "verify"))
        await actor.inject(fault)
        await actor.switch(target)  # by the next engine, once the first has died of it
        samples = await batch
        health = await actor.health()
        return samples, health["restarts"] - before, health["died_of"]

    samples, restarts, died_of = runner.run(go())
    assert restarts == 1
    assert "rank" in died_of
    assert [sample.output_ids for (sample,) in samples] == undisturbed
    assert all(sample.resumed == 1 for (sample,) in samples)
