"""The memory budget against the tensors of a running engine, and what a switch computes in its scratch memory."""

import asyncio

import pytest

from tests.engine.budgets import cpu_sizes, disagreements, wrong


@pytest.fixture
def sizes(engine):
    return cpu_sizes(engine, tokens=4096, requests=16, context=2048, chunk=128)


def test_every_component_is_as_the_budget_says(engine, sizes):
    for measured in engine.memory():
        assert disagreements(sizes, measured) == {}


@pytest.mark.parametrize(
    "change, component",
    [
        ({"experts": 16}, "experts.both"),
        ({"head_dim": 32}, "attention.tp"),
        ({"kv_heads": 1}, "KV cache.both"),
        ({"vocab_size": 640}, "embedding.tp"),
        ({"layers": 3}, "norms, router, head.both"),
    ],
)
def test_the_budget_of_another_model_disagrees(engine, sizes, change, component):
    assert component in disagreements(wrong(sizes, **change), engine.memory()[0])
    assert "request table.tp" not in disagreements(wrong(sizes, **change), engine.memory()[0])


def test_no_tensor_is_left_out(engine):
    """The components together are all tensors that a rank's process holds, to two in a hundred."""
    measured = [sum(rank.values()) for rank in engine.memory()]
    held = [rank["bytes"] for rank in engine._run(engine._command("all_tensors"))]
    for known, every in zip(measured, held, strict=True):
        assert known <= every <= 1.02 * known


def test_a_switch_computes_what_is_large_aside(engine):
    """Only there does the scratch have room for it on a GPU. Seen there: a request that ended in mid-switch made SGLang
    copy its list of free rows in the scratch, which asked the driver for memory."""
    engine._run(engine._command("watch_scratch"))

    async def switching() -> None:
        ended = False

        async def stream(
            number: int,
        ) -> None:  # the same request again and again: at its end its rows are cached already
            request = {"input_ids": [7 + number] * (20 + number), "sampling_params": {"max_new_tokens": 6 + number}}
            request["sampling_params"] |= {"temperature": 0, "ignore_eos": True}
            while not ended:
                await engine.async_generate(**request)

        streams = [asyncio.ensure_future(stream(number)) for number in range(12)]
        for turn in range(24):
            await engine.async_switch("tp" if turn % 2 == 0 else "ep")
            await asyncio.sleep(0.05)
        ended = True
        await asyncio.gather(*streams)

    engine._run(switching())
    free_rows = 8 * 4096  # bytes of EP's list; TP's is twice as long
    for rank in engine._run(engine._command("largest_in_scratch")):
        rank.pop("rank")
        rank.pop("aten.empty.memory_format", None)  # of the host, for what the ranks tell each other
        assert rank, "nothing was noted"
        assert max(rank.values()) < free_rows // 4, rank
