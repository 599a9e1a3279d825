"""What the benchmarks that compare the three policies have in common: which model, and on which device."""

import os
from pathlib import Path

import torch
from gpu_engine import write_model

from moebius_engine.memory.presets import PRESETS


def model_or_tiny(model: str | None, folder: str, changes: list[str]) -> tuple[str, str, list[str]]:
    """Path and name of a model, and the changes of the server's arguments that it needs, `changes` included.

    model: a checkpoint; a published model's name, for its sizes with dummy weights; without one a small random model.
    The latter two are made in `folder`.
    """
    if model in PRESETS:
        return write_model(folder, model), f"{model}, dummy weights", ["load_format=dummy", *changes]
    if model is not None:
        return model, Path(model).name, changes  # no folders of this machine in a published file
    from recipes.tiny_moe import make_tiny_moe

    return str(make_tiny_moe(Path(folder) / "tiny")), "small random Qwen3-MoE (recipes/tiny_moe.py)", changes


def device() -> str:
    """The GPU's name, or how many CPU cores this process may use."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} CPU cores"
