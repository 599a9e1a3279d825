"""RolloutActor over engines that die: no request is lost, and no token differs. Without a real engine."""

import asyncio

import pytest
import torch

from moebius_engine.config import SwitchConfig
from moebius_engine.vitals import EngineDead, State
from tests.unit.fake_engine import BUNDLE, FakeEngine, Fleet, response
from tests.unit.recovery_contract import LONG, PROMPTS, check_death
from tests.unit.recovery_fleet import finish, make, new_engine, sampling, settled


async def test_the_fake_engine_keeps_the_contract():
    engine = FakeEngine()

    async def advance():
        engine.advance()
        await asyncio.sleep(0)

    expected = {rid: response(prompt, LONG["max_new_tokens"]) for rid, prompt in PROMPTS.items()}
    await check_death(engine, engine.die, advance, expected, r"rank 1 \(pid 7\) was ended by SIGKILL")


async def test_requests_go_on_with_the_next_engine():
    actor, fleet = make()
    batch = asyncio.ensure_future(actor.generate_batch([[1], [2], [3]], sampling=[sampling(n) for n in (3, 20, 30)]))
    await settled()
    fleet.last.advance(2 * BUNDLE + 1)
    await settled()
    dead = fleet.last
    dead.die()
    next_one = await new_engine(fleet, dead)
    assert {rid: len(request["prompt"]) for rid, request in next_one._live.items()}.values() != {1}
    samples = [sample for (sample,) in await finish(fleet, batch)]
    assert [sample.output_ids for sample in samples] == [response([1], 3), response([2], 20), response([3], 30)]
    assert [sample.resumed for sample in samples] == [0, 1, 1]
    assert [sample.weight_versions for sample in samples] == [(0,), (0, 0), (0, 0)]
    assert all(len(sample.logprobs) == len(sample.output_ids) for sample in samples)
    assert dead.down
    actor.shutdown()


async def test_on_policy_begins_again():
    actor, fleet = make(on_policy=True)
    batch = asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20)))
    await settled()
    fleet.last.advance(2 * BUNDLE)
    dead = fleet.last
    dead.die()
    engine = await new_engine(fleet, dead)
    assert [request["prompt"] for request in engine._live.values()] == [[1]]
    ((sample,),) = await finish(fleet, batch)
    assert (sample.output_ids, sample.resumed, sample.weight_versions) == (response([1], 20), 1, (0,))
    actor.shutdown()


async def test_what_is_too_long_for_a_prompt_begins_again():
    actor, fleet = make(Fleet(prompt_limit=4))
    batch = asyncio.ensure_future(actor.generate_batch([[1, 2, 3]], sampling=sampling(20)))
    await settled()
    fleet.last.advance(2 * BUNDLE)
    fleet.last.die()
    ((sample,),) = await finish(fleet, batch)
    assert (sample.output_ids, sample.resumed, sample.weight_versions) == (response([1, 2, 3], 20), 1, (0,))
    actor.shutdown()


async def test_the_next_engine_has_the_weights_of_the_last_update():
    actor, fleet = make()
    await actor.update_weights([("a", torch.tensor(5))])
    await actor.update_weights(iter([("a", torch.tensor(7)), ("b", torch.tensor(2))]))
    batch = asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20)))
    await settled()
    fleet.last.advance(BUNDLE)
    fleet.last.die()
    ((sample,),) = await finish(fleet, batch)
    assert sample.output_ids == response([1], 20, weights=9)
    assert (sample.weight_version_begin, sample.weight_version_end, sample.weight_versions) == (2, 2, (2, 2))
    assert (await actor.health())["weight_version"] == 2 and fleet.last.version == 1
    actor.shutdown()


async def test_without_kept_weights_requests_fail_until_an_update_has_come():
    actor, fleet = make(keep_weights=False)
    await actor.update_weights([("a", torch.tensor(5))])
    batch = asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20)))
    await settled()
    fleet.last.die()
    with pytest.raises(EngineDead, match=r"keep_weights=False kept none"):
        await asyncio.wait_for(batch, 5)
    await actor.update_weights([("a", torch.tensor(5))])
    ((sample,),) = await finish(fleet, asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20))))
    assert sample.output_ids == response([1], 20, weights=5)
    actor.shutdown()


async def test_an_update_under_which_the_engine_dies(caplog):
    """Pairs that can be read again are; of a generator the trainer learns, and the weights before it hold."""
    actor, fleet = make()
    await actor.update_weights([("a", torch.tensor(5))])

    class DiesFirst(list):
        def __iter__(self):
            if len(fleet.engines) == 1:
                fleet.last.die()
            return super().__iter__()

    await actor.update_weights(DiesFirst([("a", torch.tensor(6))]))
    assert len(fleet.engines) == 2 and fleet.last.weights == 6

    def dies():
        yield "a", torch.tensor(7)
        fleet.last.die()

    with pytest.raises(EngineDead, match="rank 1"):
        await actor.update_weights(dies())
    await actor.begin_step(1)
    assert len(fleet.engines) == 3 and fleet.last.weights == 6
    assert (await actor.health())["weight_version"] == 2
    actor.shutdown()


async def update_under(actor, fleet):
    """A request that has BUNDLE of 20 tokens, an update to weights 5 that waits for it, and a later request."""
    first = asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20), request_ids=["first"]))
    await settled()
    fleet.last.advance(BUNDLE)
    update = asyncio.ensure_future(actor.update_weights([("a", torch.tensor(5))]))
    await settled()
    late = asyncio.ensure_future(actor.generate_batch([[2]], sampling=sampling(20), request_ids=["late"]))
    await settled()
    assert not update.done() and fleet.last.version == 0 and set(fleet.last._live) == {"first"}
    return first, update, late


async def test_an_update_waits_for_requests_in_flight_and_later_ones_wait_for_it():
    actor, fleet = make()
    first, update, late = await update_under(actor, fleet)
    ((old,),), ((new,),) = await finish(fleet, first), await finish(fleet, late)
    assert (await update).tensors == 1
    assert old.output_ids == response([1], 20) and new.output_ids == response([2], 20, weights=5)
    assert [(x.weight_version_begin, x.weight_version_end, x.weight_versions) for x in (old, new)] == [
        (0, 0, (0,)), (1, 1, (1,)),
    ]  # fmt: skip
    actor.shutdown()


async def test_a_request_that_waits_for_an_update_can_be_aborted():
    actor, fleet = make()
    first, update, late = await update_under(actor, fleet)
    assert await actor.abort(["late"]) == ["late"]
    ((sample,),) = await asyncio.wait_for(late, 1)
    assert (sample.finish_reason["type"], sample.output_ids) == ("abort", [])
    assert not update.done()
    await finish(fleet, first)
    await asyncio.wait_for(update, 1)
    actor.shutdown()


async def test_a_death_ends_the_wait_of_an_update_and_each_part_has_its_version():
    actor, fleet = make()
    first, update, late = await update_under(actor, fleet)
    fleet.last.die()
    await asyncio.wait_for(update, 5)
    ((old,),), ((new,),) = await finish(fleet, first), await finish(fleet, late)
    kept = response([1], BUNDLE)
    assert old.output_ids == kept + response([1, *kept], 20 - BUNDLE, weights=5)
    assert (old.weight_version_begin, old.weight_version_end, old.weight_versions) == (0, 1, (0, 1))
    assert (new.output_ids, new.resumed) == (response([2], 20, weights=5), 0)
    actor.shutdown()


async def test_a_request_that_waits_for_an_update_asks_the_engine_that_lives_then():
    actor, fleet = make()
    first, update, late = await update_under(actor, fleet)
    dying = fleet.last
    write = dying.async_update_weights

    async def die_first(*arguments, **flags):
        dying.die()
        return await write(*arguments, **flags)

    dying.async_update_weights = die_first
    await finish(fleet, first)
    ((new,),) = await finish(fleet, late)
    assert (await update).tensors == 1 and fleet.last is not dying
    assert (new.output_ids, new.resumed, new.weight_versions) == (response([2], 20, weights=5), 0, (1,))
    actor.shutdown()


async def test_a_spent_budget_is_one_clear_error_for_everyone():
    actor, fleet = make(max_restarts=1)
    batch = asyncio.ensure_future(actor.generate_batch([[1], [2]], sampling=sampling(20)))
    await settled()
    fleet.last.die()
    engine = await new_engine(fleet, fleet.engines[0])
    assert (await actor.health())["state"] == State.READY
    engine.die()
    with pytest.raises(
        EngineDead, match=r"rank 1 .* SIGKILL.* not started again: 1 restarts within 3600 s are allowed"
    ):
        await asyncio.wait_for(batch, 5)
    health = await actor.health()
    assert (health["ok"], health["state"], health["restarts"]) == (False, State.DEAD, 1)
    for call in (actor.begin_step(0), actor.end_step(), actor.update_weights([]), actor.generate_batch([[1]])):
        with pytest.raises(EngineDead, match="not started again"):
            await asyncio.wait_for(call, 1)
    assert await actor.abort() == []
    actor.shutdown()


async def test_an_engine_that_does_not_start_is_tried_again_within_the_budget():
    actor, fleet = make(max_restarts=3)
    fleet.failures = 2
    dead = fleet.last
    dead.die()
    await actor.begin_step(0)
    assert len(fleet.engines) == 2 and (await actor.health())["restarts"] == 1
    actor.shutdown()

    actor, fleet = make(max_restarts=2)
    fleet.failures = 5
    fleet.last.die()
    with pytest.raises(EngineDead, match=r"did not start again: no memory .* 2 restarts within"):
        await actor.begin_step(0)
    actor.shutdown()


async def test_a_call_waits_only_so_long():
    actor, fleet = make(wait_s=0.05, backoff_s=60.0, max_restarts=2)
    fleet.failures = 1
    fleet.last.die()
    with pytest.raises(EngineDead, match=r"was not back within 0\.05 s"):
        await actor.generate_batch([[1]], sampling=sampling(3))
    health = await actor.health()
    assert (health["state"], health["ok"]) == (State.STARTING, False) and "rank 1" in health["died_of"]
    assert "moebius_restarts_total 0.0" in actor.prometheus()
    actor.shutdown()


async def test_an_abort_reaches_a_request_that_waits_for_an_engine():
    actor, fleet = make(backoff_s=60.0)
    fleet.failures = 1  # the second try is a minute away
    batch = asyncio.ensure_future(
        actor.generate_batch([[1], [2]], sampling=sampling(20), request_ids=["a", "b"], timeout_s=0.3)
    )
    await settled()
    fleet.last.advance(BUNDLE)
    fleet.last.die()
    await settled()
    assert await actor.abort(["a", "c"]) == ["a"]
    (one,), (two,) = await batch  # the other one by the batch's own deadline
    assert one.finish_reason["type"] == two.finish_reason["type"] == "abort"
    assert one.output_ids == response([1], BUNDLE)
    assert actor.progress()["inflight"] == 0
    actor.shutdown()


async def test_shutdown_ends_the_calls_that_wait():
    actor, fleet = make(backoff_s=60.0)
    fleet.failures = 1
    batch = asyncio.ensure_future(actor.generate_batch([[1]], sampling=sampling(20)))
    await settled()
    fleet.last.die()
    await settled()
    actor.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        await asyncio.wait_for(batch, 1)


async def test_a_step_is_reported_over_a_death(tmp_path):
    actor, fleet = make()
    await actor.begin_step(5, requests=2)
    batch = asyncio.ensure_future(actor.generate_batch([[1], [2]], sampling=[sampling(3), sampling(20)]))
    await settled()
    fleet.last.advance(BUNDLE)
    await settled()
    fleet.last.die()
    await finish(fleet, batch)
    report = await actor.end_step()
    assert (report.step, report.restarts, report.resumed_requests, report.responses) == (5, 1, 1, 2)
    assert report.lost_s > 0 and fleet.last._step == 5
    assert (await actor.end_step()).restarts == 0
    actor.shutdown()


async def test_a_step_is_reported_by_the_threshold_that_the_engine_has_found():
    """Found: the actor split burst and tail by its own setting, 256, whatever calibrate="auto" had measured."""
    actor, fleet = make()
    fleet.last.config = SwitchConfig(threshold=7, calibrate="auto")
    await actor.begin_step(1)
    assert (await actor.end_step()).threshold == 7
    actor.shutdown()
