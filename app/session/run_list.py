"""The runs of a folder, and the run that another process is running.

Many pages request the list again and again. The list is cached for a second, and requests that
arrive during a read wait for its result. A read takes a run as it was before if nothing in its
folder has changed, so that a list of a thousand runs costs little.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.session.detached import PROCESS_FILE, DetachedRuns, is_starting
from app.session.run_scans import RunScans
from app.shared.run_row import NOT_SCANNED, RunScan, Weights
from app.shared.run_table import ORDERS, Asked, ListedRun, found_runs
from engine import safe_files
from engine.runs.record.following import EVENTS_FILE
from engine.runs.record.run_folder import LOCK_FILE, RunFolder
from engine.runs.summaries.listing import (
    RunSummary,
    run_ids,
    summarize,
    unreadable,
    unreadable_text,
)
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, saved_steps

NO_WEIGHTS = Weights(can_chat=False, saved=NOTHING_SAVED)
LIST_SECONDS = 1.0
"""Age in seconds from which the folder is read again."""


@dataclass(frozen=True)
class RunsToShow:
    """Answer to what a page asked for."""

    every: list[ListedRun]
    """All runs of the folder, the newest first."""
    found: int
    """Number of runs that are asked for."""
    shown: list[ListedRun]
    """The first of those, in the order that was asked for."""
    is_complete: bool
    """Whether each of these runs, and of those that had to be sorted, was scanned."""


@dataclass(frozen=True)
class _Entry:
    """One run, and the state of its folder when it was read."""

    folder: RunFolder
    state: _FolderState
    """State of the folder. Two equal states give the same run, unless it `is_starting`."""
    run: RunSummary
    weights: Weights
    is_starting: bool
    """Whether the run has a process of its own that has not written a record yet."""


@dataclass(frozen=True)
class _FolderState:
    """Changes with anything that the list shows of a run."""

    stamps: tuple[tuple[str, int, int, int], ...]
    """Name, size, modification time and inode of everything in the folder."""
    is_running: bool
    """Whether a process holds the run's lock."""
    may_be_starting: bool
    """Whether the run was given a process of its own, and its record is no newer."""


@dataclass(frozen=True)
class _Listing:
    """List of runs as read at one time."""

    moment: object
    """Change marker when the read began."""
    read_at: float
    """Monotonic time at which the read ended."""
    runs: list[RunSummary]
    """Runs, the newest first."""
    entries: dict[str, _Entry]
    """Runs by their ids, as they were found in their folders."""

    def is_good_at(self, moment: object) -> bool:
        """Returns whether nothing has changed since the read, and the read is recent."""
        return self.moment is moment and time.monotonic() - self.read_at < LIST_SECONDS


class RunList:
    """Lists the runs of one folder. All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, detached: DetachedRuns, active_id: Callable[[], str | None]):
        """`active_id` returns the id of the run that this process is running, or None."""
        self._runs_dir = runs_dir
        self._detached = detached
        self._active_id = active_id
        # Requests that arrive while the list is read wait for it, rather than each reading every
        # run again.
        self._reading = threading.Lock()
        self._listing: _Listing | None = None
        self._scans = RunScans(runs_dir)
        self._moment = object()
        """Marker that each change of the folder replaces, so that a list whose read was in progress
        is known to be outdated.
        """

    # ------------------------------------------------------------------ what is remembered

    def forget(self) -> None:
        """Makes the next request read the folder again, since something that the list shows has
        changed.
        """
        self._moment = object()

    # ------------------------------------------------------------------ the list

    def runs(self) -> list[RunSummary]:
        """Returns every run, newest first; the folder is read at most once a second."""
        return self._list().runs

    def runs_to_show(self, asked: Asked) -> RunsToShow:
        """Returns the runs that a page asks for. What takes longer to find out about them is in a
        later answer.
        """
        entries = self._list().entries
        every = self._with_scans(entries.values())
        found = found_runs(every, asked)
        shown = [listed.run.id for listed in found[: asked.limit]]
        sorted_by_scans = entries if ORDERS[asked.sort].needs_scans else ()
        is_complete = self._scans.ask(dict.fromkeys([*shown, *sorted_by_scans]))
        return RunsToShow(every, len(found), found[: asked.limit], is_complete)

    def scans(self, runs: Sequence[RunSummary]) -> tuple[dict[str, RunScan], bool]:
        """Returns what is known of these runs, and whether each was scanned. The others, and those
        that have finished since, are scanned for a later answer.
        """
        run_ids = [run.id for run in runs]
        finished = [run.id for run in runs if run.state == "finished"]
        is_complete = self._scans.ask(run_ids, finished)
        return self._scans.known(run_ids), is_complete

    def _with_scans(self, entries: Iterable[_Entry]) -> list[ListedRun]:
        listed = list(entries)
        scans = self._scans.known(entry.run.id for entry in listed)
        return [
            ListedRun(entry.run, entry.weights, scans.get(entry.run.id, NOT_SCANNED))
            for entry in listed
        ]

    def _list(self) -> _Listing:
        with self._reading:
            listing = self._listing
            # This is taken before the runs are read, so that a change during the read makes this
            # list outdated.
            moment = self._moment
            if listing is not None and listing.is_good_at(moment):
                return listing
            before = {} if listing is None else listing.entries
            found = [self._found(run_id, before.get(run_id)) for run_id in self._run_ids()]
            entries = sorted(
                (entry for entry in found if entry is not None),
                key=lambda entry: (entry.run.created, entry.run.id),
                reverse=True,
            )
            self._listing = _Listing(
                moment,
                time.monotonic(),
                [entry.run for entry in entries],
                {entry.run.id: entry for entry in entries},
            )
            self._scans.forget_others(self._listing.entries)
            return self._listing

    def _found(self, run_id: str, before: _Entry | None) -> _Entry | None:
        """Returns `_entry`, or the run as unreadable if a fault in this program keeps it from being
        shown: the other runs are shown all the same.
        """
        try:
            return self._entry(run_id, before)
        except Exception as error:  # noqa: BLE001  whatever the fault is
            traceback.print_exc()
            folder = RunFolder(self._runs_dir / run_id)
            state, run = (
                _FolderState((), False, True),
                unreadable(folder, unreadable_text(folder, error)),
            )
            return None if run is None else _Entry(folder, state, run, NO_WEIGHTS, False)

    def _entry(self, run_id: str, before: _Entry | None) -> _Entry | None:
        """Returns the run with this id, or None if it was deleted meanwhile. `before` is the run as
        the last read found it.
        """
        folder = RunFolder(self._runs_dir / run_id) if before is None else before.folder
        state = _state_of(folder)
        starts = state.may_be_starting and is_starting(folder)
        is_same = before is not None and before.state == state and not state.may_be_starting
        # A run of this process is paused and continues without a sign in its folder.
        if before is not None and is_same and run_id != self._active_id():
            return before
        summary = summarize(folder)
        run = None if summary is None else self._as_it_is(summary, starts)
        return None if run is None else _Entry(folder, state, run, self._weights_of(run), starts)

    def _as_it_is(self, run: RunSummary, starts: bool) -> RunSummary | None:
        """Returns a run with its true state, or None if it was deleted meanwhile.

        While a run's own process is still starting, it holds no lock yet, so the run looks
        interrupted, or as it ended before. If the process ended before it took the lock, the run
        has failed.
        """
        folder = RunFolder(Path(run.path))
        if starts:
            return replace(run, state="preparing")
        if run.state != "interrupted":
            return run
        if is_starting(folder):
            return replace(run, state="preparing")
        # The page of the run records it. A list writes nothing.
        reason = self._detached.why_it_failed(folder)
        if reason is not None:
            return replace(run, state="failed", reason=reason)
        # It may have begun to record meanwhile.
        return summarize(folder)

    def _weights_of(self, run: RunSummary) -> Weights:
        folder = RunFolder(Path(run.path))
        saved = saved_steps(folder.checkpoints_path, folder.best_path)
        is_paused_here = run.state == "paused" and run.id == self._active_id()
        return Weights(
            can_chat=is_paused_here or saved.trained_on is not None or _has_export(folder),
            saved=saved,
            has_export=folder.has_export,
        )

    # ------------------------------------------------------------------ runs of other processes

    def running_elsewhere(self) -> str | None:
        """Returns the id of a run whose lock another process holds or is about to take. Each call
        searches the folder, since Start depends on the result.
        """
        for run_id in self._run_ids():
            folder = RunFolder(self._runs_dir / run_id)
            if folder.is_running() or is_starting(folder):
                return run_id
        return None

    def running_elsewhere_lately(self) -> str | None:
        """Returns the result of `running_elsewhere`, which may be a second old."""
        for run_id, entry in self._list().entries.items():
            if entry.state.is_running or entry.is_starting:
                return run_id
        return None

    def _run_ids(self) -> list[str]:
        """Returns the ids of all runs, the newest first, as they are likeliest to be running."""
        try:
            return sorted(run_ids(self._runs_dir), reverse=True)
        except OSError:
            return []


def _state_of(folder: RunFolder) -> _FolderState:
    """Returns the state of a run's folder, which has no stamps if the folder cannot be read."""
    stamps: list[tuple[str, int, int, int]] = []
    with contextlib.suppress(OSError):
        for name, stat in safe_files.entries(folder.path, folder.root).items():
            stamps.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    written = {name: time for name, _, time, _ in stamps}
    sizes = {name: size for name, size, *_ in stamps}
    is_new = not sizes.get(EVENTS_FILE)
    has_process = PROCESS_FILE in sizes and (
        is_new or written[PROCESS_FILE] >= written[EVENTS_FILE]
    )
    is_running = LOCK_FILE in sizes and folder.is_running()
    return _FolderState(tuple(sorted(stamps)), is_running, has_process)


def _has_export(folder: RunFolder) -> bool:
    return safe_files.is_file(folder.export_path / "config.json", folder.root)
