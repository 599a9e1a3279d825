"""Weight updates in both layouts: afterwards both hold the new weights, and a bad update leaves the old ones."""

import asyncio

import pytest
from safetensors.torch import load_file

from rollout.actor import RolloutActor
from rollout.sample import Sample
from tests.engine.inflight import GREEDY, logprob_difference, paused, prompts, wait_for_steps
from tests.engine.test_switch import digest, expected_experts

SHORT = GREEDY | {"max_new_tokens": 12}
REQUEST = {"input_ids": prompts(4), "sampling_params": SHORT, "return_logprob": True}
UP = "model.layers.0.mlp.experts.0.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoint(tiny_moe):
    return load_file(f"{tiny_moe}/model.safetensors")


@pytest.fixture
def weights(engine, checkpoint):
    """Makes new weights of a scale; the engine has the checkpoint's again afterwards."""

    def scaled(scale: float) -> dict:
        return {name: tensor * scale for name, tensor in checkpoint.items()}

    yield scaled
    engine.update_weights(checkpoint.items())


def layout_digests(engine) -> dict[str, list]:
    """Digests of every parameter in both layouts; ends in the layout it began in."""
    first = engine.health()["layout"]
    digests = {first: engine.weight_digests()}
    other = "tp" if first == "ep" else "ep"
    engine.switch(other)
    digests[other] = engine.weight_digests()
    engine.switch(first)
    return digests


def check_experts(engine, checkpoint) -> None:
    digests = layout_digests(engine)
    for layout, ranks in digests.items():
        for rank, found in enumerate(ranks):
            for name, tensor in expected_experts(checkpoint, engine.shape, layout, rank):
                assert found[name][0] == digest(tensor), (layout, rank, name)


def answers_in(engine, layout: str) -> list[dict]:
    engine.switch(layout)
    engine.flush_cache()
    return engine.generate(**REQUEST)


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_both_layouts_hold_an_update_that_one_received(engine, weights, layout):
    """Also what is no expert: the same logprobs as when the same weights arrive in the other layout."""
    before = answers_in(engine, layout)
    new = weights(0.8)
    record = engine.update_weights(new.items())
    assert (record.tensors, record.bytes) == (len(new), sum(tensor.nbytes for tensor in new.values()))
    check_experts(engine, new)
    mine, other = answers_in(engine, layout), answers_in(engine, "tp" if layout == "ep" else "ep")
    assert logprob_difference(mine, other) < 1e-4
    assert logprob_difference(mine, before) > 1e-2


def test_an_idle_engine_goes_back_to_ep_without_moving_weights(engine, weights):
    engine.begin_step(5)
    engine.switch("tp")
    assert engine.update_weights(weights(0.9).items()).layout == "ep"
    there, back = engine.end_step().switches
    assert (there.target, back.target, back.reason) == ("tp", "ep", "step")
    assert there.weight_bytes > 0 and (back.weight_bytes, back.kv_bytes, back.refused) == (0, 0, None)


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_an_update_reaches_requests_in_flight(engine, weights, layout):
    """Paused, updated without dropping the cache, continued: the old tokens stay, the new ones are the new model's."""
    new = weights(0.8)

    async def go(update) -> list[dict]:
        task = asyncio.ensure_future(engine.async_generate(**(REQUEST | {"sampling_params": GREEDY})))
        await wait_for_steps(engine, 6)
        async with paused(engine):
            await update()
        return await task

    async def write() -> None:
        record = await engine.async_update_weights(new.items(), flush_cache=False)
        assert record.layout == layout  # with requests in flight it stays where it is

    async def nothing() -> None:
        pass

    engine.switch(layout)
    expected = engine._run(go(nothing))
    engine.flush_cache()
    updated = engine._run(go(write))
    assert all(len(answer["output_ids"]) == 48 for answer in updated)
    for one, other in zip(updated, expected, strict=True):
        assert one["output_ids"][:3] == other["output_ids"][:3]
        assert one["output_ids"] != other["output_ids"]
    check_experts(engine, new)


def test_flushing_under_requests_is_refused_and_nothing_dies(engine, weights):
    request = REQUEST | {"sampling_params": GREEDY}
    expected = engine.generate(**request)
    before = engine.weight_digests()

    async def go() -> list[dict]:
        task = asyncio.ensure_future(engine.async_generate(**request))
        await wait_for_steps(engine, 3)
        async with paused(engine):
            with pytest.raises(ValueError, match=r"flush_cache=True needs an idle engine, 4 requests are in flight"):
                await engine.async_update_weights(weights(0.8).items())
        return await task

    answers = engine._run(go())
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
    assert engine.weight_digests() == before


def test_an_update_of_the_actor_waits_for_requests_and_later_ones_for_it(engine, weights, monkeypatch):
    monkeypatch.setattr(engine, "shutdown", lambda: None)  # the other tests' engine, too
    expected = engine.generate(input_ids=prompts(4), sampling_params=GREEDY)

    async def go() -> list[list[list[Sample]]]:
        actor = RolloutActor("unused", engine_factory=lambda *_, **__: engine)
        first = asyncio.ensure_future(actor.generate_batch(prompts(4), sampling=GREEDY))
        await wait_for_steps(engine, 6)
        update = asyncio.ensure_future(actor.update_weights(weights(0.8).items()))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(actor.generate_batch(prompts(4), sampling=GREEDY))
        answers = [await first, await late]
        await update
        actor.shutdown()
        return answers

    old, new = ([sample for (sample,) in batch] for batch in engine._run(go()))
    tokens = [answer["output_ids"] for answer in expected]
    assert [sample.output_ids for sample in old] == tokens != [sample.output_ids for sample in new]
    assert {(sample.weight_version_begin, sample.weight_version_end) for sample in old} == {(0, 0)}
    assert {(sample.weight_version_begin, sample.weight_version_end) for sample in new} == {(1, 1)}


def missing(new):
    del new[UP]
    return new.items()


def misnamed(new):
    new["model.layers.0.mlp.experts.0.up.weight"] = new.pop(UP)
    return new.items()


def misshapen(new):
    new[UP] = new[UP].T[:, :10]
    return new.items()


def extra(new):
    new["model.layers.9.input_layernorm.weight"] = new[NORM]
    return new.items()


def twice(new):
    return [*new.items(), (NORM, new[NORM])]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (missing, r"1 of \d+ tensors are missing \(model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight\)"),
        (misnamed, r"unknown tensor 'model\.layers\.0\.mlp\.experts\.0\.up\.weight'"),
        (misshapen, r"experts\.0\.up_proj\.weight has shape \(64, 10\), the model needs \(64, 64\)"),
        (extra, r"unknown tensor 'model\.layers\.9\.input_layernorm\.weight'"),
        (twice, r"model\.norm\.weight comes twice"),
    ],
)
@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_a_bad_update_is_refused_before_a_byte_is_written(engine, weights, layout, spoil, text):
    engine.switch(layout)
    before = engine.weight_digests()
    with pytest.raises(ValueError, match=text + ".*nothing was written"):
        engine.update_weights(spoil(weights(0.8)))
    health = engine.health()
    assert health["weights_valid"] and health["layout"] == layout
    assert engine.weight_digests() == before


@pytest.mark.parametrize("spoil", [misnamed, misshapen, extra, twice])
def test_a_scheduler_refuses_a_bad_bucket_by_itself(engine, weights, spoil):
    """A generator is not checked as a whole, so the ranks see the bad bucket."""
    before = engine.weight_digests()
    with pytest.raises(ValueError, match="nothing was written"):
        engine.update_weights(pair for pair in list(spoil(weights(0.8))))
    assert engine.health()["weights_valid"] and engine.weight_digests() == before


def test_an_empty_update_changes_nothing(engine):
    before, version = engine.weight_digests(), engine.health()["weight_version"]
    record = engine.update_weights([])
    assert (record.tensors, record.bytes) == (0, 0)
    assert engine.weight_digests() == before and engine.health()["weight_version"] == version


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_an_incomplete_set_stops_everything_until_a_full_one(engine, weights, checkpoint, layout):
    """Generation and switches are refused with the reason; the next full update heals the engine."""
    expected = answers_in(engine, layout)
    with pytest.raises(ValueError, match=r"weights are incomplete: 1 of \d+ tensors.*up_proj"):
        engine.update_weights(pair for pair in missing(weights(0.8)))
    health = engine.health()
    assert not health["ok"] and not health["weights_valid"] and "up_proj" in health["weights_reason"]
    for answer in engine.generate(**REQUEST):
        assert answer["output_ids"] == []
        assert "weights are incomplete" in answer["meta_info"]["finish_reason"]["message"]
    assert not engine.tokenizer_manager.rid_to_state
    # The idle engine has gone back to EP for the update.
    record = engine.switch("tp")
    assert record.refused == health["weights_reason"] and engine.health()["layout"] == "ep"
    engine.update_weights(checkpoint.items())
    assert engine.health()["ok"]
    check_experts(engine, checkpoint)
    again = answers_in(engine, layout)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in expected]


def test_a_failure_in_the_middle_is_healed(engine, weights, checkpoint, monkeypatch):
    """The second bucket is bad when the first has been written."""
    from moebius_engine.weights import buckets

    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"unknown tensor 'model\.layers\.0\.mlp\.experts\.0\.up\.weight'"):
        engine.update_weights(pair for pair in misnamed(weights(0.8)))
    assert "incomplete" in engine.health()["weights_reason"]
    engine.switch("tp")
    engine.update_weights(pair for pair in checkpoint.items())  # in several buckets
    assert engine.health()["ok"]
    check_experts(engine, checkpoint)


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_requests_caught_by_an_incomplete_set_can_be_aborted(engine, weights, checkpoint, layout):
    """Running and half-prefilled ones end at once and free their KV; the others go on after the next full set."""
    engine.switch(layout)
    rids = [f"caught-{row}" for row in range(4)]

    async def go() -> list[dict]:
        request = {"input_ids": prompts(4), "sampling_params": GREEDY, "rid": rids, "return_logprob": True}
        task = asyncio.ensure_future(engine.async_generate(**request))
        await wait_for_steps(engine, 4)
        late = asyncio.ensure_future(
            engine.async_generate(input_ids=prompts(1, length=1800)[0], sampling_params=GREEDY, rid="prefilling")
        )
        await wait_for_steps(engine, 2)
        async with paused(engine):
            with pytest.raises(ValueError, match="incomplete"):
                await engine.async_update_weights((pair for pair in missing(weights(0.8))), flush_cache=False)
        for rid in (rids[0], rids[3], "prefilling"):
            await engine.async_abort(rid)
        aborted = await asyncio.wait_for(late, 20)
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort" and aborted["output_ids"] == []
        assert (await engine.async_health())["inflight"] == 2
        async with paused(engine):
            await engine.async_update_weights(checkpoint.items(), flush_cache=False)
        return await task

    answers = engine._run(go())
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert kinds == ["abort", "length", "length", "abort"]
    assert 0 < len(answers[0]["output_ids"]) < 48 and len(answers[1]["output_ids"]) == 48
    assert len(answers[0]["meta_info"]["output_token_logprobs"]) == len(answers[0]["output_ids"])
    assert engine.flush_cache().success  # fails if a request or its KV is left
