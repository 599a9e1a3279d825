"""Shared by all tests: a tiny model, made once, and the environment of a CPU run."""

import pytest
from hypothesis import settings

from moebius_engine.sglang.cpu import environment

if environment.is_needed():
    environment.prepare(ranks=2)

# Hypothesis would fail an example that takes 200 ms, which any does on a machine that is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory) -> str:
    """Path of a small random Qwen3-MoE checkpoint with large initial weights, so that experts matter."""
    from recipes.tiny_moe import make_tiny_moe

    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_moe(path)
    return str(path)
