"""Torch tensors over memory that torch does not own."""

import math
from collections.abc import Sequence

import torch


class _Bytes:
    """Describes device memory in the form that torch.as_tensor reads."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: int) -> torch.Tensor:
    """A tensor over device memory at `address`; the memory must outlive it.

    Raises ValueError if the address does not suit the dtype.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if address % dtype.itemsize:
        raise ValueError(f"address {address:#x} is no multiple of {dtype.itemsize} bytes ({dtype})")
    flat = torch.as_tensor(_Bytes(address, nbytes), device=f"cuda:{device}")
    return flat.view(dtype).view(tuple(shape))
