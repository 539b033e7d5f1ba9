"""The wait of a run that lacks disk space for a checkpoint."""

from __future__ import annotations

import time

from engine.errors import DiskFullError
from engine.files import disk_free
from engine.text import in_gib

POLL_SECONDS = 2.0
"""Seconds between two checks of the disk by a waiting run."""
AGAIN_SECONDS = 30.0
"""Seconds until the next attempt if the disk seems to have space but the checkpoint could not be
written, because of a quota or because other programs write as well.
"""


class DiskSpaceWatch:
    """A wait, from its creation on, for the space that `lacks` reports as missing."""

    def __init__(self, lacks: DiskFullError):
        self._lacks = lacks
        self._began = self._polled = time.monotonic()
        self._seemed_enough = lacks.free >= lacks.needed

    @property
    def seconds(self) -> float:
        """Seconds since the watch was created."""
        return time.monotonic() - self._began

    @property
    def is_new(self) -> bool:
        """Whether the wait began so recently that nobody can have noticed it yet."""
        return self.seconds < POLL_SECONDS

    def found(self) -> bool:
        """Returns whether another attempt is worthwhile. This is cheap enough to be called all the
        time.
        """
        if self._seemed_enough:
            return self.seconds >= AGAIN_SECONDS
        if time.monotonic() - self._polled < POLL_SECONDS:
            return False
        self._polled = time.monotonic()
        return disk_free(self._lacks.folder) >= self._lacks.needed


def wait_text(lacks: DiskFullError, step: int, is_stopping: bool) -> str:
    """Returns one sentence on why a run waits and what ends the wait."""
    what = f"the checkpoint of step {step:,} needs {in_gib(lacks.needed)} in {lacks.folder}"
    if lacks.free >= lacks.needed:
        free = "which did not take it"
    else:
        free = f"and {in_gib(lacks.free)} are free"
    then = "the run goes on by itself"
    if is_stopping:
        then = "the run is saved and stops by itself, or stop it again to end it without saving"
    return f"{lacks.full}: {what} {free}; free some disk space and {then}."
