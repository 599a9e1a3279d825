"""Shared by all tests: a tiny model, made once, and the environment of a CPU run."""

import pytest

from moebius_engine.sglang.cpu import environment

if environment.is_needed():
    environment.prepare(ranks=2)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory) -> str:
    """Path of a small random Qwen3-MoE checkpoint with large initial weights, so that experts matter."""
    from recipes.tiny_moe import make_tiny_moe

    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_moe(path)
    return str(path)
