"""Arrays with one value per token in files. They are mapped into memory, read chunk by chunk, and
reordered without a copy.

The kernel may drop the pages of a mapped file at any time. A pass over a whole array releases them
as it goes, so that even a data set larger than memory takes almost none.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine import safe_files
from engine.files import new_digest

_CHUNK = 1 << 20
"""Number of values in a chunk."""
_PAGES_KEPT = 4
"""Largest number of chunks whose pages are in memory at once during a pass."""
_BUFFER_BYTES = 1 << 20


class WrittenFile:
    """A file that is written once, with its length and a digest of its content."""

    def __init__(self, path: Path, within: Path, stack: contextlib.ExitStack):
        self.name = path.name
        self.bytes = 0
        self.digest = new_digest()
        descriptor = safe_files.create(path, within)
        self._file = stack.enter_context(os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES))

    def write(self, values: np.ndarray | bytes) -> None:
        if isinstance(values, np.ndarray):
            view = np.ascontiguousarray(values).data
        else:
            view = memoryview(values)
        content = view.cast("B")
        self._file.write(content)
        self.digest.update(content)
        self.bytes += len(content)

    def close(self, synced: bool) -> None:
        self._file.flush()
        if synced:
            os.fsync(self._file.fileno())
        self._file.close()


def mapped(path: Path, within: Path, dtype: type) -> np.ndarray:
    """Returns the numbers in the file at `path`, read-only, with shape [values]. Raises OSError,
    and ValueError for a part of a number.
    """
    with safe_files.open_to_read(path, within, most=1 << 62, buffering=0) as file:
        if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        # Slicing a plain array takes a tenth of the time of slicing a memmap, and a step takes
        # thousands of slices.
        return np.memmap(file, dtype, mode="r").view(np.ndarray)


@dataclass(frozen=True)
class Visits:
    """The order in which an epoch visits the documents of several sources. It takes 18 bytes per
    document.
    """

    which: np.ndarray
    """Source of the document of each visit: uint16[documents]."""
    begins: np.ndarray
    """Index of each document's first token among the tokens of that source: int64[documents]."""
    starts: np.ndarray
    """Index of each document's first token among all visited tokens: int64[documents + 1]."""

    def of(self, arrays: list[np.ndarray]) -> Visited:
        """Returns one array in the order of visits, made from `arrays`, which has one array
        ([tokens]) for each source.
        """
        return Visited(self, arrays)


class Visited:
    """An array in the order of visits. It can only be sliced, and a slice is a numpy array; the
    whole array is never in memory.
    """

    def __init__(self, visits: Visits, arrays: list[np.ndarray]):
        self._visits = visits
        self.arrays = arrays

    def __len__(self) -> int:
        return int(self._visits.starts[-1])

    def __getitem__(self, wanted: slice) -> np.ndarray:
        visits = self._visits
        begin, end, _ = wanted.indices(len(self))
        visit = int(np.searchsorted(visits.starts, begin, "right")) - 1
        found = []
        while begin < end:
            first = int(visits.begins[visit] + begin - visits.starts[visit])
            until = min(end, int(visits.starts[visit + 1]))
            found.append(self.arrays[visits.which[visit]][first : first + until - begin])
            begin = until
            visit += 1
        return np.concatenate(found) if found else np.empty(0, self.arrays[0].dtype)


def chunks(array: np.ndarray | Visited) -> Iterator[np.ndarray]:
    """Yields `array` from start to end in chunks of shape [values], and drops file pages behind
    them.
    """
    for number, begin in enumerate(range(0, len(array), _CHUNK), 1):
        yield array[begin : begin + _CHUNK]
        if number % _PAGES_KEPT == 0:
            drop_pages(array)
    drop_pages(array)


def drop_pages(array: np.ndarray | Visited) -> None:
    """Releases the pages of a mapped array ([values]) to the kernel. Reading the array again loads
    them again.
    """
    for part in array.arrays if isinstance(array, Visited) else [array]:
        owner = _owner_of(part)
        if isinstance(owner, mmap.mmap):
            owner.madvise(mmap.MADV_DONTNEED)


def _owner_of(array: np.ndarray) -> Any:
    """Returns the owner of the memory that `array` is a view of: a mapped file, or None for memory
    allocated by numpy.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner
