"""Several runs side by side: their records, each read once and gone on with, for what
`app.view.comparison` shows of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.view.comparison import Axis, Compared, comparison
from engine.errors import RamstreamError, RunError
from engine.runs.about import read_about
from engine.runs.folder import RunFolder, shown_state
from engine.runs.following import Follower, catch_up
from engine.runs.snapshot import RunSnapshot

LEAST_RUNS, MOST_RUNS = 2, 6
KEPT_RECORDS = 12


class Records:
    """Folds of run records, each read once and gone on with where it has grown. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Fold] = OrderedDict()

    def compare(
        self, folders: Sequence[RunFolder], axis: Axis, is_running: Callable[[RunFolder], bool]
    ) -> dict[str, Any]:
        """What `comparison` says of these runs. Raises RunError for too few, too many, or a record
        that cannot be read.
        """
        if not LEAST_RUNS <= len(folders) <= MOST_RUNS:
            raise RunError(
                f"{LEAST_RUNS} to {MOST_RUNS} runs are compared; {len(folders)} "
                f"{'is' if len(folders) == 1 else 'are'} chosen."
            )
        with self._lock:  # a fold must not grow while figures are made from it
            return comparison(
                [self._compared(folder, is_running(folder)) for folder in folders], axis
            )

    def _compared(self, folder: RunFolder, running: bool) -> Compared:
        snapshot = self._fold(folder)
        try:
            config = folder.config
            name, settings = config.name, by_dotted_name(config.to_dict())
        except RamstreamError:
            name, settings = snapshot.name or folder.id, {}
        state = shown_state(snapshot.state, running)
        return Compared(folder.id, read_about(folder.path).name or name, state, snapshot, settings)

    def _fold(self, folder: RunFolder) -> RunSnapshot:
        try:
            stat = folder.events_path.stat()
            size, mtime = stat.st_size, stat.st_mtime_ns
        except OSError:
            size, mtime = 0, 0
        key = str(folder.events_path)
        fold = self._kept.get(key)
        if (
            fold is None or size < fold.size or (size == fold.size and mtime != fold.mtime)
        ):  # another record, or a mended one
            fold = self._kept[key] = _Fold(Follower(folder.events_path), RunSnapshot())
        fold.go_on(size, mtime)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_RECORDS:
            self._kept.popitem(last=False)
        return fold.snapshot


@dataclass
class _Fold:
    """`size` and `mtime` of the record when it was read last."""

    follower: Follower
    snapshot: RunSnapshot
    size: int = -1
    mtime: int = -1

    def go_on(self, size: int, mtime: int) -> None:
        """Read what has come since; nothing where the record is as it was."""
        if (self.size, self.mtime) != (size, mtime):
            catch_up(self.snapshot, self.follower)
            self.size, self.mtime = size, mtime


def by_dotted_name(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name; lists are leaves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= (
            by_dotted_name(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return leaves
