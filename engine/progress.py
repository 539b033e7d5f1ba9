"""How far long work is, told to whoever asked for it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called, from one thread at a time, with what is done, what there is in all (0 where nobody
    knows) and what is being done. What it raises gives the work up.
    """

    def __call__(self, done: float, total: float, message: str = "", /) -> None: ...


def untold(done: float, total: float, message: str = "") -> None:
    """Progress that nobody follows."""


def saying(progress: Progress, message: str) -> Progress:
    """The same for work that does not say what it does."""
    return lambda done, total, _="": progress(done, total, message)
