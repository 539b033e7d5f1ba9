"""Another Python process that does one thing for this one, which has threads and may have a GPU.

It is a new process and never a fork, in a session of its own, so that Ctrl-C in a terminal reaches
this process alone, which ends it. A helper whose owner is gone reads the end of its input; it
should end then, however the owner ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO

from engine.paths import PROGRAM_ROOT


class HelperProcess:
    """Runs `program`, a line of Python. `variables` are added to its environment; `quiet` throws
    its error output away.

    Raises OSError where the system starts no process.
    """

    def __init__(self, program: str, variables: Mapping[str, str], quiet: bool = False):
        path = os.pathsep.join(filter(None, (str(PROGRAM_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=os.environ | variables | {"PYTHONPATH": path},
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    @property
    def output(self) -> BinaryIO:
        return self._process.stdout

    def send(self, *contents: bytes) -> None:
        """Raises OSError when it has ended."""
        for content in contents:
            self._process.stdin.write(content)
        self._process.stdin.flush()

    def next_line(self, patience: float) -> dict[str, Any] | None:
        """What it says next, as a line of JSON; None where it says nothing for so many seconds,
        empty when it has ended. Who calls this does not read `output`.
        """
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="helper-process", daemon=True)
            self._reader.start()
        try:
            line = self._lines.get(timeout=patience)
        except queue.Empty:
            return None
        return json.loads(line) if line else {}

    def _read(self) -> None:
        for line in self.output:
            self._lines.put(line)
        self._lines.put(b"")

    def wait(self) -> int:
        """Its exit code, negative for a signal, once it has ended."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End it, and give back what it took."""
        self.kill()
        self.wait()
        if self._reader is not None:
            self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was sent to it may still be on its way
                pipe.close()


def ending(code: int) -> str:
    """SIGKILL; exit code 3."""
    return signal_name(-code) if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def take_output() -> BinaryIO:
    """Within a helper: where its answers go. Whatever a library prints is no answer, and goes to
    the error output.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers
