"""`saved_steps` tells which weights of a run are on the disk, without verifying any file.

It is cheap enough to be asked once a second for every run of a list. `saved_best` also tells how
good the best weights were.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from engine import safe_files
from engine.config.export_choice import ExportFrom
from engine.runs.record.validation import Score
from engine.training.checkpoints.checkpoint import HOLDS, folders_by_step
from engine.training.checkpoints.manifest import MANIFEST, MOST_BYTES, Count, run_of

_HEAD_BYTES = 512
"""The manifest says within its first bytes what the checkpoint holds; the checksums follow."""
_WEIGHTS_ALONE = f'"{HOLDS}": "weights"'.encode()


@dataclass(frozen=True)
class SavedSteps:
    """`SavedSteps` is what a run has on the disk: its newest checkpoints by their steps."""

    newest: int | None = None
    """Step of the newest checkpoint, which can be exported, chatted with and trained on from."""
    full: int | None = None
    """The newest full checkpoint is of this step: a resume goes on from it."""
    best: int | None = None
    """The best weights are kept beside the checkpoints, and are of this step."""

    @property
    def is_weights_alone(self) -> bool:
        """Returns whether there are checkpoints, but none that a resume could go on from."""
        return self.newest is not None and self.full is None

    @property
    def trained_on(self) -> int | None:
        """Returns the step of the weights from which a new run starts: those of the newest
        checkpoint, or else the best. None if there are none.
        """
        return self.best if self.newest is None else self.newest

    def exported(self, export_from: ExportFrom) -> int | None:
        """Returns the step of the weights that an export takes, and that Chat offers first: the
        best where they are kept and `output.export_from` asks for them, or else as `trained_on`.
        """
        is_best = export_from == "best" and self.best is not None
        return self.best if is_best else self.trained_on


NOTHING_SAVED = SavedSteps()


def saved_steps(root: Path, best: Path | None = None) -> SavedSteps:
    """Returns the checkpoints in `root` and the best weights in the folder `best`; none if a folder
    cannot be read.
    """
    try:
        found = folders_by_step(root)
        kept = {} if best is None else folders_by_step(best)
    except OSError:
        return NOTHING_SAVED
    full = (step for step in sorted(found, reverse=True) if not _holds_weights_alone(found[step]))
    return SavedSteps(max(found, default=None), next(full, None), max(kept, default=None))


class _Kept(Struct):
    loss: float
    correct: Count = 0
    total: Count = 0


class _Best(Struct):
    state: _Kept


def saved_best(root: Path) -> Score | None:
    """Returns the score of the best weights that are kept in `root`, or None if there are none or
    they cannot be read.
    """
    try:
        kept = folders_by_step(root)
        if not kept:
            return None
        path = kept[max(kept)]
        told = safe_files.read_json(path / MANIFEST, run_of(path), _Best, MOST_BYTES).state
        return Score(max(kept), told.loss, told.correct, told.total)
    except OSError:
        return None


def _holds_weights_alone(path: Path) -> bool:
    """Tells what a checkpoint says that it holds. One that cannot be read counts as full: whoever
    resumes from it is told what is wrong with it.
    """
    try:
        with safe_files.open_to_read(path / MANIFEST, run_of(path)) as file:
            return _WEIGHTS_ALONE in file.read(_HEAD_BYTES)
    except OSError:
        return False
