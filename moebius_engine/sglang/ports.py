"""The TCP ports of one engine: a block of 240 that no other engine and no outgoing connection can take.

SGLang looks whether its ports are free and binds them seconds later, once its modules are imported. Between the two,
ports are lost in two ways. The kernel hands them out to outgoing connections (its ephemeral ports): blocks lie outside
those. Another engine that starts meanwhile chooses them too: one port of the block is bound from the choice on.
"""

import contextlib
import random
import socket
from pathlib import Path

from sglang.srt.server_args import ZMQ_TCP_PORT_DELTA

_SPAN = 240
_HELD = ZMQ_TCP_PORT_DELTA - 1  # bound by us, never listened at
_RENDEZVOUS = ZMQ_TCP_PORT_DELTA + 6
_USED = (0, *range(ZMQ_TCP_PORT_DELTA, ZMQ_TCP_PORT_DELTA + 6), _RENDEZVOUS)  # HTTP, SGLang's ZMQ sockets, the ranks
_LOWEST = 20000  # Ray's workers have 10002 to 19999
_HIGHEST = 65535 - 10000  # SGLang also reckons with port + 10000, for gRPC (server_args.py:1149)
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IANAS_RANGE = (49152, 65535)  # RFC 6335, section 6; what macOS uses


class PortBlock:
    """Holds its ports against other engines of this machine until close(), or until this process ends.

    base: SGLang's server argument `port`. rendezvous: where the ranks meet, its `nccl_port`.
    """

    def __init__(self, asked: int | None = None):
        """Raises ValueError if the asked base, or a port that it implies, is out of range or taken."""
        if asked is None:
            self.base, self._held = _free_block()
        elif not 1 <= asked <= _HIGHEST:
            raise ValueError(f"port={asked} must lie between 1 and {_HIGHEST}: SGLang also derives port + 10000")
        else:
            self.base, self._held = asked, _hold(asked)
        self.rendezvous = self.base + _RENDEZVOUS

    def close(self) -> None:
        """Another engine may now take the ports that are not bound. Closing twice is no error."""
        self._held.close()


def free_port() -> int:
    """A base port that is free now, for a process that takes its block itself, seconds later."""
    with contextlib.closing(PortBlock()) as block:
        return block.base


def _free_block() -> tuple[int, socket.socket]:
    """Its base and its held port. Raises RuntimeError if there is none."""
    bases = _outside(range(_LOWEST, _HIGHEST - _SPAN, _SPAN), *_ephemeral_ports())
    for base in random.SystemRandom().sample(bases, len(bases)):
        with contextlib.suppress(ValueError):
            return base, _hold(base)
    raise RuntimeError(f"no free ports for an engine: all {len(bases)} blocks of {bases[0]} to {bases[-1]} are in use")


def _outside(bases: range, low: int, high: int) -> list[int]:
    """Those whose blocks have no port of low to high; all of them where a host leaves none."""
    return [base for base in bases if base + _SPAN <= low or base > high] or list(bases)


def _ephemeral_ports() -> tuple[int, int]:
    if not _KERNELS_RANGE.exists():
        return _IANAS_RANGE
    low, high = map(int, _KERNELS_RANGE.read_text(encoding="ascii").split())
    return low, high


def _hold(base: int) -> socket.socket:
    """The held port of a block whose other ports are free. Raises ValueError with one that is not."""
    held = _bind(base, _HELD)
    try:
        for offset in _USED:
            # As a server does: connections of its predecessor that linger in TIME_WAIT do not take the port.
            _bind(base, offset, reuse=True).close()
    except ValueError:
        held.close()
        raise
    return held


def _bind(base: int, offset: int, reuse: bool = False) -> socket.socket:
    port, bound = base + offset, socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError as error:
        bound.close()
        raise ValueError(
            f"port={base}: port {port} is in use, perhaps by an engine; choose another port ({error})"
        ) from error
    return bound
