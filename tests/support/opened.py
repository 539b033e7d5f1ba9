"""Which files this process opens outside of a folder."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_watching: list[tuple[Path, list[str]]] = []
_LIBRARIES = (sys.prefix, sys.base_prefix, "/proc/", "/dev/null")


def _hook(event: str, arguments: tuple) -> None:
    if event == "open" and _watching and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        for folder, found in list(_watching):
            # Names without a slash are opened in a folder that was opened before.
            named = Path(os.path.normpath(path))
            is_inside = named.is_relative_to(folder) or folder.is_relative_to(named)
            if "/" in path and not is_inside and not path.startswith(_LIBRARIES):
                found.append(path)


_installed: list[bool] = []


@contextlib.contextmanager
def opened_outside(folder: Path) -> Iterator[list[str]]:
    """Yields a list that gets the paths of files that are opened and not in `folder`, but for those
    of libraries and the folders above it.
    """
    if not _installed:  # a hook cannot be removed
        sys.addaudithook(_hook)
        _installed.append(True)
    found: list[str] = []
    _watching.append((folder, found))
    try:
        yield found
    finally:
        _watching.remove((folder, found))
