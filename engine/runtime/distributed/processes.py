"""The processes that compute a run together with rank 0. Rank 0 has started them on its own node,
or `torchrun` has (`engine.runtime.distributed.launched_group`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from engine.machine.cgroups import private_memory
from engine.paths import PROGRAM_ROOT
from engine.runtime.distributed.connection import ConnectionLostError, MonitoredConnection
from engine.runtime.distributed.message_stream import Connection
from engine.runtime.distributed.messages import End, Message

END_SECONDS = 10
"""Seconds within which a process that was asked to end must have ended."""
ENDED = "it has ended"
"""What a connection says of a process that has ended."""

Take = Callable[[Message], bool]
Lost = Callable[[str], None]


class WorkerProcess(Protocol):
    """Process of a worker group. Any thread may call its methods."""

    host_name: str
    """Name of its node; empty where that is rank 0's and there is no other."""
    is_here: bool
    """Whether it is on rank 0's node."""
    pid: int
    """Process id on its node."""

    def connect(self, take: Take, lost: Lost) -> MonitoredConnection:
        """Returns the connection to it, which works as `MonitoredConnection` says."""

    def kill(self) -> None:
        """Ends it at once, whatever it does."""

    def why_lost(self, why: str) -> str:
        """Returns why it is lost, in words. why: what its connection knows of it."""

    def say_goodbye(self) -> None:
        """Asks it to end, if it is rank 0's to end."""

    def part(self) -> None:
        """Returns once it has ended, or has no connection to the worker group any more."""

    def host_memory(self) -> int:
        """Returns the bytes of rank 0's node that it has for itself."""


class StartedProcess:
    """A process that rank 0 starts on its own node. Raises OSError where
    that is not possible.
    """

    host_name = ""
    is_here = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, (str(PROGRAM_ROOT), os.environ.get("PYTHONPATH"))))
        program = f"from engine.runtime.distributed.worker import main; main({theirs.fileno()})"
        try:
            self.process = subprocess.Popen(
                # -P keeps the working directory off the module path, as in `HelperProcess`.
                [sys.executable, "-P", "-c", program],
                # Ctrl-C in a terminal reaches rank 0 alone, which stops and saves the run.
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self.process.pid
        self._connection = Connection(ours)
        self._monitored: MonitoredConnection | None = None

    def connect(self, take: Take, lost: Lost) -> MonitoredConnection:
        self._monitored = MonitoredConnection(self._connection, take, lost)
        return self._monitored

    def kill(self) -> None:
        # A process that is stopped obeys this signal alone.
        self.process.kill()

    def why_lost(self, why: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _exit_in_words(self.process.wait(END_SECONDS if why == ENDED else 0.1))
        return why

    def say_goodbye(self) -> None:
        if self._monitored is not None:
            with contextlib.suppress(ConnectionLostError):
                self._monitored.send(End())

    def part(self) -> None:
        if self._monitored is None:  # nobody has asked it to end
            self.process.kill()
            self._connection.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._monitored is not None:
            self._monitored.close()

    def host_memory(self) -> int:
        return private_memory(self.process.pid)


def _exit_in_words(code: int) -> str:
    """Returns how a process has ended, in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL:
        return f"its process was killed ({name}), by a person, or by the system for lack of memory"
    return f"its process was ended by the signal {name}"
