"""The runs of a folder are listed here, and the run that another process is running is found.

Many pages request the list again and again. The list is cached for a second, and requests that
arrive during a read wait for its result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from app.session.detached import PROCESS_FILE, DetachedRuns, is_starting
from app.view.run_row import Weights
from engine.checkpoints.saved_steps import saved_steps
from engine.runs.folder import RUN_ID, RunFolder
from engine.runs.listing import RunSummary, list_runs, summarise

LIST_SECONDS = 1.0
"""The folder is read again once the last read is older than this many seconds."""


@dataclass(frozen=True)
class _Listing:
    """A `_Listing` is the list of runs as read at one time."""

    moment: object
    """This was the current change marker when the read began."""
    read_at: float
    """The read ended at this monotonic time."""
    runs: list[RunSummary]
    """The newest run comes first."""
    weights: dict[str, Weights]
    """These are the weights that each run has, by its id."""

    def is_good_at(self, moment: object) -> bool:
        """Returns whether nothing has changed since the read, and the read is recent."""
        return self.moment is moment and time.monotonic() - self.read_at < LIST_SECONDS


class RunList:
    """A `RunList` lists the runs of one folder. All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, detached: DetachedRuns, active_id: Callable[[], str | None]):
        """`active_id` returns the id of the run that this process is running, or None."""
        self._runs_dir = runs_dir
        self._detached = detached
        self._active_id = active_id
        # Requests that arrive while the list is read wait for it, rather than each reading every
        # run again.
        self._reading = threading.Lock()
        self._listing: _Listing | None = None
        self._moment = object()
        """Each change of the folder replaces this object, so that a list whose read was in progress
        is known to be outdated.
        """
        self._elsewhere: tuple[float, str | None] = (-LIST_SECONDS, None)
        """These are the monotonic time of the latest `running_elsewhere` call, and its result."""

    # ------------------------------------------------------------------ what is remembered

    def forget(self) -> None:
        """Makes the next request read the folder again, since a run began or ended."""
        self.forget_listing()
        self._elsewhere = (-LIST_SECONDS, None)

    def forget_listing(self) -> None:
        """Makes the next request read the list again, since something that it shows has changed."""
        self._moment = object()

    # ------------------------------------------------------------------ the list

    def runs(self) -> list[RunSummary]:
        """Returns every run, newest first; the folder is read at most once a second."""
        return self._list().runs

    def runs_to_show(self) -> list[tuple[RunSummary, Weights]]:
        """Returns every run with the weights that it has."""
        listing = self._list()
        return [(run, listing.weights[run.id]) for run in listing.runs]

    def _list(self) -> _Listing:
        with self._reading:
            listing = self._listing
            # This is taken before the runs are read, so that a change during the read makes this
            # list outdated.
            moment = self._moment
            if listing is not None and listing.is_good_at(moment):
                return listing
            found = [self._as_it_is(run) for run in list_runs(self._runs_dir)]
            runs = [run for run in found if run is not None]
            weights = {run.id: self._weights_of(run) for run in runs}
            self._listing = _Listing(moment, time.monotonic(), runs, weights)
            return self._listing

    def _as_it_is(self, run: RunSummary) -> RunSummary | None:
        """Returns a run with its true state, or None if it was deleted meanwhile.

        While a run's own process is still starting, it holds no lock yet, so the run looks
        interrupted. If the process ended before it took the lock, the run has failed.
        """
        folder = RunFolder(Path(run.path))
        if run.state != "interrupted" or not (folder.path / PROCESS_FILE).is_file():
            return run
        if is_starting(folder):
            return replace(run, state="preparing")
        self._detached.settle(folder)
        return summarise(folder)

    def _weights_of(self, run: RunSummary) -> Weights:
        folder = RunFolder(Path(run.path))
        saved = saved_steps(folder.checkpoints_path)
        is_paused_here = run.state == "paused" and run.id == self._active_id()
        return Weights(
            can_talk=is_paused_here or saved.newest is not None or _has_export(folder),
            saved=saved,
        )

    # ------------------------------------------------------------------ runs of other processes

    def running_elsewhere(self) -> str | None:
        """Returns the id of a run whose lock another process holds or is about to take. Each call
        searches the folder, since Start depends on the result.
        """
        found = None
        for folder in self._folders():
            if folder.is_running() or is_starting(folder):
                found = folder.id
                break
        self._elsewhere = (time.monotonic(), found)
        return found

    def running_elsewhere_lately(self) -> str | None:
        """Returns the result of `running_elsewhere`, which may be a second old."""
        looked_at, run_id = self._elsewhere
        if time.monotonic() - looked_at >= LIST_SECONDS:
            return self.running_elsewhere()
        return run_id

    def _folders(self) -> list[RunFolder]:
        """Returns the run folders. The newest come first, as they are likeliest to be running."""
        try:
            names = [
                path.name
                for path in self._runs_dir.iterdir()
                if RUN_ID.fullmatch(path.name) and path.is_dir()
            ]
        except OSError:
            return []
        return [RunFolder(self._runs_dir / name) for name in sorted(names, reverse=True)]


def _has_export(folder: RunFolder) -> bool:
    try:
        return (folder.export_path / "config.json").exists()
    except OSError:
        # The run was deleted meanwhile, or this process may not read it. The other runs are still
        # listed.
        return False
