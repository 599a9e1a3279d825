"""The rows that verl needs on a machine without a GPU, and the process settings that go with them."""

import os
from typing import Any

import torch

from moebius_engine.sglang.cpu import environment
from rollout.verl_plugin.cpu.platform import CPUPlatform
from rollout.verl_plugin.table import Kind, Row

_ATTEMPTS = 20


def initialize_process_group(upstream, timeout_second=None, backend=None):
    """With the CPU as the device, upstream names gloo for it twice, which torch refuses."""
    return upstream(timeout_second, backend or "cpu:gloo")


def share_by_name(upstream, storage, *args, **kwargs):
    """torch gives its manager of shared memory one second to answer: asked again, up to _ATTEMPTS times in all."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return upstream(storage, *args, **kwargs)
        except RuntimeError as error:
            if "timed out" not in str(error) or attempt == _ATTEMPTS:
                raise


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
    Row(
        "torch.UntypedStorage._share_filename_cpu_",
        Kind.WRAPS,
        share_by_name,
        ("self",),
        "a second is short where many processes share few cores, and a weight update would fail",
    ),
)


def prepare_process() -> None:
    """Set what SGLang, torch and verl's engine registry need in every process of the loop."""
    environment.prepare()
    # verl registers its FSDP engine for cuda and npu only (workers/engine/base.py:405); it runs on any device.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    # Tensors travel to the ranks by name: a file descriptor would reach child processes only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    # SGLang's patch of CUDA handles (srt/utils/patch_torch.py:103) indexes what a CPU tensor's lacks; it leaves torch
    # alone where it finds this name.
    reductions: Any = torch.multiprocessing.reductions
    reductions._reduce_tensor_original = reductions.reduce_tensor
