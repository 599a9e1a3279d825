"""Switching with requests in flight: tokens, logprobs and bytes are those of an unswitched run."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from moebius_engine.layout.experts import ep_experts, tp_columns
from tests.engine.inflight import GREEDY, logprob_difference, prompts, switched_run, wait_for_steps

THERE_AND_BACK = ["tp", "ep", "tp", "ep"]


@pytest.fixture
def checked(engine):
    """Requests of mixed kinds with their unswitched answers."""
    request = {"input_ids": prompts(9), "sampling_params": GREEDY, "return_logprob": True}
    return request, engine.generate(**request)


def test_tokens_and_logprobs_survive_switches_in_mid_decode(engine, checked):
    request, expected = checked
    run = switched_run(engine, THERE_AND_BACK, **request)
    assert run.tokens == [answer["output_ids"] for answer in expected]
    assert logprob_difference(run.answers, expected) < 1e-4
    assert [record.refused for record in run.records] == [None] * 4
    assert all(record.kv_bytes > 0 and record.weight_bytes > 0 for record in run.records)


@pytest.mark.parametrize("fault", ["kv", "weights"])
def test_the_comparison_sees_a_broken_switch(engine, checked, fault):
    request, expected = checked
    engine._run(engine._command("break_next_switch", fault=fault))
    run = switched_run(engine, ["tp"], **request)
    engine.switch("ep")
    restore_weights(engine)
    assert logprob_difference(run.answers, expected) > 1e-2


def test_requests_in_every_state_are_carried(engine):
    """Running, waiting and half-prefilled at once: 40 requests for 32 places, prompts of three chunks."""
    request = {"input_ids": prompts(40, length=300), "sampling_params": GREEDY | {"max_new_tokens": 12}}
    expected = engine.generate(**request)
    engine.flush_cache()
    run = switched_run(engine, ["tp", "ep", "tp", "ep", "tp"], after=2, **request)
    assert run.tokens == [answer["output_ids"] for answer in expected]
    assert any(record.running for record in run.records)
    assert any(record.waiting for record in run.records)
    assert any(record.prefilling for record in run.records)


def test_a_half_prefilled_request_is_not_restarted(engine):
    """Its chunks before the switch are not computed again: as many forward steps with a switch as without."""
    request = {"input_ids": prompts(1, length=1900), "sampling_params": GREEDY | {"max_new_tokens": 2}}

    async def steps(layouts: list[str]) -> int:
        before = (await engine.async_health())["ranks"][0]["forward_ct"]
        task = asyncio.ensure_future(engine.async_generate(**request))
        await wait_for_steps(engine, 1)
        for layout in layouts:
            record = await engine.async_switch(layout)
            assert record.prefilling == 1
        await task
        return (await engine.async_health())["ranks"][0]["forward_ct"] - before

    plain = engine._run(steps([]))
    engine.flush_cache()
    assert engine._run(steps(["tp", "ep"])) <= plain


def test_stop_strings_streaming_and_penalties_survive(engine):
    """Text, offsets of a stream, and penalties that depend on every token so far."""
    rows = prompts(6)
    kinds = [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 20, "ignore_eos": False},
        {"stop": ["zz"]},
        {"logit_bias": {"300": 1.5}},
    ]
    params = [GREEDY | kind for kind in kinds]
    request = {"input_ids": rows, "sampling_params": params}
    expected = switched_run(engine, [], together=True, **request)
    run = switched_run(engine, ["tp", "ep", "tp"], together=True, **request)
    assert run.tokens == expected.tokens
    assert [answer["text"] for answer in run.answers] == [answer["text"] for answer in expected.answers]
    engine.switch("ep")

    async def stream() -> tuple[str, int]:
        chunks = await engine.async_generate(input_ids=rows[0], sampling_params=GREEDY, stream=True)
        text, switches = "", 0
        async for chunk in chunks:
            assert chunk["text"].startswith(text)
            text = chunk["text"]
            if chunk["meta_info"]["completion_tokens"] in (10, 20, 30):
                record = await engine.async_switch(THERE_AND_BACK[switches])
                assert record.running == 1
                switches += 1
        return text, switches

    text, switches = engine._run(stream())
    plain = engine.generate(input_ids=rows[0], sampling_params=GREEDY)
    assert switches == 3 and text == plain["text"]


def test_shared_prefixes_are_moved_once(engine):
    """Samples of one prompt share its KV rows; after the switch the prefix is in the tree once and still found."""
    row = prompts(1, length=200)[0]
    request = {"input_ids": [row] * 8, "sampling_params": GREEDY}
    engine.generate(input_ids=row, sampling_params=GREEDY | {"max_new_tokens": 1})
    expected = engine.generate(**request)
    run = switched_run(engine, ["tp", "ep"], **request)
    assert run.tokens == [answer["output_ids"] for answer in expected]
    for record in run.records:
        # Eight requests of more than 200 tokens; each of two EP ranks needs the prefix once.
        assert record.kv_tokens < 2 * 200 + 8 * 48


def test_addresses_stay(engine):
    before = engine.addresses()
    run = switched_run(engine, THERE_AND_BACK, input_ids=prompts(4), sampling_params=GREEDY)
    assert len(run.records) == 4
    assert engine.addresses() == before


def test_weights_are_those_of_a_fresh_start_in_each_layout(engine, tiny_moe):
    """Every expert parameter equals, bit for bit, what slicing the checkpoint gives for that rank and layout."""
    checkpoint = load_file(f"{tiny_moe}/model.safetensors")
    switched_run(engine, THERE_AND_BACK, input_ids=prompts(4), sampling_params=GREEDY)
    for layout in ("ep", "tp"):
        engine.switch(layout)
        digests = engine.weight_digests()
        for rank in range(2):
            for name, tensor in expected_experts(checkpoint, engine.shape, layout, rank):
                assert digests[rank][name][0] == digest(tensor), (layout, rank, name)


def expected_experts(checkpoint, shape, layout, rank):
    columns = tp_columns(rank, shape.intermediate, 2)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        mine = ep_experts(rank, shape.experts, 2) if layout == "ep" else range(shape.experts)
        gate, up, down = (
            torch.stack([checkpoint[f"{prefix}{expert}.{part}_proj.weight"] for expert in mine])
            for part in ("gate", "up", "down")
        )
        if layout == "tp":
            rows = slice(columns.start, columns.stop)
            gate, up, down = gate[:, rows], up[:, rows], down[:, :, rows]
        yield f"{prefix}w13_weight", torch.cat([gate, up], 1)
        yield f"{prefix}w2_weight", down


def digest(tensor: torch.Tensor) -> str:
    from moebius_engine.sglang.inspection import digest

    return digest(tensor)


def restore_weights(engine) -> None:
    engine.update_weights(load_file(f"{engine.server_args.model_path}/model.safetensors").items())


def test_switching_to_the_live_layout_does_nothing(engine):
    assert engine.switch("ep") is None
    with pytest.raises(ValueError, match="layout 'pp' is unknown"):
        engine.switch("pp")


def test_a_record_names_every_phase(engine):
    (record,) = switched_run(engine, ["tp"], input_ids=prompts(4), sampling_params=GREEDY).records
    phases = record.decide_ms + record.metadata_ms + record.kv_ms + record.weights_ms + record.rest_ms
    assert phases == pytest.approx(record.total_ms)
