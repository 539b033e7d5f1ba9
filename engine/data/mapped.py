"""A value a token, in files: mapped, read piece by piece, and put into another order without a
copy.

Pages of a mapped file are the kernel's to drop; a pass over all of them gives them back as it goes,
so that a data set larger than memory takes none.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PIECE = 1 << 20
_PAGES_KEPT = 4
"""Pieces whose pages may be in memory at once during a pass."""


def mapped(path: Path, dtype: type) -> np.ndarray:
    """The numbers in the file at `path`, read-only."""
    if path.stat().st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    # As a plain array, of which a slice takes a tenth of the time: a step takes thousands.
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


class Visits:
    """Documents of several sources in the order in which an epoch visits them: 18 bytes a document."""

    def __init__(self, which: np.ndarray, begins: np.ndarray, starts: np.ndarray):
        self.which = which
        """uint16[documents]: the source of each document."""
        self.begins = begins
        """int64[documents]: where its tokens begin there."""
        self.starts = starts
        """int64[documents + 1]: where they begin among all visited."""

    def of(self, arrays: list[np.ndarray]) -> Visited:
        """One array (a value a token) of each source as one array of the visits."""
        return Visited(self, arrays)


class Visited:
    """An array in the order of visits. Slices are numpy arrays; nothing else is ever made whole."""

    def __init__(self, visits: Visits, arrays: list[np.ndarray]):
        self._visits, self.arrays = visits, arrays

    def __len__(self) -> int:
        return int(self._visits.starts[-1])

    def __getitem__(self, wanted: slice) -> np.ndarray:
        visits = self._visits
        begin, end, _ = wanted.indices(len(self))
        document = int(np.searchsorted(visits.starts, begin, "right")) - 1
        found = []
        while begin < end:
            first = int(visits.begins[document] + begin - visits.starts[document])
            until = min(end, int(visits.starts[document + 1]))
            found.append(self.arrays[visits.which[document]][first : first + until - begin])
            begin, document = until, document + 1
        return np.concatenate(found) if found else np.empty(0, self.arrays[0].dtype)


def pieces(array: np.ndarray | Visited) -> Iterator[np.ndarray]:
    """`array` from its start to its end, a piece at a time; pages of files are dropped behind it."""
    for number, begin in enumerate(range(0, len(array), _PIECE), 1):
        yield array[begin : begin + _PIECE]
        if number % _PAGES_KEPT == 0:
            drop_pages(array)
    drop_pages(array)


def drop_pages(array: np.ndarray | Visited) -> None:
    """Give the pages of a mapped array back; whoever reads it again maps them again."""
    for part in array.arrays if isinstance(array, Visited) else [array]:
        while isinstance(part, np.ndarray):
            part = part.base
        if isinstance(part, mmap.mmap):
            part.madvise(mmap.MADV_DONTNEED)
