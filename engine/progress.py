"""Long work tells how far it is through a `Progress`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A `Progress` is called with what is done, the total (0 where nobody knows it), and words for
    what is being done.

    The calls come from one thread at a time. An exception that it raises ends the work.
    """

    def __call__(self, done: float, total: float, message: str = "", /) -> None: ...


def untold(done: float, total: float, message: str = "") -> None:
    """Ignores the progress; it is for work that nobody follows."""


def saying(progress: Progress, message: str) -> Progress:
    """Returns a `Progress` that passes `message` on in place of the work's own words."""
    return lambda done, total, _="": progress(done, total, message)
