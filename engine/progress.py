"""Long work reports its progress through a `Progress`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A function that is called with the amount done, the total (0 if unknown), and a message on
    what is being done.

    It is called from one thread at a time. If it raises an exception, the work ends.
    """

    def __call__(self, done: float, total: float, message: str = "", /) -> None: ...


def no_progress(done: float, total: float, message: str = "") -> None:
    """Ignores the progress, for work that nobody follows."""


def labeled(progress: Progress, message: str) -> Progress:
    """Returns a `Progress` that calls `progress` with `message` instead of the work's own."""
    return lambda done, total, _="": progress(done, total, message)
