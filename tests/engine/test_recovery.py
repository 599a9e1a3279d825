"""A real engine dies under RolloutActor: all responses come back whole, with the tokens of an undisturbed run."""

import asyncio
import os
import re
import signal

import pytest
import pytest_asyncio
import ray
from safetensors.torch import load_file

from moebius_engine.config import SwitchConfig
from moebius_engine.vitals import State
from rollout.actor import RolloutActor, remote_actor
from tests.unit.recovery_contract import LONG, PROMPTS, check_death

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

GREEDY = {"temperature": 0.0, "ignore_eos": True}
ROWS = [[20 + row, *range(30, 36)] for row in range(10)]
LENGTHS = [12] * 4 + [85, 88, 91, 94, 120, 130]  # the long ones are reported once before they end
SERVER = {"skip_tokenizer_init": True, "random_seed": 0, "max_total_tokens": 8192, "context_length": 2048}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def actor(tiny_moe):
    actor = RolloutActor(
        tiny_moe,
        ranks=2,
        switch={"threshold": 5, "timeout_s": 120},
        server_args=SERVER,
        recovery={"max_restarts": 20, "backoff_s": 0.0},
    )
    await actor.update_weights(load_file(f"{tiny_moe}/model.safetensors").items())
    yield actor
    actor.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(actor):
    return await step_of(actor)


async def step_of(actor, meanwhile=None) -> list:
    """A step that begins in EP and ends in TP; `meanwhile` is awaited beside it."""
    await actor.begin_step(1, requests=len(ROWS))
    ids = [f"row-{row}" for row in range(len(ROWS))]
    batch = asyncio.ensure_future(
        actor.generate_batch(
            ROWS, sampling=[{**GREEDY, "max_new_tokens": n} for n in LENGTHS], request_ids=ids, timeout_s=240
        )
    )
    if meanwhile is not None:
        await meanwhile()
    return [sample for (sample,) in await batch]


def pid_of(engine, who: str) -> int:
    """Of rank 1, the detokenizer or the controller."""
    if who == "rank":
        return engine.vitals[1].pid
    watch = engine.watch
    return next(child.pid for child, name in zip(watch._processes, watch._names, strict=True) if name.endswith(who))


async def in_mid_decode(actor, rows=(4, 5, 6, 7, 8, 9)):
    """The engine, once these rows have tokens that it knows of."""
    engine = actor._keeper.engine
    async with asyncio.timeout(120):
        while not all(engine.so_far(f"row-{row}")[0] for row in rows):
            await asyncio.sleep(0.02)
    return engine


def same(samples, undisturbed) -> None:
    """`lost` is 0 and no token differs."""
    assert [sample.output_ids for sample in samples] == [sample.output_ids for sample in undisturbed]
    for sample, other in zip(samples, undisturbed, strict=True):
        assert sample.finish_reason["type"] == "length"
        assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (sample.weight_version_begin, sample.weight_version_end) == (1, 1)


async def test_a_rank_that_is_killed(actor, undisturbed):
    engines = []

    async def kill():
        engine = await in_mid_decode(actor)
        engines.append(engine)
        os.kill(pid_of(engine, "rank"), signal.SIGKILL)
        assert "was ended by SIGKILL" in str(await asyncio.wait_for(engine.async_wait_dead(), 10))
        assert (await actor.health())["state"] == State.STARTING

    samples = await step_of(actor, kill)
    same(samples, undisturbed)
    assert [sample.resumed for sample in samples] == [0] * 4 + [1] * 6
    assert {sample.weight_versions for sample in samples[4:]} == {(1, 1)}
    report = await actor.end_step()
    assert (report.step, report.restarts, report.resumed_requests, report.responses) == (1, 1, 6, 10)
    assert report.lost_s > 1 and report.tokens == sum(LENGTHS) and report.inflight[-1][1] == 0
    health = await actor.health()
    assert (health["ok"], health["state"], health["weight_version"], health["restarts"]) == (True, State.READY, 1, 1)
    assert actor._keeper.engine is not engines[0]
    assert 'moebius_engine_state{moebius_engine_state="ready"} 1.0' in actor.prometheus()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how", "layout", "error"),
    [
        ("rank", signal.SIGKILL, "tp", "rank 1 .* was ended by SIGKILL"),
        ("rank", signal.SIGSTOP, "ep", r"rank 1 .* no sign of life for 8\."),
        ("detokenizer", signal.SIGKILL, "ep", "detokenizer .* was ended by SIGKILL"),
        ("controller", signal.SIGKILL, "ep", "the data-parallel controller .* was ended by SIGKILL"),
    ],
)
async def test_any_process_that_ends_or_stops(actor, undisturbed, who, how, layout, error):
    async def hit():
        engine = await in_mid_decode(actor)
        async with asyncio.timeout(60):
            while (await engine.async_health())["layout"] != layout:
                await asyncio.sleep(0.01)
        os.kill(pid_of(engine, who), how)
        assert re.search(error, str(await asyncio.wait_for(engine.async_wait_dead(), 10)))

    samples = await step_of(actor, hit)
    same(samples, undisturbed)
    assert any(sample.resumed for sample in samples)


@pytest.mark.slow
async def test_an_exception_in_a_rank(actor, undisturbed):
    async def fail():
        engine = await in_mid_decode(actor)
        with pytest.raises(RuntimeError, match=r"rank \d .* failed: ValueError: 'nonsense' is not a valid Layout"):
            await engine._command("switch", layout="nonsense")

    same(await step_of(actor, fail), undisturbed)


@pytest.mark.slow
async def test_a_rank_that_is_stuck_and_the_contract_of_the_fake_engine(tiny_moe):
    """Both are stuck when one is stopped; here only that counts, and not its silence."""
    from moebius_engine.engine import SwitchingEngine

    engine = SwitchingEngine(
        tiny_moe, ranks=2, switch=SwitchConfig(policy="ep", timeout_s=60, silent_s=60, stuck_s=8), **SERVER
    )
    answers = await asyncio.gather(
        *(engine.async_generate(input_ids=prompt, sampling_params=LONG) for prompt in PROMPTS.values())
    )
    expected = dict(zip(PROMPTS, (answer["output_ids"] for answer in answers), strict=True))
    await asyncio.sleep(10)  # an idle engine is not stuck
    await check_death(
        engine,
        lambda: os.kill(pid_of(engine, "rank"), signal.SIGSTOP),
        lambda: asyncio.sleep(0.02),
        expected,
        r"rank \d \(pid \d+\) has taken no forward step for 8 s, with \d requests in flight",
    )


@pytest.mark.slow
async def test_in_a_ray_actor_twice(tiny_moe):
    """SGLang's processes end with the thread that started them: that of a restart must live on."""
    ray.init(num_cpus=2, include_dashboard=False)
    handle = remote_actor(num_cpus=1).remote(
        tiny_moe, ranks=2, switch={"policy": "ep", "timeout_s": 120}, server_args=SERVER, recovery={"backoff_s": 0.0}
    )
    request = {"prompts": ROWS[4:], "sampling": {**GREEDY, "max_new_tokens": 100}, "timeout_s": 240}
    try:
        expected = await handle.generate_batch.remote(**request)
        # What SGLang's processes send to their parent when they fail.
        await handle.__ray_call__.remote(lambda self: os.kill(os.getpid(), signal.SIGQUIT))
        for rank in (1, 0):
            batch = handle.generate_batch.remote(**request)
            while (health := await handle.health.remote())["ranks"][0]["inflight"] < 3:
                await asyncio.sleep(0.02)
            os.kill(health["pids"][rank], signal.SIGKILL)
            samples = await batch
            assert [one.output_ids for (one,) in samples] == [one.output_ids for (one,) in expected]
            assert {one.resumed for (one,) in samples} == {1}
        health = await handle.health.remote()
        assert (health["state"], health["restarts"]) == ("ready", 2)
        await handle.shutdown.remote()
    finally:
        ray.kill(handle)
        ray.shutdown()
