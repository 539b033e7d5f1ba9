"""Processes of one account and one node find each other by a socket in a folder of that account.

No other account can enter the folder, and both sides ask the system whose process is at the other
end, so no secret is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from engine.errors import RankError, first_line

_PEER = struct.Struct("3i")
"""The system tells of the other end: process, user, group."""


class OwnSocket:
    """Where processes of this account meet by a name. They have the same variables, so they find
    the same folder. Raises RankError where that is another account's.
    """

    def __init__(self, name: str):
        self._folder = _own_folder()
        self._name = name

    @property
    def _path(self) -> str:
        # The folder may have moved, or have a name that is too long for a socket.
        return f"/proc/self/fd/{self._folder}/{self._name}"

    def listen(self) -> socket.socket:
        """Returns a socket that listens, in the place of one that an ended process has left."""
        self.forget()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self._path)
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise RankError(f"No socket can be made ({first_line(error)}).") from error
        return listener

    def connect(self) -> socket.socket:
        """Returns a stream to the process of this account that listens. Raises OSError where there
        is none.
        """
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(self._path)
            refuse_others(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    def forget(self) -> None:
        """Lets nobody come any more."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)

    def close(self) -> None:
        os.close(self._folder)


def _own_folder() -> int:
    """Returns a descriptor of the folder in which this account has sockets, which is made if it is
    not there. Raises RankError where another account has made it, or may enter it.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        with contextlib.suppress(OSError):
            return _opened(given)
    folder = Path(tempfile.gettempdir()) / f"ramstream-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        return _opened(folder)
    except OSError as error:
        raise RankError(
            f"The folder {folder} cannot be used ({first_line(error)}); set TMPDIR to a folder of "
            "your own."
        ) from error


def _opened(folder: str | Path) -> int:
    """Returns a descriptor of a folder that only this account can enter. Raises OSError for any
    other.
    """
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    found = os.fstat(opened)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(opened)
        raise PermissionError("it is another account's, or open to others")
    return opened


def refuse_others(stream: socket.socket) -> int:
    """Returns the process at the other end. Raises PermissionError where that is another
    account's.
    """
    size = _PEER.size
    process, user, _ = _PEER.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        raise PermissionError(f"it is a process of the account {user}")
    return process
