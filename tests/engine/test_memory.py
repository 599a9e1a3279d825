"""The memory budget against the tensors of a running engine."""

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
