"""Things in the place of a file that are no file of this program."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("a pipe", "a folder", "a link", "a link to itself", "a terabyte")


def put(path: Path, kind: str, outside: Path) -> None:
    """Puts a thing of this kind at `path`. A link leads to `outside`."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "a link":
        path.symlink_to(outside)
    elif kind == "a link to itself":
        path.symlink_to(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
