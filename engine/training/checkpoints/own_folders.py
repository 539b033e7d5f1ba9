"""A run keeps its weights in folders of its own: `checkpoints`, `best` and `export`.

It replaces and deletes what is in them. So none of them, and no checkpoint, may be a link, through
which that would happen elsewhere: a run folder may come from a stranger. The folder of all runs may
be one.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from engine import safe_files
from engine.errors import CheckpointError
from engine.runs.record.run_folder import RunFolder
from engine.training.checkpoints.manifest import step_in


def refuse_links(run: RunFolder) -> None:
    """Raises CheckpointError where a folder of a run into which its weights are written is a link,
    or a checkpoint is one. A run deletes what is there, and would do so elsewhere.
    """
    for folder in (run.checkpoints_path, run.best_path, run.export_path):
        refuse_other_kind(folder)
    for root in (run.checkpoints_path, run.best_path):
        for sentence in linked_steps(root):
            raise CheckpointError(sentence)


def refuse_other_kind(folder: Path) -> None:
    """Raises CheckpointError where `folder`, of a run, is a link or anything but a folder. Nothing
    is wrong where there is nothing.
    """
    try:
        found = safe_files.lstat(folder, folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}).") from None
    if found is None or stat.S_ISDIR(found.st_mode):
        return
    what = "is not a folder; move it away"
    if stat.S_ISLNK(found.st_mode):
        what = (
            f"is a link to {folder.readlink()}, and a run keeps and deletes weights in its own "
            "folder alone; put the folder itself there. To keep runs on another disk, link the "
            "folder of all runs, or name it with --runs-dir"
        )
    raise CheckpointError(f"{folder} {what}.")


def linked_steps(root: Path) -> list[str]:
    """Returns a sentence for each name of a checkpoint in `root` that is a link: none of these
    counts. Raises OSError where `root` cannot be read.
    """
    told = []
    with contextlib.suppress(FileNotFoundError):
        for name, found in safe_files.entries(root, root.parent).items():
            if step_in(name) is not None and stat.S_ISLNK(found.st_mode):
                try:
                    refuse_other_kind(root / name)
                except CheckpointError as error:
                    told.append(str(error))
    return told
