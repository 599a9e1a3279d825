"""A CUDA stream beside the one on which a switch moves bytes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """For what is computed while weights move: on their stream it would wait for them. On a CPU it does nothing."""

    def __init__(self, device: torch.device):
        self._stream = self._ready = None
        if device.type == "cuda":
            self._stream, self._ready = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()

    def begin(self) -> None:
        """What has been given to the current stream so far comes before all that is computed aside."""
        if self._ready is not None:
            self._ready.record()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute aside, after what came before begin(). The current stream goes on when that is done."""
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)
