"""The rows that verl needs on a machine without a GPU, and the process settings that go with them."""

import os
from typing import Any

import torch

from moebius_engine.sglang.cpu import environment
from rollout.verl_plugin.cpu.platform import CPUPlatform
from rollout.verl_plugin.table import Kind, Row


def initialize_process_group(upstream, timeout_second=None, backend=None):
    """With the CPU as the device, upstream names gloo for it twice, which torch refuses."""
    return upstream(timeout_second, backend or "cpu:gloo")


CPU_ROWS = (
    Row(
        "verl.plugin.platform.PlatformRegistry._platforms",
        Kind.ADDS,
        {"cpu": CPUPlatform},
        (),
        "the platform that VERL_PLATFORM=cpu names",
    ),
    Row(
        "verl.utils.distributed.initialize_global_process_group_ray",
        Kind.WRAPS,
        initialize_process_group,
        ("timeout_second", "backend"),
        "it asks for the back end 'cpu:gloo,cpu:gloo'",
    ),
)


def prepare_process() -> None:
    """Set what SGLang, torch and verl's engine registry need in every process of the loop."""
    environment.prepare(ranks=1)
    # verl registers its FSDP engine for cuda and npu only (workers/engine/base.py:405); it runs on any device.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # Tensors travel to the ranks by name: a file descriptor would reach child processes only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    # SGLang's patch of CUDA handles (srt/utils/patch_torch.py:103) indexes what a CPU tensor's lacks; it leaves torch
    # alone where it finds this name.
    reductions: Any = torch.multiprocessing.reductions
    reductions._reduce_tensor_original = reductions.reduce_tensor
