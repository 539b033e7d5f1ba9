"""Commands to a run, which are written to a small file in its folder and read between its steps.

This module does not import torch.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from typing import Any

from engine import safe_files
from engine.config.changes import CHANGE, Change
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder

COMMANDS = ("stop", "discard", "pause", "resume", "save")
_MOST_READ = 1 << 20
"""Number of bytes of requests that are read at once, at most; a request has some hundred."""


# ---------------------------------------------------------------------- sending


def send_command(folder: RunFolder, command: str | Change) -> None:
    """Asks the process that executes a run to stop, discard, pause, resume or save, or to change
    settings, at its next step boundary.

    Raises RunError for an unknown command, for a run that no process executes, since nothing would
    obey it, and when the file cannot be written.
    """
    request: dict[str, Any] = {"command": command, "time": time.time(), "id": uuid.uuid4().hex}
    if isinstance(command, Change):
        request["command"] = CHANGE
        request["values"] = dict(command.values)
    name = request["command"]
    if name not in (*COMMANDS, CHANGE):
        raise RunError(f"{name!r} is not a command; a run takes {', '.join(COMMANDS)}.")
    if not folder.is_running():
        raise RunError(f"Run {folder.id} is not running, so it cannot {name}.")
    try:
        _append_line(folder, json.dumps(request).encode() + b"\n")
    except OSError as error:
        raise RunError(
            f"The request to {name} cannot be written to {folder.control_path} "
            f"({error.strerror}); free some disk space, then ask again."
        ) from None


def _append_line(folder: RunFolder, line: bytes) -> None:
    """Appends a line in one write, so that lines from several processes are never interleaved.
    Raises OSError.
    """
    descriptor = safe_files.open_to_append(folder.control_path, folder.root)
    try:
        size = os.fstat(descriptor).st_size
        # On a full disk, only part of the previous request may have been written; a line break ends
        # it.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- reading


class CommandReader:
    """Reads the commands sent since the run's lock was taken.

    Commands sent to an earlier process are ignored.
    """

    def __init__(self, folder: RunFolder):
        """`folder` must be the same object that holds the run's lock."""
        if folder.control_start is None:
            raise RuntimeError("commands are read by the process that holds the run's lock.")
        self._folder = folder
        self._offset = folder.control_start

    def read_new(self) -> list[str | Change]:
        """Returns the commands since the last call, in order.

        Lines that are not commands are skipped, and a file that cannot be read counts as empty,
        since a bad request must not end a run.
        """
        commands: list[str | Change] = []
        for line in self._new_lines():
            command = _command_of(line)
            if command is not None:
                commands.append(command)
        return commands

    def _new_lines(self) -> list[bytes]:
        """Returns the lines that were completed since the last call."""
        try:
            path, root = self._folder.control_path, self._folder.root
            size = safe_files.size_of(path, root)
            self._offset = min(self._offset, size)  # the file may have been truncated
            if size == self._offset:
                return []
            with safe_files.open_to_read(path, root) as file:
                file.seek(self._offset)
                added = file.read(_MOST_READ)
        except OSError:
            return []
        whole = added.rfind(b"\n") + 1
        if not whole and len(added) == _MOST_READ:  # this is no request
            whole = len(added)
        self._offset += whole
        return added[:whole].splitlines()


def _command_of(line: bytes) -> str | Change | None:
    """Returns the command in a line, or None if the line is not a command."""
    try:
        request = json.loads(line)
        command = request["command"]
        if command == CHANGE:
            return Change.from_dict(request.get("values"))
    except (ValueError, KeyError, TypeError, RecursionError, RunError):
        return None
    return command if command in COMMANDS else None
