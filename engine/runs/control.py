"""Commands to a run: written to a small file in its folder, read between its steps. No torch."""

from __future__ import annotations

import errno
import json
import os
import time
import uuid

from engine.config.changes import CHANGE, Change
from engine.errors import RunError
from engine.files import file_size
from engine.runs.folder import RunFolder

COMMANDS = ("stop", "discard", "pause", "resume", "save")


# ---------------------------------------------------------------------- control file


def send_command(folder: RunFolder, command: str | Change) -> None:
    """Ask the process that runs it to stop, discard, pause, resume or save, or for a change, at its
    next step boundary.

    Raises RunError for another word, when the run is not going on, as nobody would obey, and when
    the file cannot be written.
    """
    values = {"values": dict(command.values)} if isinstance(command, Change) else {}
    command = CHANGE if values else command
    if command not in (*COMMANDS, CHANGE):
        raise RunError(f"{command!r} is not a command; a run takes {', '.join(COMMANDS)}.")
    if not folder.is_running():
        raise RunError(f"Run {folder.id} is not running, so it cannot {command}.")
    line = (
        json.dumps(
            {"command": command, "time": time.time(), "id": uuid.uuid4().hex, **values}
        ).encode()
        + b"\n"
    )
    try:
        descriptor = os.open(
            folder.control_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            size = os.fstat(descriptor).st_size
            if (
                size and os.pread(descriptor, 1, size - 1) != b"\n"
            ):  # a full disk took half of the request before
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(
            f"The request to {command} cannot be written to {folder.control_path} "
            f"({error.strerror}); free some disk space, then ask again."
        ) from None


class CommandReader:
    """Reads the commands sent since the run's lock was taken; those sent to an earlier process are
    not obeyed.
    """

    def __init__(self, folder: RunFolder):
        """`folder` is the object that holds the lock."""
        if folder.control_start is None:
            raise RuntimeError("commands are read by the process that holds the run's lock.")
        self._path = folder.control_path
        self._offset = folder.control_start

    def read_new(self) -> list[str | Change]:
        """Commands since the last call, in order. Lines that are no command are passed over, and a
        file that cannot be read holds none: requests are no reason to end a run.
        """
        try:
            size = file_size(self._path)
            self._offset = min(self._offset, size)  # somebody emptied the file
            if size == self._offset:
                return []
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        whole = added.rfind(b"\n") + 1
        self._offset += whole
        commands = []
        for line in added[:whole].splitlines():
            try:
                asked = json.loads(line)
                command = asked["command"]
                if command == CHANGE:
                    commands.append(Change.from_dict(asked.get("values")))
            except (ValueError, KeyError, TypeError, RecursionError, RunError):
                continue
            if command in COMMANDS:
                commands.append(command)
        return commands
