"""Folders that the command line names, which a person may browse for data.

Nothing outside of them is listed: no path leads out of a folder, and neither does a link. They are
a help to find data, not a fence around them: a person may type any path that the server can read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.data.sources.kinds import is_data
from engine.errors import RamstreamError, RunError

MOST_ENTRIES = 1000
"""Largest number of entries that a folder shows; the others are counted."""
_NO_PLACE = (OSError, ValueError, RuntimeError)
"""Errors of pathlib for a path that leads nowhere: RuntimeError for links that go round in a
circle, and ValueError for a zero byte.
"""


@dataclass(frozen=True)
class FolderListing:
    """What a person may choose in one folder."""

    path: Path
    folders: list[str]
    """Names of the folders in it."""
    files: list[tuple[str, int]]
    """Names of the data files in it, and their sizes in bytes."""
    left_out: int
    """Number of entries that are not shown, since there are too many."""


@dataclass(frozen=True)
class DataFolders:
    """Folders that can be browsed."""

    roots: tuple[Path, ...] = ()

    @classmethod
    def named(cls, paths: Sequence[Path]) -> DataFolders:
        """Returns the folders that the command line names. Raises RamstreamError for a path that
        is no folder.
        """
        for path in paths:
            if not path.is_dir():
                raise RamstreamError(
                    f"--data-folder {path}: this is not a folder that can be read; name another."
                )
        return cls(tuple(dict.fromkeys(path.resolve() for path in paths)))

    def listing(self, number: int | None, below: str) -> FolderListing:
        """Returns what is in the folder `below` the root `number`; `below` is a path with slashes,
        empty for the root itself.

        Raises RunError if there is no such folder, if it is outside of the root, and if it cannot
        be read.
        """
        if number is None or not 0 <= number < len(self.roots):
            raise RunError("There is no such data folder; reload the page.")
        root = self.roots[number]
        place = root
        if below:
            if any(part in ("", ".", "..") for part in below.split("/")):
                raise RunError("This is no path below the data folder; choose one of those shown.")
            place = root / below
        try:
            if not _is_inside(place, root):
                raise RunError("This leads out of the data folder; choose one of those shown.")
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name.casefold())
        except _NO_PLACE as error:
            why = getattr(error, "strerror", None) or "no such path is possible"
            raise RunError(f"{below or root} cannot be read ({why}); choose another.") from None
        return _chosen(place, root, entries)


def _chosen(place: Path, root: Path, entries: list[os.DirEntry[str]]) -> FolderListing:
    folders: list[str] = []
    files: list[tuple[str, int]] = []
    left_out = 0
    for entry in entries:
        path = place / entry.name
        if entry.name.startswith(".") or not _can_be_chosen(path, root):
            continue
        if len(folders) + len(files) == MOST_ENTRIES:
            left_out += 1
        elif path.is_dir():
            folders.append(entry.name)
        else:
            files.append((entry.name, path.stat().st_size))
    return FolderListing(place, folders, files, left_out)


def _can_be_chosen(path: Path, root: Path) -> bool:
    """Returns whether a path is a folder or a data file that no link leads out of `root`."""
    try:
        path.name.encode()  # a name that is no text can stand in no answer and in no preset
        is_wanted = path.is_dir() or (path.is_file() and is_data(path))
        return is_wanted and _is_inside(path, root)
    except _NO_PLACE:  # such as a broken link, or one that goes round in a circle
        return False


def _is_inside(path: Path, root: Path) -> bool:
    """Returns whether a path, with every link followed, is `root` or below it. Raises OSError if
    there is no such path.
    """
    return path.resolve(strict=True).is_relative_to(root)
