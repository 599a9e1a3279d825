"""Device memory of one rank whose pages can be exported to peers, freed and mapped again at the same addresses."""

import os
from collections.abc import Iterable, Sequence

import torch
from cuda.bindings import driver

from moebius_engine.memory.driver import DriverError, attribute, call
from moebius_engine.memory.segments import Segment, SegmentTable
from moebius_engine.memory.views import tensor_at

_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class VmmMemory:
    """One reserved address range, filled with tagged segments. Addresses never change; pages come and go by tag.

    device: CUDA device index. reserve: bytes of address space, the device's whole memory unless given; address space
    costs nothing. Raises DriverError if the driver has no exportable memory.
    """

    can_sleep = True

    def __init__(self, device: int, reserve: int | None = None):
        self.device = device
        torch.zeros(1, device=f"cuda:{device}")  # makes torch's context the current one
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = _FD
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = call(
            "read the allocation granularity", driver.cuMemGetAllocationGranularity(self._properties, minimum)
        )
        wanted = torch.cuda.mem_get_info(device)[1] if reserve is None else reserve
        self.table = SegmentTable(-(-wanted // granularity) * granularity, granularity)
        self._base = self._reserve_range()
        self._pages: dict[int, driver.CUmemGenericAllocationHandle] = {}
        self._peer_bases: dict[int, int] = {}
        self._peer_pages: set[tuple[int, int]] = set()

    @staticmethod
    def is_supported(device: int) -> bool:
        names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        return all(attribute(device, name) for name in names)

    def take(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new segment with this tag, as a tensor; its content is undefined."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        segment = self.table.add(tag, nbytes)
        self._map_own(segment)
        return tensor_at(self.address(segment), shape, dtype, self.device)

    def address(self, segment: Segment) -> int:
        return self._base + segment.offset

    def segment_of(self, address: int) -> Segment:
        """The segment that an address of this rank lies in. Raises ValueError if none."""
        return self.table.at(address - self._base)

    def sleep(self, tags: Iterable[str]) -> None:
        """Give the pages of these tags back; their content is lost, their addresses stay. Frees nothing while a peer
        still maps them (Peers.sleep unmaps there too). Sleeping twice is no error."""
        torch.cuda.synchronize(self.device)
        for segment in self.table.tagged(tags):
            if segment.number in self._pages:
                self._release(segment)

    def wake(self, tags: Iterable[str]) -> None:
        """New pages, of undefined content, at the same addresses. Waking what is awake is no error.

        Raises MemoryError if the device has no room for all of them; then none was taken.
        """
        asleep = [segment for segment in self.table.tagged(tags) if segment.number not in self._pages]
        try:
            for segment in asleep:
                self._map_own(segment)
        except DriverError as error:
            for segment in asleep:
                if segment.number in self._pages:
                    self._release(segment)
            if error.code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(str(error)) from error
            raise

    def is_awake(self, segment: Segment) -> bool:
        return segment.number in self._pages

    def export(self, segment: Segment) -> int:
        """A file descriptor of the segment's pages, for a peer; the caller closes it."""
        handle = self._pages[segment.number]
        return int(call(f"export segment {segment}", driver.cuMemExportToShareableHandle(handle, _FD, 0)))

    def open_peer(self, rank: int, segment: Segment, descriptor: int) -> None:
        """Map a peer's pages; `descriptor` is closed. A peer's segment has the same address each time."""
        if rank not in self._peer_bases:
            self._peer_bases[rank] = self._reserve_range()
        try:
            handle = call("import pages", driver.cuMemImportFromShareableHandle(descriptor, _FD))
        finally:
            os.close(descriptor)
        try:
            self._map(self.peer_address(rank, segment), segment, handle)
        finally:
            call("release the import", driver.cuMemRelease(handle))  # the mapping keeps the pages
        self._peer_pages.add((rank, segment.number))

    def close_peer(self, rank: int, segment: Segment) -> None:
        """Unmap a peer's pages, if they are mapped."""
        if (rank, segment.number) in self._peer_pages:
            self._unmap(self.peer_address(rank, segment), segment)
            self._peer_pages.remove((rank, segment.number))

    def peer_address(self, rank: int, segment: Segment) -> int:
        return self._peer_bases[rank] + segment.offset

    def close(self) -> None:
        """Free everything. Tensors over this memory must not be used again."""
        torch.cuda.synchronize(self.device)
        for rank, index in list(self._peer_pages):
            self.close_peer(rank, next(segment for segment in self.table if segment.number == index))
        if self._pages:
            self.sleep({segment.tag for segment in self.table})
        for base in [*self._peer_bases.values(), *([self._base] if self._base else [])]:
            call("free addresses", driver.cuMemAddressFree(base, self.table.reserved))
        self._peer_bases, self._base = {}, 0

    def _reserve_range(self) -> int:
        return int(call("reserve addresses", driver.cuMemAddressReserve(self.table.reserved, 0, 0, 0)))

    def _map_own(self, segment: Segment) -> None:
        handle = call(
            f"allocate {segment.nbytes} bytes for {segment.tag!r}",
            driver.cuMemCreate(segment.nbytes, self._properties, 0),
        )
        try:
            self._map(self.address(segment), segment, handle)
        except Exception:
            call("release pages", driver.cuMemRelease(handle))
            raise
        self._pages[segment.number] = handle

    def _release(self, segment: Segment) -> None:
        self._unmap(self.address(segment), segment)
        call("release pages", driver.cuMemRelease(self._pages.pop(segment.number)))

    def _map(self, address: int, segment: Segment, handle: driver.CUmemGenericAllocationHandle) -> None:
        call("map pages", driver.cuMemMap(address, segment.nbytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            # Access for this device, given here, is all that a peer's pages need: no cudaDeviceEnablePeerAccess.
            call("allow access", driver.cuMemSetAccess(address, segment.nbytes, [access], 1))
        except Exception:
            self._unmap(address, segment)
            raise

    def _unmap(self, address: int, segment: Segment) -> None:
        call("unmap pages", driver.cuMemUnmap(address, segment.nbytes))
