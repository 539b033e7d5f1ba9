"""Another Python process that does one task for this one.

This process has threads and may use a GPU, so the helper is a new process and never a fork. It has
its own session, so Ctrl-C in a terminal reaches only this process, which then ends its helper. When
the owner is gone, however it ended, the helper reads the end of its input and should exit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec

from engine.paths import PROGRAM_ROOT

_STARTTIME = 19
"""Place of a process's start in its status line, counted from 0 after the name."""
_OVER = ("Z", "X", "x")
"""States of a process that has ended."""
_PIPE_BYTES = 1 << 20
"""Bytes that a pipe holds at most without special rights; 64 KiB if nobody asks for more."""


class HelperProcess:
    """A helper runs `program`, a line of Python.

    `variables` are added to its environment. With `quiet`, its error output is discarded. Raises
    OSError if the system cannot start the process.
    """

    def __init__(self, program: str, variables: Mapping[str, str], quiet: bool = False):
        path = os.pathsep.join(filter(None, (str(PROGRAM_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            # -P keeps the working directory off the module path, where a user's file could replace
            # a library.
            [sys.executable, "-P", "-c", program],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=os.environ | variables | {"PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    @property
    def output(self) -> IO[bytes]:
        return self._output

    def widen(self) -> None:
        """Lets more wait in the pipes to and from the helper, so that long messages wait for fewer
        changes between the processes, as far as the system allows it.
        """
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, *contents: bytes) -> None:
        """Writes to the helper's input. Raises OSError when the helper has ended."""
        for content in contents:
            self._input.write(content)
        self._input.flush()

    def next_line(self, patience: float) -> dict[str, Any] | None:
        """Returns the next line of the helper's output, which must be JSON.

        Returns None if the helper writes nothing for `patience` seconds, and an empty dictionary
        once it has ended. A caller of this method must not read `output` as well.
        """
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="helper-process", daemon=True)
            self._reader.start()
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            return None
        return msgspec.json.decode(line) if line else {}

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put(b"")  # an empty line means that the helper has ended

    def wait(self) -> int:
        """Waits for the helper to end; returns its exit code, which is negative for a signal."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Ends the helper and frees its thread and its pipes."""
        self.kill()
        self.wait()
        if self._reader is not None:
            self._reader.join()
        for pipe in (self._input, self._output):
            # Closing flushes the pipe, which fails if the helper can no longer read the bytes.
            with contextlib.suppress(OSError):
                pipe.close()


def ending(code: int) -> str:
    """Returns a description of an exit code: "SIGKILL" for -9, "exit code 3" for 3."""
    return signal_name(-code) if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGTERM", or "signal 99" for an unnamed one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_ticks(pid: int) -> int:
    """Returns how many clock ticks after the machine's boot a process began, or 0 if it has ended
    or the system does not report it. Who sets the machine's clock does not change this number, and
    another process of the same id has another one.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # A process's name, in parentheses, may contain anything.
        fields = text.rpartition(")")[2].split()
        return 0 if fields[0] in _OVER else int(fields[_STARTTIME])
    except (OSError, ValueError, IndexError):
        return 0


def take_output() -> BinaryIO:
    """Returns the stream for a helper's answers; the helper itself calls this.

    From then on, everything that a library prints goes to the error output, since it is not an
    answer.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
