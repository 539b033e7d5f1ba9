"""A process on another node may hang without an end, and nobody here can end it. NCCL gives such a
wait up when it is asked to; gloo does not, so its connections are cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path


class Streams:
    """Connections that this process makes while `noting` is open."""

    def __init__(self) -> None:
        self._found: list[socket.socket] = []

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes the connections that are made meanwhile, in any thread."""
        before = set(_sockets())
        yield
        for descriptor in set(_sockets()) - before:
            with contextlib.suppress(OSError):
                self._note(descriptor)

    def _note(self, descriptor: int) -> None:
        """Keeps a copy of a connection, which stays that of this one, even if it is closed
        elsewhere.
        """
        stream = socket.socket(fileno=os.dup(descriptor))
        try:
            stream.getpeername()
        except OSError:
            stream.close()  # it only listens, and gloo ends the process where that is cut
            return
        self._found.append(stream)

    def cut(self) -> None:
        """Cuts the connections: a thread that waits for one gets an error. Any thread may call
        this.
        """
        for stream in self._found:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the connections, which stay as they are."""
        for stream in self._found:
            stream.close()
        self._found.clear()


def _sockets() -> Iterator[int]:
    """Yields the descriptors of all sockets of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                yield int(entry.name)
