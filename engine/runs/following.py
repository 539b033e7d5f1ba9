"""Reading a record: from its start, from where a reader stopped, or from its end. A record may grow meanwhile. No torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from engine.errors import RunError
from engine.runs.events import LineDamaged, Record
from engine.runs.lines import parse_line
from engine.runs.read_ahead import Reading
from engine.runs.snapshot import RunSnapshot

EVENTS_FILE = "events.jsonl"
_BLOCK_BYTES = 1 << 24
"""Lines of this length together are handed out at a time: what a long record holds is never in memory at once, and of so many
bytes one timeline is parsed."""


def replay(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, in order; none when there is no such file yet. A torn last line is left out, and a warning
    stands for a line that is not a record. Raises RunError when the file cannot be read."""
    reading = Reading(path)
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield reading.record(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None


def last_of_kind(path: str | os.PathLike[str], kind: str) -> Record | None:
    """The latest whole record of `kind` in a file that `RunRecorder` wrote, None where there is none: lines of other kinds
    are not parsed. Raises RunError when the file cannot be read."""
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
                    if stop > 0 and (begin == 0 or content[begin - 1:begin] == b"\n"):
                        with contextlib.suppress(ValueError):
                            return parse_line(content[begin:stop])
                    end = begin
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"The record {path} cannot be read ({error.strerror}).") from None
    return None


class Follower:
    """Reads what has been added to a record since the last call, while another process or thread writes it.

    The records add up to the snapshot that those of `replay` add up to. A timeline that a later one replaces before anybody
    can have seen it comes as an `UnreadTimeline`: a long record consists of timelines by half. Damage within its spans is told
    once somebody asks `engine.runs.timeline_index` for that step.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._offset = 0
        self._reading = Reading(path)

    def read_new(self) -> list[Record]:
        """The lines completed since the last call; empty when there are none, or no file yet. Raises RunError when the file
        cannot be read; where that happens midway, what was read first is handed out, and the next call raises."""
        return [record for block in self.blocks() for record in block]

    def blocks(self, in_stretches: bool = False) -> Iterator[list[Record]]:
        """As `read_new`, in lists of some MB of lines: who lets go of each before the next never holds a long record whole.
        `in_stretches`: steps in a row come as one record (`engine.runs.step_window`)."""
        size, is_first, skim = 0, True, self._reading.skim_steps if in_stretches else self._reading.skim
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    skim(line)
                    length = len(line)
                    self._offset += length
                    size += length
                    if size >= _BLOCK_BYTES:
                        yield self._reading.hand_out()
                        size, is_first = 0, False
        except FileNotFoundError:
            pass
        except OSError as error:
            if is_first and self._reading.is_empty:
                raise RunError(f"The record {self.path} cannot be read ({error.strerror}).") from None
        if not self._reading.is_empty:
            yield self._reading.hand_out()


def catch_up(snapshot: RunSnapshot, follower: Follower) -> None:
    """Apply what has been added to a record. One that cannot be applied, by a fault of the program, costs this record and not
    those after it: the log says which. Raises RunError when the file cannot be read."""
    for block in follower.blocks(in_stretches=True):
        for record in chain.from_iterable(map(snapshot.to_apply, block)):
            try:
                snapshot.apply(record)
            except Exception:
                traceback.print_exc()
                text = f"Record {record.seq:,} ({record.event.kind}) cannot be shown: it is damaged, or of another version."
                snapshot.apply(replace(record, event=LineDamaged("warning", text)))
