"""Peers' device memory, mapped into this process."""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moebius_engine.exchange import agree
from moebius_engine.memory.descriptors import Mailbox, send
from moebius_engine.memory.exportable import Memory
from moebius_engine.memory.segments import Segment


class Peers:
    """Every rank's memory, seen from this rank. Collective: all ranks call the same methods in the same order.

    memory: this rank's; all ranks must have taken the same segments. group: a process group with a CPU back end, in
    rank order. timeout_s: deadline of an exchange.
    """

    def __init__(self, memory: Memory, group: dist.ProcessGroup, timeout_s: float):
        self.memory, self.group, self._timeout_s = memory, group, timeout_s
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._mapped: set[int] = set()
        self.sharing = 1  # ranks on this rank's GPU, itself included

    def connect(self) -> None:
        """Map what is awake on all ranks and not mapped yet.

        Raises RuntimeError on all ranks if they are on several hosts or their segments differ, or as together() if a
        peer does not send its handles in time or a GPU cannot map a peer's pages.
        """
        fresh = [s for s in self.memory.table if self.memory.is_awake(s) and s.number not in self._mapped]
        mailbox = Mailbox(self.rank, self._timeout_s / 2)  # meanwhile a rank that failed waits for the others
        try:
            told = self._gather((mailbox.name, _host(), fresh, _gpu(self.memory.device)))
            hosts = {host for _, host, _, _ in told}
            if len(hosts) > 1:
                raise RuntimeError(f"{self.ranks} ranks on {len(hosts)} hosts: memory is shared within one host only")
            for rank, (_, _, theirs, _) in enumerate(told):
                if theirs != fresh:
                    raise RuntimeError(f"rank {rank} has segments {theirs}, rank {self.rank} has {fresh}")
            self.sharing = sum(gpu == told[self.rank][3] for _, _, _, gpu in told)
            names = {rank: name for rank, (name, _, _, _) in enumerate(told) if rank != self.rank}
            with self.together():  # when connect returns, every rank sees every other
                self._exchange(mailbox, names, fresh)
            self._mapped |= {segment.number for segment in fresh}
        finally:
            mailbox.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails on one rank in a block of it ends the block on all. Who waits for another rank in there must give
        up before the group does.

        Raises RuntimeError on all ranks, naming those that failed by RuntimeError (the driver's too) or OSError.
        """
        cause = None
        try:
            yield
        except (RuntimeError, OSError) as error:
            cause = error
        if failed := agree(None if cause is None else f"{type(cause).__name__}: {cause}", self.group):
            raise RuntimeError(failed) from cause

    def address(self, rank: int, own: int) -> int:
        """Where this process sees, on `rank`, what lies at address `own` on this rank. Raises ValueError if `own` is
        no memory of a segment."""
        if rank == self.rank:
            return own
        segment = self.memory.segment_of(own)
        return self.memory.peer_address(rank, segment) + own - self.memory.address(segment)

    def sleep(self, tags: Iterable[str]) -> None:
        """Free the pages of these tags on all ranks. Nothing may be in flight. Raises RuntimeError where the memory
        cannot sleep."""
        tags = list(tags)
        if self.memory.can_sleep:
            self._barrier()  # a peer that still writes here would fault
            for segment in self.memory.table.tagged(tags):
                self._unmap(segment)
        self.memory.sleep(tags)

    def wake(self, tags: Iterable[str]) -> None:
        """New pages at the same addresses, of undefined content, exported to the peers again. Raises as wake_all."""
        wake_all(self.memory, tags, self.group)
        self.connect()

    def disconnect(self) -> None:
        """Unmap the peers' memory, which keeps its pages while it is mapped anywhere."""
        for segment in self.memory.table:
            self._unmap(segment)

    def close(self) -> None:
        """Unmap the peers' memory and free this rank's."""
        self.disconnect()
        self.memory.close()

    def _unmap(self, segment: Segment) -> None:
        for rank in range(self.ranks):
            self.memory.close_peer(rank, segment)
        self._mapped.discard(segment.number)

    def _exchange(self, mailbox: Mailbox, names: dict[int, str], fresh: list[Segment]) -> None:
        handles = [self.memory.export(segment) for segment in fresh]
        descriptors = [handle for handle in handles if isinstance(handle, int)]
        try:
            plain = [None if isinstance(handle, int) else handle.hex() for handle in handles]
            send(names, self.rank, plain, descriptors, self._timeout_s)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for rank, (theirs, received) in mailbox.receive(list(names)).items():
            incoming: list[Any] = list(received)
            try:
                for segment, handle in zip(fresh, theirs, strict=True):
                    opened = incoming.pop(0) if handle is None else bytes.fromhex(handle)
                    self.memory.open_peer(rank, segment, opened)
            finally:
                for descriptor in incoming:
                    os.close(descriptor)

    def _gather(self, own: Any) -> list[Any]:
        told: list[Any] = [None] * self.ranks
        dist.all_gather_object(told, own, group=self.group)
        return told

    def _barrier(self) -> None:
        dist.monitored_barrier(self.group, timeout=timedelta(seconds=self._timeout_s))


def wake_all(memory: Memory, tags: Iterable[str], group: dist.ProcessGroup) -> None:
    """memory.wake on all ranks of a group, or on none; what the tags name is asleep.

    Raises MemoryError on all ranks, naming those that have no room.
    """
    tags, reason = list(tags), None
    try:
        memory.wake(tags)
    except MemoryError as error:
        reason = str(error)
    if short := agree(reason, group):
        memory.sleep(tags)
        raise MemoryError(short)


def _host() -> str:
    """This boot of this machine; containers with separate network namespaces cannot reach each other's sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"


def _gpu(device: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
