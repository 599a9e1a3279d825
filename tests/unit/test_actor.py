"""What RolloutActor decides by itself, without an engine."""

import asyncio
from types import SimpleNamespace

import pytest

from moebius_engine.telemetry import StepReport, read_json_lines
from rollout.actor import RolloutActor
from tests.unit.stand_in_engine import StandInEngine, answer


@pytest.fixture
def actor(tmp_path):
    return RolloutActor("unused", switch={"threshold": 4}, metrics_dir=tmp_path, engine_factory=StandInEngine)


async def test_a_refused_row_fails_alone(actor):
    good, bad = await actor.generate_batch([[1, 2], []], n=2, sampling={"max_new_tokens": 3})
    assert [len(sample.output_ids) for sample in good + bad] == [3, 3, 0, 0]
    assert bad[0].finish_reason["status_code"] == 400
    assert good[0].logprobs == [-1.0] * 3


async def test_at_the_deadline_unfinished_rows_keep_their_tokens(actor):
    lengths = [{"max_new_tokens": 5}, {"max_new_tokens": 60_000}]
    (short,), (long,) = await actor.generate_batch([[1], [2]], sampling=lengths, timeout_s=0.2)
    assert short.finish_reason["type"] == "length"
    assert long.finish_reason["type"] == "abort" and 0 < len(long.output_ids) < 60_000
    assert actor.progress() == {"total": 2, "done": 2, "inflight": 0}


async def test_an_engine_that_ignores_the_abort_is_an_error():
    class Deaf(StandInEngine):
        async def async_abort(self, rid="", abort_all=False):
            pass

    actor = RolloutActor("unused", switch={"timeout_s": 0.1}, engine_factory=Deaf)
    with pytest.raises(TimeoutError, match=r"1 of 1 requests were aborted after 0\.1 s and did not end within 0\.1 s"):
        await actor.generate_batch([[1]], sampling={"max_new_tokens": 60_000}, timeout_s=0.1)


async def test_a_broken_engine_fails_the_batch_and_stops_the_rest():
    class Breaks(StandInEngine):
        async def async_generate(self, input_ids, **rest):
            if input_ids == [13]:
                raise RuntimeError("rank 1 is gone")
            return await super().async_generate(input_ids, **rest)

    actor = RolloutActor("unused", engine_factory=Breaks)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        await actor.generate_batch([[1], [13]], sampling={"max_new_tokens": 60_000})
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 0


async def test_a_cancelled_batch_aborts_its_requests(actor):
    batch = asyncio.create_task(actor.generate_batch([[1]], sampling={"max_new_tokens": 60_000}))
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 1
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await asyncio.sleep(0.05)
    assert actor.progress()["inflight"] == 0


async def test_abort_means_exactly_these_ids(actor):
    batch = asyncio.create_task(
        actor.generate_batch([[1], [2]], sampling={"max_new_tokens": 300}, request_ids=["a", "ab"])
    )
    await asyncio.sleep(0.05)
    assert await actor.abort(["a", "b"]) == ["a"]
    (one,), (other,) = await batch
    assert (one.finish_reason["type"], other.finish_reason["type"]) == ("abort", "length")


async def test_each_sample_draws_with_its_own_seed():
    class Seeds(StandInEngine):
        async def async_generate(self, sampling_params, **rest):
            return answer([sampling_params.get("sampling_seed", -1)], {"type": "length"})

    actor = RolloutActor("unused", engine_factory=Seeds)
    batch = await actor.generate_batch([[1], [2]], n=2, sampling={"sampling_seed": 40})
    assert [sample.output_ids for samples in batch for sample in samples] == [[40], [41], [42], [43]]
    ((sample,),) = await actor.generate_batch([[1]])
    assert sample.output_ids == [-1]


async def test_steps_book_weight_updates_and_versions(actor, tmp_path):
    async def update(named_tensors, flush_cache):
        return SimpleNamespace(seconds=0.5, tensors=1)

    actor._keeper.engine.async_update_weights = update
    await actor.begin_step(3, requests=1)
    await actor.update_weights([])
    await actor.update_weights([])
    ((sample,),) = await actor.generate_batch([[1]], sampling={"max_new_tokens": 2})
    assert (sample.weight_version_begin, sample.weight_version_end) == (2, 2)
    report = await actor.end_step()
    await actor.begin_step(4)
    assert actor.progress() == {"total": 0, "done": 0, "inflight": 0}
    assert ((await actor.end_step()).weight_update_s, report.weight_update_s) == (0, 1)
    assert (report.step, report.responses, report.longest_response) == (3, 1, 2)
    actor.shutdown()
    assert read_json_lines(tmp_path / "steps.jsonl", StepReport) == actor.report()


async def test_arguments_that_do_not_fit_are_refused(actor):
    for arguments, message in (
        ({"n": 0}, "n must be at least 1 and timeout_s above 0, got n=0"),
        ({"sampling": {"n": 2}}, "sampling must not hold 'n'"),
        ({"sampling": [{}]}, "sampling has 1 entries for 2 samples"),
        ({"request_ids": ["a"]}, "request_ids has 1 entries for 2 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            await actor.generate_batch([[1], [2]], **arguments)
    assert await actor.generate_batch([]) == []
    with pytest.raises(TypeError, match="treshold"):
        RolloutActor("unused", switch={"treshold": 4}, engine_factory=StandInEngine)
