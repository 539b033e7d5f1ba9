"""One attempt at a run: its settings, folder and record, shared by everything that works for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config.settings import TrainConfig
from engine.runs.record.events import JobProgressed, LogLine
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runtime.distributed.launched_group import LaunchedGroup

_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Session:
    """One attempt at a run, from its start or resume until it ends.

    `config` is the configuration with which it begins.
    """

    config: TrainConfig
    folder: RunFolder
    recorder: RunRecorder
    launched_group: LaunchedGroup | None = None
    """Processes of `torchrun` that compute the run together with this one; None where this one
    starts others itself.
    """

    @property
    def nodes(self) -> int:
        """Number of nodes that compute the run."""
        return 1 if self.launched_group is None else self.launched_group.place.nodes

    def progress(self, job: str, check: Callable[[], None] | None = None) -> RecordedProgress:
        """Returns a `Progress` that records the progress of `job` and calls `check` each time."""
        return RecordedProgress(self.recorder, job, check)

    def log(self, level: str, text: str) -> None:
        """Adds a line of the run's log to the record."""
        self.recorder.emit(LogLine(level, text))


class RecordedProgress:
    """Records the progress of one job, at most twice a second, and always at the end of the job."""

    def __init__(self, recorder: RunRecorder, job: str, check: Callable[[], None] | None = None):
        self._recorder = recorder
        self._job = job
        self._check = check
        self._last = 0.0

    def __call__(self, done: float, total: float, message: str = "") -> None:
        if self._check is not None:
            self._check()
        now = time.monotonic()
        if now - self._last >= _REPORT_SECONDS or done >= total:
            self._last = now
            self._recorder.emit(JobProgressed(self._job, done, total, message))
