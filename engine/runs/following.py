"""Reading a record: from its start, from where a reader stopped, or from its end. A record may grow
meanwhile. No torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from engine.errors import RunError
from engine.runs.events import LineDamaged, LogLine, Record
from engine.runs.lines import parse_line
from engine.runs.snapshot import RunSnapshot

EVENTS_FILE = "events.jsonl"


class _LineReader:
    """Lines of one file, from the first on, as records. A line that a failing disk or an editor
    damaged costs what it said and not the run: a warning takes its place, with the time before it
    (0.0 where there is none).
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._name = Path(path).name
        self._lines = 0
        self._before = Record(Path(path).absolute().parent.name, 0, 0.0, LogLine())

    def record(self, line: bytes) -> Record:
        """Of the next line."""
        self._lines += 1
        try:
            self._before = parse_line(line)
        except ValueError:
            before, text = (
                self._before,
                f"Line {self._lines} of {self._name} is damaged: what it recorded is not shown.",
            )
            self._before = Record(
                before.run_id, before.seq + 1, before.time, LineDamaged("warning", text)
            )
        return self._before


def replay(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, in order; none when there is no such file yet. A torn last line is
    left out, and a warning stands for a line that is not a record. Raises RunError when the file
    cannot be read.
    """
    reader = _LineReader(path)
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield reader.record(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None


def last_of_kind(path: str | os.PathLike[str], kind: str) -> Record | None:
    """The latest whole record of `kind` in a file that `RunRecorder` wrote, None where there is
    none: lines of other kinds are not parsed. Raises RunError when the file cannot be read.
    """
    start = b'{"kind":"' + kind.encode("ascii") + b'"'
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                end = len(content)
                while (begin := content.rfind(start, 0, end)) >= 0:
                    stop = content.find(b"\n", begin)
                    # Within a line, the same bytes are text that somebody wrote.
                    if stop > 0 and (begin == 0 or content[begin - 1 : begin] == b"\n"):
                        with contextlib.suppress(ValueError):
                            return parse_line(content[begin:stop])
                    end = begin
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None
    return None


class Follower:
    """Reads what has been added to a record since the last call, while another process or thread
    writes it. The records are those of `replay`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._offset = 0
        self._reader = _LineReader(path)

    def read_new(self) -> list[Record]:
        """The lines completed since the last call; empty when there are none, or no file yet.
        Raises RunError when the file cannot be read; where that happens midway, what was read first
        is handed out, and the next call raises.
        """
        return list(self.new_records())

    def new_records(self) -> Iterator[Record]:
        """As `read_new`, one by one: who lets go of each before the next never holds a long record
        whole.
        """
        begin = self._offset
        try:
            with open(self.path, "rb") as file:
                file.seek(begin)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._offset += len(line)
                    yield self._reader.record(line)
        except FileNotFoundError:
            return
        except OSError as error:
            if self._offset == begin:
                raise RunError(
                    f"The record {self.path} cannot be read ({error.strerror})."
                ) from None


def catch_up(snapshot: RunSnapshot, follower: Follower) -> None:
    """Apply what has been added to a record. One that cannot be applied, by a fault of the program,
    costs this record and not those after it: the log says which. Raises RunError when the file
    cannot be read.
    """
    for record in follower.new_records():
        try:
            snapshot.apply(record)
        except Exception:
            traceback.print_exc()
            text = (
                f"Record {record.seq:,} ({record.event.kind}) cannot be shown: it is damaged, or "
                "of another version."
            )
            snapshot.apply(replace(record, event=LineDamaged("warning", text)))
