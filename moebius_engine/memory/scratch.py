"""Device memory for what a switch computes: KV rows, request tables, the target's batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moebius_engine.memory.scratch_sizes import SMALL_BYTES, SMALL_TENSORS, large_bytes, scratch_bytes


class Scratch:
    """A pool of torch's own, filled before the first switch, so that a switch asks the driver for nothing.

    tokens: KV tokens of all ranks. On a CPU it does nothing.
    """

    def __init__(self, device: torch.device, tokens: int):
        self._device, self._tokens = device, tokens
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None
        self.nbytes = 0 if self._pool is None else scratch_bytes(tokens)

    def fill(self, large: bool) -> None:
        """Take memory for small tensors, or for large ones too. It serves the current stream."""
        if self._pool is None:
            return
        with self.used():
            held = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for size in (*[large_bytes(self._tokens)] * large, *[SMALL_BYTES] * SMALL_TENSORS)
            ]
            del held  # all at once: freed one by one, the first would serve the next

    @contextmanager
    def used(self) -> Iterator[None]:
        """What this thread allocates on the device within it comes from the pool."""
        if self._pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(self._pool):
            yield
