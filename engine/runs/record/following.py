"""Reading of a record from its start, from where a reader stopped, or from its end.

The record may grow during that time. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from engine.errors import RunError
from engine.runs.record.events import LineDamaged, LogLine, Record
from engine.runs.record.lines import complete_lines, next_line, open_record, parse_line
from engine.runs.record.snapshot import RunSnapshot

EVENTS_FILE = "events.jsonl"
_BLOCK_BYTES = 1 << 20
"""Bytes of a block in which a record is searched from its end."""


class _LineReader:
    """Turns the lines of one file into records, from the first line on.

    If a failing disk or an editor damaged a line, only that line is lost. A warning replaces it,
    with the time of the preceding record (0.0 for the first line).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._name = Path(path).name
        self._lines = 0
        self._before = Record(Path(path).absolute().parent.name, 0, 0.0, LogLine())

    def record(self, line: bytes) -> Record:
        """Returns the record in the next line."""
        self._lines += 1
        try:
            self._before = parse_line(line)
        except ValueError:
            warning = LineDamaged(
                "warning",
                f"Line {self._lines} of {self._name} is damaged: what it recorded is not shown.",
            )
            before = self._before
            self._before = Record(before.run_id, before.seq + 1, before.time, warning)
        return self._before


def replay(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Yields the records of a file in order, or nothing if the file does not exist yet.

    A torn last line is skipped, and a line that is not a record is replaced by a warning. Raises
    RunError when the file cannot be read.
    """
    reader = _LineReader(path)
    try:
        with open_record(path) as file:
            for line, _ in complete_lines(file):
                yield reader.record(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from None


def last_of_kind(path: str | os.PathLike[str], kind: str) -> Record | None:
    """Returns the latest complete record of `kind` in a file that `RunRecorder` wrote, or None.

    The file is searched from its end, and lines of other kinds are not parsed. Raises RunError when
    the file cannot be read.
    """
    try:
        with open_record(path) as file:
            return _last_in(file, b'{"kind":"' + kind.encode("ascii") + b'"')
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None


def _last_in(file: BinaryIO, start: bytes) -> Record | None:
    """Returns the last complete record whose line begins with `start`."""
    # The file is read and not mapped: one that became shorter meanwhile would end the process.
    wanted = b"\n" + start
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        # A line may begin at the end of this block and continue in the next one.
        block = file.read(end - begin + len(wanted) - 1)
        if begin == 0:
            block = b"\n" + block
        stop = len(block)
        while (found := block.rfind(wanted, 0, stop)) >= 0:
            file.seek(begin + found + (begin > 0))
            with contextlib.suppress(ValueError):
                return parse_line(next_line(file))
            stop = found + len(wanted) - 1
        end = begin
    return None


class Follower:
    """Reads what was added to a record since the last call, while another process or thread writes
    the record.

    It returns the same records as `replay`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._offset = 0
        self._reader = _LineReader(path)

    def read_new(self) -> list[Record]:
        """Returns the records in the lines completed since the last call, or an empty list if there
        is no file yet.

        Raises RunError when the file cannot be read. If reading fails partway, this call returns
        the records read so far and the next call raises.
        """
        return list(self.new_records())

    def new_records(self) -> Iterator[Record]:
        """Yields the records of `read_new` one by one.

        A caller that drops each record before reading the next never holds a whole long file in
        memory.
        """
        begin = self._offset
        try:
            with open_record(self.path) as file:
                file.seek(begin)
                for line, length in complete_lines(file):
                    self._offset += length
                    yield self._reader.record(line)
        except FileNotFoundError:
            return
        except OSError as error:
            if self._offset == begin:
                raise _unreadable(self.path, error) from None


def catch_up(snapshot: RunSnapshot, follower: Follower) -> None:
    """Applies the new records of a file to its snapshot.

    If a fault in the program prevents a record from being applied, only that record is skipped,
    which is logged. Raises RunError when the file cannot be read.
    """
    for record in follower.new_records():
        try:
            snapshot.apply(record)
        except Exception:  # noqa: BLE001  whatever the fault is, the rest of the run is shown
            traceback.print_exc()
            text = (
                f"Record {record.seq:,} ({record.event.kind}) cannot be shown: it is damaged, or "
                "of another version."
            )
            snapshot.apply(replace(record, event=LineDamaged("warning", text)))


def _unreadable(path: str | os.PathLike[str], error: OSError) -> RunError:
    return RunError(f"The record {os.fspath(path)} cannot be read ({error.strerror}).")
