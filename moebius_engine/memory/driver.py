"""Calls of the CUDA driver and of NVRTC, with their error codes turned into exceptions."""

from typing import Any

from cuda.bindings import driver


class DriverError(RuntimeError):
    """A CUDA driver call failed. code: its CUresult."""

    def __init__(self, code: Any, doing: str):
        _, name = driver.cuGetErrorName(code)
        super().__init__(f"{doing}: {name.decode() if name else code}")
        self.code = code


def call(doing: str, result: tuple) -> Any:
    """The value of a driver call's `result`. doing: what it was for, in words, for the error."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(code, doing)
    return values[0] if len(values) == 1 else tuple(values)


def attribute(device: int, name: str) -> int:
    """A device attribute, by its name after CU_DEVICE_ATTRIBUTE_."""
    key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call(f"read {name}", driver.cuDeviceGetAttribute(key, device))
