"""Device memory of one rank, shared by CUDA IPC handles: where the driver has no exportable pages. Cannot sleep."""

from collections.abc import Iterable, Sequence

import torch
from cuda.bindings import driver

from moebius_engine.memory.driver import call
from moebius_engine.memory.segments import Segment, SegmentTable
from moebius_engine.memory.views import tensor_at

_ALIGNMENT = 2 << 20  # bytes: smaller allocations can share one handle


class IpcMemory:
    """Same interface as VmmMemory, except that pages are never given back before close().

    device: CUDA device index.
    """

    can_sleep = False

    def __init__(self, device: int):
        self.device = device
        torch.zeros(1, device=f"cuda:{device}")  # makes torch's context the current one
        self.table = SegmentTable(torch.cuda.mem_get_info(device)[1], _ALIGNMENT)
        self._own: dict[int, int] = {}
        self._peers: dict[tuple[int, int], int] = {}

    def take(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        segment = self.table.add(tag, torch.Size(shape).numel() * dtype.itemsize)
        self._own[segment.number] = int(call(f"allocate {segment.nbytes} bytes", driver.cuMemAlloc(segment.nbytes)))
        return tensor_at(self.address(segment), shape, dtype, self.device)

    def address(self, segment: Segment) -> int:
        return self._own[segment.number]

    def segment_of(self, address: int) -> Segment:
        for segment in self.table:
            if 0 <= address - self._own[segment.number] < segment.nbytes:
                return segment
        raise ValueError(f"address {address:#x} lies in no segment")

    def sleep(self, tags: Iterable[str]) -> None:
        raise RuntimeError(
            f"cannot free {sorted(tags)}: this driver has no exportable virtual memory, so the engine's memory is a "
            "plain allocation whose addresses would change; run without sleep"
        )

    def wake(self, tags: Iterable[str]) -> None:
        """Nothing: it never sleeps."""

    def is_awake(self, segment: Segment) -> bool:
        return segment.number in self._own

    def export(self, segment: Segment) -> bytes:
        handle = call("export memory", driver.cuIpcGetMemHandle(self.address(segment)))
        return bytes(handle.reserved)

    def open_peer(self, rank: int, segment: Segment, handle: bytes) -> None:
        opened = driver.CUipcMemHandle()
        opened.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._peers[rank, segment.number] = int(call("open a peer's memory", driver.cuIpcOpenMemHandle(opened, flags)))

    def close_peer(self, rank: int, segment: Segment) -> None:
        if (rank, segment.number) in self._peers:
            call("close a peer's memory", driver.cuIpcCloseMemHandle(self._peers.pop((rank, segment.number))))

    def peer_address(self, rank: int, segment: Segment) -> int:
        return self._peers[rank, segment.number]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for key in list(self._peers):
            call("close a peer's memory", driver.cuIpcCloseMemHandle(self._peers.pop(key)))
        for index in list(self._own):
            call("free memory", driver.cuMemFree(self._own.pop(index)))
