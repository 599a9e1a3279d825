"""File descriptors between processes of one user on one host, over Unix sockets."""

import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

_LARGEST = 1 << 16  # bytes of one message
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7), SO_PEERCRED)


class Mailbox:
    """Where this rank receives descriptors. Its name goes to the peers by other means, before anyone sends.

    rank: this rank. timeout_s: deadline of a whole receive. The host lists such names to all its users, and they have
    no permissions: who connects as another user is turned away.
    """

    def __init__(self, rank: int, timeout_s: float):
        self._rank, self._timeout_s = rank, timeout_s
        self.name = f"moebius-{os.getpid()}-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")  # abstract: leaves no file behind
        # A peer's whole message waits in the socket's buffer, so that all ranks can send first and receive then.
        self._socket.listen(128)

    def receive(self, peers: Sequence[int]) -> dict[int, tuple[Any, list[int]]]:
        """What each of `peers` sends: (message, descriptors), one each; the caller closes the descriptors.

        Raises TimeoutError naming the ranks that sent nothing in time.
        """
        got: dict[int, tuple[Any, list[int]]] = {}
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(got) < len(peers):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                with connection:
                    if (user := peer_user(connection)) != os.geteuid():
                        log.warning("rank %s: turned away a connection of user %s", self._rank, user)
                        continue
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    data, descriptors, flags, _ = socket.recv_fds(connection, _LARGEST, 253)
                rank, message = json.loads(data)
                got[rank] = (message, list(descriptors))
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or rank not in peers:
                    raise RuntimeError(f"rank {self._rank}: a broken or unexpected message of rank {rank}")
        except BaseException as error:
            for _, descriptors in got.values():
                for descriptor in descriptors:
                    os.close(descriptor)
            if isinstance(error, TimeoutError):
                missing = sorted(set(peers) - set(got))
                raise TimeoutError(
                    f"rank {self._rank}: no descriptors of ranks {missing} within {self._timeout_s} s"
                ) from error
            raise
        return got

    def close(self) -> None:
        self._socket.close()


def send(names: Mapping[int, str], rank: int, message: Any, descriptors: Sequence[int], timeout_s: float) -> None:
    """Send `message` (JSON) and duplicates of `descriptors` to the mailboxes `names` (rank to name).

    Raises OSError, PermissionError if a mailbox is another user's, or ValueError if the message is too long.
    """
    data = json.dumps([rank, message]).encode()
    if len(data) > _LARGEST:
        raise ValueError(f"a message of {len(data)} bytes: at most {_LARGEST}")
    for name in names.values():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"\0{name}")
            if (user := peer_user(connection)) != os.geteuid():
                raise PermissionError(f"the mailbox {name} belongs to user {user}, this process to {os.geteuid()}")
            socket.send_fds(connection, [data], list(descriptors))


def peer_user(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
