"""The runs of a folder are listed here, and looked through for one that another process runs.

Many pages ask at once and again and again. What was read is kept for a second, and whoever asks
while it is read waits for that reading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from app.session.detached import PROCESS_FILE, DetachedRuns, is_starting
from engine.checkpoints.checkpoint import folders_by_step
from engine.runs.folder import RUN_ID, RunFolder
from engine.runs.listing import RunSummary, list_runs, summarise

LIST_SECONDS = 1.0
"""What was read of the folder is read again after so many seconds."""


@dataclass(frozen=True)
class _Listing:
    """A `_Listing` is the list of runs as it was read at one time."""

    moment: object
    """The list was at this moment when the reading began."""
    read_at: float
    """The reading ended at this monotonic time."""
    runs: list[RunSummary]
    """The newest comes first."""
    can_talk: frozenset[str]
    """The runs of these ids have weights that answer."""

    def is_good_at(self, moment: object) -> bool:
        """Whether nothing has changed since, and the reading is not old."""
        return self.moment is moment and time.monotonic() - self.read_at < LIST_SECONDS


class RunList:
    """A `RunList` reads the runs of one folder. All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, detached: DetachedRuns, active_id: Callable[[], str | None]):
        """`active_id` returns the id of the run that this process is running, or None."""
        self._runs_dir = runs_dir
        self._detached = detached
        self._active_id = active_id
        # Whoever asks while the list is read waits for it, rather than reading every run once more.
        self._reading = threading.Lock()
        self._listing: _Listing | None = None
        self._moment = object()
        """Each change of the folder makes another one, so that a list that was being read meanwhile
        is known to be old.
        """
        self._elsewhere: tuple[float, str | None] = (-LIST_SECONDS, None)
        """These are the monotonic time of the latest `running_elsewhere`, and its answer."""

    # ------------------------------------------------------------------ what is remembered

    def forget(self) -> None:
        """Lets the next question read the folder anew, since a run began or ended."""
        self.forget_listing()
        self._elsewhere = (-LIST_SECONDS, None)

    def forget_listing(self) -> None:
        """Lets the next list be read anew, since something that it shows has changed."""
        self._moment = object()

    # ------------------------------------------------------------------ the list

    def runs(self) -> list[RunSummary]:
        """Returns every run, newest first; they are read again at most once a second."""
        return self._list().runs

    def runs_to_show(self) -> list[tuple[RunSummary, bool]]:
        """Returns every run with whether it has weights to talk to."""
        listing = self._list()
        return [(run, run.id in listing.can_talk) for run in listing.runs]

    def _list(self) -> _Listing:
        with self._reading:
            listing = self._listing
            # Taken before the runs are read: a change from here on makes this list old at once.
            moment = self._moment
            if listing is not None and listing.is_good_at(moment):
                return listing
            found = [self._as_it_is(run) for run in list_runs(self._runs_dir)]
            runs = [run for run in found if run is not None]
            can_talk = frozenset(run.id for run in runs if self._can_talk(run))
            self._listing = _Listing(moment, time.monotonic(), runs, can_talk)
            return self._listing

    def _as_it_is(self, run: RunSummary) -> RunSummary | None:
        """Returns a run with its true state, or None where it was deleted meanwhile.

        A run whose own process is still starting has no lock yet, and looks interrupted. One whose
        process ended before it had the lock has failed.
        """
        folder = RunFolder(Path(run.path))
        if run.state != "interrupted" or not (folder.path / PROCESS_FILE).is_file():
            return run
        if is_starting(folder):
            return replace(run, state="preparing")
        self._detached.settle(folder)
        return summarise(folder)

    def _can_talk(self, run: RunSummary) -> bool:
        """Whether a run has weights that answer: a checkpoint, an export, or its own while it is
        paused here.
        """
        if run.state == "paused" and run.id == self._active_id():
            return True
        folder = RunFolder(Path(run.path))
        try:
            has_export = (folder.export_path / "config.json").exists()
            return has_export or bool(folders_by_step(folder.checkpoints_path))
        except OSError:
            # The run was deleted meanwhile, or is not ours to read. The others are listed all the
            # same.
            return False

    # ------------------------------------------------------------------ runs of other processes

    def running_elsewhere(self) -> str | None:
        """Returns the id of a run that another process holds or is about to hold. The folder is
        looked through at each call, since Start depends on the answer.
        """
        found = None
        for folder in self._folders():
            if folder.is_running() or is_starting(folder):
                found = folder.id
                break
        self._elsewhere = (time.monotonic(), found)
        return found

    def running_elsewhere_lately(self) -> str | None:
        """Returns the answer of `running_elsewhere`, which may be a second old."""
        looked_at, run_id = self._elsewhere
        if time.monotonic() - looked_at >= LIST_SECONDS:
            return self.running_elsewhere()
        return run_id

    def _folders(self) -> list[RunFolder]:
        """Returns the run folders. The newest come first, as they are likeliest to be going on."""
        try:
            names = [
                path.name
                for path in self._runs_dir.iterdir()
                if RUN_ID.fullmatch(path.name) and path.is_dir()
            ]
        except OSError:
            return []
        return [RunFolder(self._runs_dir / name) for name in sorted(names, reverse=True)]
