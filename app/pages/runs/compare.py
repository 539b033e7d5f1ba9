"""The records of several runs for comparisons, see `app.pages.runs.comparison`.

Each record is read once; after that, only additions to it are read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.pages.runs.comparison import Axis, Compared, comparison
from engine import safe_files
from engine.config.tree import by_dotted_name
from engine.errors import RamstreamError, RunError
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.run_folder import RunFolder, shown_state
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.names import shown_name

LEAST_RUNS, MOST_RUNS = 2, 6
KEPT_RECORDS = 12


class Records:
    """Keeps a snapshot of each run's record, and updates it when the record has grown. Any thread
    may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Fold] = OrderedDict()

    def compare(
        self,
        folders: Sequence[RunFolder],
        axis: Axis,
        is_running: Callable[[RunFolder], bool],
        baseline: str = "",
    ) -> dict[str, Any]:
        """Returns the comparison of these runs; `baseline` is the id of one of them.

        Raises RunError if there are too few or too many runs, or if a record cannot be read.
        """
        if not LEAST_RUNS <= len(folders) <= MOST_RUNS:
            verb = "is" if len(folders) == 1 else "are"
            raise RunError(
                f"{LEAST_RUNS} to {MOST_RUNS} runs are compared; {len(folders)} {verb} chosen."
            )
        with self._lock:  # a snapshot must not change while figures are made from it
            compared = [self._compared(folder, is_running(folder)) for folder in folders]
            return comparison(compared, axis, baseline)

    def _compared(self, folder: RunFolder, running: bool) -> Compared:
        snapshot = self._snapshot(folder)
        settings: dict[str, Any] = {}
        name = shown_name(folder)
        try:
            settings = by_dotted_name(folder.config.to_dict())
        except RamstreamError:  # the curves can be shown without the settings
            if name == folder.id:
                name = snapshot.name or name
        state = shown_state(snapshot.state, running)
        return Compared(folder.id, name, state, snapshot, settings)

    def _snapshot(self, folder: RunFolder) -> RunSnapshot:
        """Returns the current snapshot of the run's record. A missing record gives an empty
        snapshot.
        """
        try:
            stat = safe_files.lstat(folder.events_path, folder.root)
        except OSError:
            stat = None
        size, mtime = (0, 0) if stat is None else (stat.st_size, stat.st_mtime_ns)
        key = str(folder.events_path)
        fold = self._kept.get(key)
        if fold is None or fold.is_of_other_record(size, mtime):
            fold = _Fold(Follower(folder.events_path), RunSnapshot())
            self._kept[key] = fold
        fold.go_on(size, mtime)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_RECORDS:
            self._kept.popitem(last=False)
        return fold.snapshot


@dataclass
class _Fold:
    """Snapshot of the part of a record that was read so far."""

    follower: Follower
    snapshot: RunSnapshot
    size: int = -1
    """Bytes of the record when it was last read."""
    mtime: int = -1
    """Modification time of the record when it was last read, in nanoseconds."""

    def is_of_other_record(self, size: int, mtime: int) -> bool:
        """Returns whether the file was replaced or repaired: a record itself only grows."""
        return size < self.size or (size == self.size and mtime != self.mtime)

    def go_on(self, size: int, mtime: int) -> None:
        """Reads the additions to the record, if there are any."""
        if (self.size, self.mtime) != (size, mtime):
            catch_up(self.snapshot, self.follower)
            self.size = size
            self.mtime = mtime
