"""Space on the disk for a checkpoint: what a run says while it waits for some, and when it is worth
trying again.
"""

from __future__ import annotations

import time

from engine.errors import DiskFullError
from engine.files import disk_free
from engine.words import in_gib

LOOK_SECONDS = 2.0
AGAIN_SECONDS = 30.0
"""Between two tries where the disk seems to have the space and did not take it: under a quota, or
where others write too.
"""


class DiskSpaceWatch:
    """Looks, from now on, for the space that `lacks` asks for."""

    def __init__(self, lacks: DiskFullError):
        self._lacks = lacks
        self._began = self._looked = time.monotonic()
        self._seemed_enough = lacks.free >= lacks.needed

    @property
    def seconds(self) -> float:
        """Since it began to look."""
        return time.monotonic() - self._began

    @property
    def is_new(self) -> bool:
        """Whether nobody can have read yet that it looks."""
        return self.seconds < LOOK_SECONDS

    def found(self) -> bool:
        """Whether writing is worth another try; cheap enough to be asked all the time."""
        if self._seemed_enough:
            return self.seconds >= AGAIN_SECONDS
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return disk_free(self._lacks.folder) >= self._lacks.needed


def wait_in_words(lacks: DiskFullError, step: int, is_stopping: bool) -> str:
    """Why a run waits, and what ends that, in one sentence."""
    what = f"the checkpoint of step {step:,} needs {in_gib(lacks.needed)} in {lacks.folder}"
    free = (
        "which did not take it"
        if lacks.free >= lacks.needed
        else f"and {in_gib(lacks.free)} are free"
    )
    then = (
        "the run is saved and stops by itself, or stop it again to end it without saving"
        if is_stopping
        else "the run goes on by itself"
    )
    return f"{lacks.full}: {what} {free}; free some disk space and {then}."
