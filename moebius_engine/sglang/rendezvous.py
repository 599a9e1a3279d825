"""Where an engine's ranks meet: on loopback, since they share one host.

torch's own store listens on every interface, whatever address it is given, and who reaches it can change what the ranks
tell each other.
"""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

SCHEME = "moebius"
_LOOPBACK = "127.0.0.1"


def use_loopback(port: int) -> None:
    """From now on SGLang's ranks in this process meet at this port of loopback, and gloo talks there too.

    Variables that the user has set stay.
    """
    dist.register_rendezvous_handler(SCHEME, meet)
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"{SCHEME}://{_LOOPBACK}:{port}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else that of the host's name


def meet(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[dist.TCPStore, int, int]]:
    """torch's rendezvous handler, as for tcp://, but rank 0 listens at the url's address and nowhere else."""
    place = urlsplit(url)
    host, port = place.hostname, place.port
    query = parse_qs(place.query)
    rank, ranks = int(query["rank"][0]), int(query["world_size"][0])
    assert host is not None and port is not None  # use_loopback's
    listening = socket.create_server((host, port)).detach() if rank == 0 else None
    store = dist.TCPStore(host, port, ranks, rank == 0, timeout, master_listen_fd=listening)
    yield store, rank, ranks
