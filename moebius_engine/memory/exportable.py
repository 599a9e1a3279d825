"""The device memory that a rank shares with its peers: which kind this machine allows."""

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moebius_engine.memory.segments import Segment, SegmentTable

if TYPE_CHECKING:
    from moebius_engine.memory.vmm import VmmMemory

log = logging.getLogger(__name__)


class Memory(Protocol):
    """Tagged segments of device memory that peers can map. See vmm.VmmMemory for each method."""

    device: int
    table: SegmentTable
    can_sleep: bool

    def take(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
    def address(self, segment: Segment) -> int: ...
    def segment_of(self, address: int) -> Segment: ...
    def sleep(self, tags: Iterable[str]) -> None: ...
    def wake(self, tags: Iterable[str]) -> None: ...
    def is_awake(self, segment: Segment) -> bool: ...
    def export(self, segment: Segment) -> Any: ...
    def open_peer(self, rank: int, segment: Segment, handle: Any) -> None: ...
    def close_peer(self, rank: int, segment: Segment) -> None: ...
    def peer_address(self, rank: int, segment: Segment) -> int: ...
    def close(self) -> None: ...


def open_memory(device: int) -> Memory:
    """Exportable memory on CUDA device `device`: virtual memory with exportable pages, or CUDA IPC where the driver
    refuses those. Says which, once."""
    from moebius_engine.memory.driver import DriverError
    from moebius_engine.memory.ipc import IpcMemory
    from moebius_engine.memory.vmm import VmmMemory

    if not VmmMemory.is_supported(device):
        refusal = "the driver has no exportable virtual memory"
    else:
        memory = VmmMemory(device)
        try:
            _try_export(memory)
            log.info("memory: virtual memory with exportable pages; sleep frees it")
            return memory
        except DriverError as error:
            memory.close()
            refusal = f"exportable virtual memory was refused: {error}"
    log.warning("memory: plain allocation with CUDA IPC handles, which cannot sleep (%s)", refusal)
    return IpcMemory(device)


def _try_export(memory: "VmmMemory") -> None:
    import os

    # An attribute can promise what a container forbids. The segment stays: offsets must be equal on all ranks.
    memory.take("probe", (1,), torch.uint8)
    os.close(memory.export(next(iter(memory.table))))
