"""`saved_steps` tells which checkpoints of a run are on the disk, without verifying any file.

It is cheap enough to be asked once a second for every run of a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.checkpoint import HOLDS, MANIFEST, folders_by_step

_HEAD_BYTES = 512
"""The manifest says within its first bytes what the checkpoint holds; the checksums follow."""
_WEIGHTS_ALONE = f'"{HOLDS}": "weights"'.encode()


@dataclass(frozen=True)
class SavedSteps:
    """`SavedSteps` is what a run has on the disk: its newest checkpoints by their steps."""

    newest: int | None = None
    """The newest checkpoint is of this step: it can be exported, talked to and trained on from."""
    full: int | None = None
    """The newest full checkpoint is of this step: a resume goes on from it."""

    @property
    def is_weights_alone(self) -> bool:
        """Returns whether there are checkpoints, but none that a resume could go on from."""
        return self.newest is not None and self.full is None


NOTHING_SAVED = SavedSteps()


def saved_steps(root: Path) -> SavedSteps:
    """Returns the checkpoints in `root`; none if the folder cannot be read."""
    try:
        found = folders_by_step(root)
    except OSError:
        return NOTHING_SAVED
    full = (step for step in sorted(found, reverse=True) if not _holds_weights_alone(found[step]))
    return SavedSteps(max(found, default=None), next(full, None))


def _holds_weights_alone(path: Path) -> bool:
    """Tells what a checkpoint says that it holds. One that cannot be read counts as full: whoever
    resumes from it is told what is wrong with it.
    """
    try:
        with (path / MANIFEST).open("rb") as file:
            return _WEIGHTS_ALONE in file.read(_HEAD_BYTES)
    except OSError:
        return False
