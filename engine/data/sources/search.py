"""The search of a folder for files, within limits: it may be a whole disk, or link to itself."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.data.sources.reading import reason
from engine.errors import DataError

MOST_ENTRIES = 100_000
MOST_SECONDS = 5.0


def files_under(
    folder: Path, is_wanted: Callable[[Path], bool], hidden: tuple[str, ...] = ()
) -> list[Path]:
    """Returns those files in a folder and in the folders under it whose names are wanted, sorted.
    Names that begin with one of `hidden` are passed over. Links to folders are followed, but no
    folder is searched twice. Raises DataError for a folder that may not be read, for a link that
    leads nowhere, and for too many entries.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    folders = [folder]
    links: list[Path] = []  # they come last, so that a folder is found under its own name
    entries = _counted(folder)
    while folders or links:
        current = folders.pop() if folders else links.pop()
        for entry in _entries(current, seen):
            next(entries)
            path = current / entry.name
            if entry.name.startswith(hidden):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif _leads_to_folder(entry):
                links.append(path)
            elif is_wanted(path):
                _refuse_broken_link(path)
                found.append(path)
    return sorted(found)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # the link goes round in a circle, or its target may not be looked at
        return False


def _entries(folder: Path, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """Returns what is in a folder, or nothing if it was seen before."""
    try:
        state = folder.stat()
        if (state.st_dev, state.st_ino) in seen:
            return []
        seen.add((state.st_dev, state.st_ino))
        with os.scandir(folder) as found:
            return list(itertools.islice(found, MOST_ENTRIES + 1))
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read ({reason(error)}); check its permissions."
        ) from None


def _counted(folder: Path) -> Iterator[None]:
    """Yields for each entry. Raises DataError when there are too many, or the time is over."""
    deadline = time.monotonic() + MOST_SECONDS
    for _ in range(MOST_ENTRIES):
        yield
        if time.monotonic() > deadline:
            raise DataError(
                f"The folder {folder} could not be searched in {MOST_SECONDS:g} seconds; name a "
                "folder with the data alone."
            )
    raise DataError(
        f"The folder {folder} holds more than {MOST_ENTRIES:,} files and folders; name a folder "
        "with the data alone."
    )


def _refuse_broken_link(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({reason(error)}); mend or remove the link."
        ) from None
