"""Lines of a record in a row: what a damaged one costs, and which timelines are left unread."""

from __future__ import annotations

import os
from pathlib import Path

from engine.runs.events import LineDamaged, LogLine, Record, StepTimeline
from engine.runs.lines import TIMELINE_START, parse_line, unread_timeline
from engine.runs.step_window import LEAST, MOST, STARTS, read_stretch


class Reading:
    """Lines of one file, from the first on, as records. A line that a failing disk or an editor damaged costs what it
    said and not the run: a warning takes its place, with the time before it (0.0 where there is none)."""

    def __init__(self, path: str | os.PathLike[str]):
        self.records: list[Record] = []
        """Skimmed, and not handed out yet: what is read before a failure is neither lost nor read again."""
        self._unread: list[tuple[int, int, Record]] = []
        """Of each unread timeline in `records`: its place there, the lines before it in the file, the record before it."""
        self._waiting: list[bytes] = []
        """Lines after those, which may be a stretch."""
        self._lines = 0
        self._name = Path(path).name
        self._before = Record(Path(path).absolute().parent.name, 0, 0.0, LogLine())

    def record(self, line: bytes) -> Record:
        """The next line, parsed."""
        self._before = self._parsed(line, self._lines, self._before)
        self._lines += 1
        return self._before

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to hand out."""
        return not self.records and not self._waiting

    def skim_steps(self, line: bytes) -> None:
        """As `skim`, steps in a row as one `Stretch`."""
        if line.startswith(STARTS):
            self._waiting.append(line)
            if len(self._waiting) == MOST:
                self._take_waiting()
        else:
            self._take_waiting()
            self.skim(line)

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        stretch = read_stretch(waiting) if len(waiting) >= LEAST else None
        if stretch is None:
            for line in waiting:
                self.skim(line)
        else:
            self.records.append(stretch)
            self._before = stretch
            self._lines += len(waiting)

    def skim(self, line: bytes) -> None:
        """Add the next line to `records`, a timeline unread where its head can be relied on."""
        if line.startswith(TIMELINE_START) and (record := unread_timeline(line)) is not None:
            self._unread.append((len(self.records), self._lines, self._before))
        else:
            record = self._parsed(line, self._lines, self._before)
        self.records.append(record)
        self._before = record
        self._lines += 1

    def hand_out(self) -> list[Record]:
        """The records skimmed since the last call. The last timeline among them that is not damaged is parsed: it is the one
        that is shown."""
        self._take_waiting()
        while self._unread:
            place, lines, before = self._unread.pop()
            record = self.records[place] = self._parsed(self.records[place].event.line, lines, before)
            if isinstance(record.event, StepTimeline):
                self._unread.clear()
        records, self.records = self.records, []
        return records

    def _parsed(self, line: bytes, lines: int, before: Record) -> Record:
        """`lines`: of the file before this one; `before`: the record of the last of them."""
        try:
            return parse_line(line)
        except ValueError:
            text = f"Line {lines + 1} of {self._name} is damaged: what it recorded is not shown."
            return Record(before.run_id, before.seq + 1, before.time, LineDamaged("warning", text))
