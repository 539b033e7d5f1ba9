"""A `Session` is what everything that works for one run shares: its settings, folder and record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config.settings import TrainConfig
from engine.runs.events import JobProgressed, LogLine
from engine.runs.folder import RunFolder
from engine.runs.recorder import RunRecorder

_TELL_SECONDS = 0.5


@dataclass(frozen=True)
class Session:
    """A session is one attempt at a run, from its start or resume until it ends.

    `config` is the configuration with which it begins.
    """

    config: TrainConfig
    folder: RunFolder
    recorder: RunRecorder

    def progress(self, job: str, check: Callable[[], None] | None = None) -> RecordedProgress:
        """Returns a `Progress` that is recorded as that of `job`; it calls `check` each time."""
        return RecordedProgress(self.recorder, job, check)

    def log(self, level: str, text: str) -> None:
        """Writes a line of the run's log into the record."""
        self.recorder.emit(LogLine(level, text))


class RecordedProgress:
    """A `RecordedProgress` tells the record how far one job is.

    It does so at most twice a second, and always at the end of the job.
    """

    def __init__(self, recorder: RunRecorder, job: str, check: Callable[[], None] | None = None):
        self._recorder = recorder
        self._job = job
        self._check = check
        self._last = 0.0

    def __call__(self, done: float, total: float, message: str = "") -> None:
        if self._check is not None:
            self._check()
        now = time.monotonic()
        if now - self._last >= _TELL_SECONDS or done >= total:
            self._last = now
            self._recorder.emit(JobProgressed(self._job, done, total, message))
