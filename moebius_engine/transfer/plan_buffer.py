"""The tables of a move on the device: built in pinned memory, copied there in one piece."""

import math

import numpy as np
import torch

_ALIGNMENT = 16  # bytes


class PlanBuffer:
    """nbytes: room for tables. device: CUDA device index."""

    def __init__(self, nbytes: int, device: int):
        self.nbytes = nbytes
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._copied = torch.cuda.Event()

    @staticmethod
    def size_of(tables: list[np.ndarray]) -> int:
        """Bytes that these tables take."""
        return sum(math.ceil(table.nbytes / _ALIGNMENT) * _ALIGNMENT for table in tables)

    def fill(self, tables: list[np.ndarray]) -> list[int]:
        """Copy the tables to the device, in stream order. Returns where each one lies there."""
        self._copied.synchronize()  # the copy before this one still reads the pinned memory until here
        places, start, host = [], 0, self._host.numpy()
        for table in tables:
            host[start : start + table.nbytes] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
            places.append(self._device.data_ptr() + start)
            start += math.ceil(table.nbytes / _ALIGNMENT) * _ALIGNMENT
        self._device[:start].copy_(self._host[:start], non_blocking=True)
        self._copied.record()
        return places
