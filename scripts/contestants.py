"""What the benchmarks that compare the three policies have in common: which model, and on which device."""

import os
from pathlib import Path

import torch


def model_or_tiny(model: str | None, folder: str) -> tuple[str, str]:
    """Path and name of a checkpoint; without one, of a small random model that is made in `folder`."""
    if model is not None:
        return model, Path(model).name  # no folders of this machine in a published file
    from recipes.tiny_moe import make_tiny_moe

    return str(make_tiny_moe(Path(folder) / "tiny")), "small random Qwen3-MoE (recipes/tiny_moe.py)"


def device() -> str:
    """The GPU's name, or how many CPU cores this process may use."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"{len(os.sched_getaffinity(0))} CPU cores"
