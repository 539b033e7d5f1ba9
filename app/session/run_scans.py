"""Reads the small curves of the list of runs in the background, so that the list itself is there at
once.

A scan is made again when its record has grown, and a size after a while.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from app.shared.run_row import RunScan
from app.verdict.judge import verdict
from app.verdict.outcome import Outcome, outcome
from engine import safe_files
from engine.errors import RunError
from engine.files import bytes_in
from engine.runs.record.following import EVENTS_FILE, replay
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import RESULTS_FILE
from engine.runs.summaries.evaluation_results import EVALUATIONS_FILE
from engine.runs.summaries.evaluation_summary import read_summary
from engine.runs.summaries.sparkline import Sparkline, read_sparkline

GROWN_SECONDS = 5.0
"""Age in seconds from which the scan of a record that grows is repeated."""
SIZE_SECONDS = 60.0
"""Age in seconds from which the size of a folder is measured again."""


@dataclass(frozen=True)
class _Kept:
    """A scan, and the state of the run's folder at the time."""

    scan: RunScan
    record: tuple[int, ...]
    """Sizes and modification times of what was read."""
    read_at: float
    """Monotonic time at which the record was read."""
    sized_at: float
    """Monotonic time at which the folder was measured."""


class RunScans:
    """Keeps a scan of each run of a folder. All methods may be called from any thread.

    One thread reads them. It exists only while there is something to read.
    """

    def __init__(self, runs_dir: Path):
        self._runs_dir = runs_dir
        # This lock guards every field below.
        self._change = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._wanted: dict[str, None] = {}
        """Ids of the runs to scan, in order."""
        self._thread: threading.Thread | None = None

    def known(self, run_ids: Iterable[str]) -> dict[str, RunScan]:
        """Returns the newest scan of each of these runs, as far as there is one."""
        with self._change:
            return {run_id: self._kept[run_id].scan for run_id in run_ids if run_id in self._kept}

    def ask(self, run_ids: Iterable[str], finished: Collection[str] = ()) -> bool:
        """Has these runs scanned, the first ones first, if what is known of them may be outdated.
        Returns whether there is a scan of each of them. Those that are `finished` are scanned at
        once, and a scan from before their end is forgotten: it knows no outcome.
        """
        now = time.monotonic()
        with self._change:
            for run_id in finished:
                kept = self._kept.get(run_id)
                if kept is not None and kept.record != self._state_of(run_id):
                    del self._kept[run_id]
            outdated = [run_id for run_id in run_ids if self._may_be_outdated(run_id, now)]
            unknown = [run_id for run_id in outdated if run_id not in self._kept]
            self._wanted = dict.fromkeys([*unknown, *outdated])
            if self._wanted and self._thread is None:
                thread = threading.Thread(target=self._scan_all, name="run-scans", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread is left; the next request tries
                    thread.start()
                    self._thread = thread
            return not unknown

    def forget_others(self, run_ids: Iterable[str]) -> None:
        """Forgets every run but these, since the others are gone."""
        left = set(run_ids)
        with self._change:
            self._kept = {run_id: kept for run_id, kept in self._kept.items() if run_id in left}

    def _may_be_outdated(self, run_id: str, now: float) -> bool:
        kept = self._kept.get(run_id)
        if kept is None or now - kept.sized_at >= SIZE_SECONDS:
            return True
        return now - kept.read_at >= GROWN_SECONDS and kept.record != self._state_of(run_id)

    def _state_of(self, run_id: str) -> tuple[int, ...]:
        """Returns the sizes and the modification times of a run's record and of its evaluations;
        zeros for what is not there.
        """
        state: list[int] = []
        for name in (EVENTS_FILE, EVALUATIONS_FILE, RESULTS_FILE):
            stat = None
            with contextlib.suppress(OSError):
                stat = safe_files.lstat(self._runs_dir / run_id / name, self._runs_dir)
            state += (0, 0) if stat is None else (stat.st_size, stat.st_mtime_ns)
        return tuple(state)

    def _scan_all(self) -> None:
        """Scans the wanted runs one after the other; the thread runs this."""
        while True:
            with self._change:
                run_id = next(iter(self._wanted), None)
                if run_id is None:
                    # This is under the same lock as the check, so that a run that is asked for
                    # later finds no thread and starts one.
                    self._thread = None
                    return
                before = self._kept.get(run_id)
            began = time.monotonic()
            found = self._scanned(run_id, before)
            with self._change:
                self._wanted.pop(run_id, None)
                self._kept[run_id] = found
            # The thread takes at most half of a core, since a run may be training beside it.
            time.sleep(min(0.5, time.monotonic() - began))

    def _scanned(self, run_id: str, before: _Kept | None) -> _Kept:
        folder = RunFolder(self._runs_dir / run_id)
        state, now = self._state_of(run_id), time.monotonic()
        is_same = before is not None and before.record == state
        if before and is_same:
            if now - before.sized_at < SIZE_SECONDS:
                return _Kept(before.scan, state, now, before.sized_at)
            scan = replace(before.scan, folder_bytes=bytes_in(folder.path))
        else:
            scan = scanned(folder)
        return _Kept(scan, state, now, now)


def scanned(folder: RunFolder) -> RunScan:
    """Returns a new scan of a run."""
    sparkline = read_sparkline(folder.events_path)
    return RunScan(
        sparkline,
        bytes_in(folder.path),
        read_summary(folder.path),
        _outcome(folder.events_path, sparkline),
    )


def _outcome(path: Path, sparkline: Sparkline) -> Outcome | None:
    """Returns what came of a run that has finished, where that is known. As for its page, that is
    judged by the whole record.
    """
    if not sparkline.is_over:
        return None
    snapshot = RunSnapshot()
    try:
        for record in replay(path):
            snapshot.apply(record)
        is_finished = snapshot.state == "finished"
        return outcome(snapshot, verdict(snapshot, "finished")) if is_finished else None
    except (ArithmeticError, AttributeError, LookupError, RunError, TypeError, ValueError):
        return None  # its row says what is wrong with the record
