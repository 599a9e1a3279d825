"""verl's platform for CPUs: gloo, host memory, and Ray's GPU counter to count processes."""

from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase


class CPUPlatform(PlatformBase):
    """verl counts only accelerators, so Ray is told of as many GPUs as processes shall run (ray.init(num_gpus=N))."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # verl picks the first that says True: only VERL_PLATFORM=cpu chooses this one

    def current_device(self):
        return torch.device("cpu")  # what verl hands to Tensor.to(), where an index would mean a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # which Ray sets for what it counts as GPUs

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _device_module() -> ModuleType:
    """torch.cpu with the functions of torch.cuda that verl calls on any device."""
    module = ModuleType("torch.cpu, as verl uses a device module")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    module.__dict__.update(
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        get_device_name=lambda *_: "cpu",
    )
    return module


_DEVICE_MODULE = _device_module()
