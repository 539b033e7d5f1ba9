"""These small parts of a snapshot are plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A `Job` is long work in progress; `started` and `time` are the times of its first and its
    latest record.
    """

    job: str
    done: float
    total: float
    message: str
    started: float
    time: float


@dataclass(frozen=True)
class LogEntry:
    """The run reported `text` when the wall clock told the Unix time `time`."""

    time: float
    level: str
    text: str
