"""A run ends where its folder vanishes: nothing that it writes could be found again.

A person may delete or rename the folder, or unmount its disk. The files that are open can still be
written then, so that no write fails.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def is_lost(path: Path, descriptor: int) -> bool:
    """Returns whether the open file `descriptor` is no longer the one at `path`.

    This takes a few microseconds. A disk that does not answer tells nothing about that.
    """
    try:
        return not os.path.samestat(path.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        return error.errno == errno.ESTALE


def lost_in_words(folder: Path) -> str:
    """Returns one sentence for a run whose folder vanished while it was running."""
    return (
        f"The run's folder {folder} is gone: it was deleted or renamed, or its disk was unmounted; "
        "put it back and resume the run, or start a new one."
    )
