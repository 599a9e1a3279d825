"""Memory released and resumed around a weight update. On a CPU no page moves; what is allowed when is the same."""

import asyncio

import pytest
from safetensors.torch import load_file

from tests.engine.inflight import GREEDY, prompts, stopped_schedulers, wait_for_steps

REQUEST = {"input_ids": prompts(4), "sampling_params": GREEDY | {"max_new_tokens": 12}, "return_logprob": True}


@pytest.fixture(scope="module")
def checkpoint(tiny_moe):
    return load_file(f"{tiny_moe}/model.safetensors")


def refusals(engine) -> set[str]:
    answers = engine.generate(**REQUEST)
    assert all(answer["output_ids"] == [] for answer in answers)
    return {answer["meta_info"]["finish_reason"]["message"] for answer in answers}


@pytest.mark.parametrize("layout", ["ep", "tp"])
def test_weights_must_be_resumed_and_sent_again(engine, checkpoint, layout):
    engine.switch(layout)
    engine.flush_cache()
    expected = engine.generate(**REQUEST)
    engine.release_memory_occupation()
    health = engine.health()
    assert health["layout"] == "ep" and not health["ok"]
    assert refusals(engine) == {"the memory of kv_cache and weights has been released: resume it first"}
    assert "released" in engine.switch("tp").refused
    with pytest.raises(RuntimeError, match="memory of weights has been released already; nothing was released"):
        engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    engine.update_weights(checkpoint.items())
    assert refusals(engine) == {"the memory of kv_cache has been released: resume it first"}
    engine.resume_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()  # twice is no error
    assert engine.health()["ok"]
    engine.switch(layout)
    again = engine.generate(**REQUEST)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in expected]


def test_resumed_weights_are_undefined_until_they_are_sent(engine, checkpoint):
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    (message,) = refusals(engine)
    assert "weights are incomplete" in message
    engine.update_weights(checkpoint.items())
    assert engine.health()["ok"]


def test_an_update_does_not_write_into_released_weights(engine, checkpoint):
    engine.release_memory_occupation(["weights"])
    with pytest.raises(ValueError, match="memory of weights has been released: resume it before an update; nothing"):
        engine.update_weights(checkpoint.items())
    engine.resume_memory_occupation(["weights"])
    engine.update_weights(checkpoint.items())
    assert engine.health()["ok"]


def test_an_update_without_kv_goes_back_to_ep_too(engine, checkpoint):
    """verl releases the KV cache alone around an update of a server of its own."""
    expected = engine.generate(**REQUEST)
    engine.begin_step(1)
    engine.switch("tp")
    engine.release_memory_occupation(["kv_cache"])
    assert engine.update_weights(checkpoint.items()).layout == "ep"
    engine.resume_memory_occupation(["kv_cache"])
    _, back = engine.end_step().switches
    assert (back.target, back.refused, back.weight_bytes) == ("ep", None, 0)
    again = engine.generate(**REQUEST)
    assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in expected]


def test_no_room_when_memory_is_resumed(engine, checkpoint):
    engine.release_memory_occupation()
    engine._run(engine._command("no_room_for_next_resume"))
    with pytest.raises(RuntimeError, match=r"no memory for \['weights'\] \(rank 1: allocate 4096 bytes\): free some"):
        engine.resume_memory_occupation(["weights"])
    assert refusals(engine) == {"the memory of kv_cache and weights has been released: resume it first"}
    engine.resume_memory_occupation()
    engine.update_weights(checkpoint.items())
    assert engine.health()["ok"]


def test_under_requests_nothing_is_released(engine):
    async def go() -> list[dict]:
        task = asyncio.ensure_future(engine.async_generate(**REQUEST | {"sampling_params": GREEDY}))
        await wait_for_steps(engine, 3)
        with pytest.raises(RuntimeError, match=r"4 requests are in flight: finish or abort them before \['kv_cache'\]"):
            await engine.async_release_memory_occupation(["kv_cache"])
        return await task

    assert all(len(answer["output_ids"]) == 48 for answer in engine._run(go()))


def test_requests_of_the_same_step_count(engine):
    """A rank takes them in before it comes to the release: nothing may be released under them."""

    async def go() -> list[dict]:
        with stopped_schedulers():  # what is sent meanwhile reaches a rank in one step
            task = asyncio.ensure_future(engine.async_generate(**REQUEST))
            release = asyncio.ensure_future(engine.async_release_memory_occupation())
            await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="requests are in flight"):
            await release
        return await task

    assert all(len(answer["output_ids"]) == 12 for answer in engine._run(go()))


def test_an_unknown_tag(engine):
    for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
        with pytest.raises(
            ValueError, match=r"tags \['cuda_graph'\] are unknown: use some of \['weights', 'kv_cache'\]"
        ):
            call(["weights", "cuda_graph"])
