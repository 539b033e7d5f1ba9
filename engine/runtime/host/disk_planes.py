"""`DiskPlanes` holds the moments of some units on the disk. A step moves them chunk by chunk
through ring buffers on the host. Checkpoints read and fill them by their bytes, as they do planes
in RAM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from engine.config.optimizers import Optimizer
from engine.planning.layout.disk_chunks import PAGE, DiskChunk, disk_chunks, whole_pages
from engine.planning.layout.layout import UnitLayout
from engine.runtime.host.disk_file import DiskFile
from engine.runtime.host.mapped_memory import map_memory
from engine.runtime.host.ram_planes import Key


class DiskPlanes:
    """Owns one file for each unit, in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, DiskFile] = {}
        self._chunks: dict[str, dict[int, DiskChunk]] = {}
        """Chunks of each unit, by the element that they begin at."""
        self.written_bytes = 0
        """Bytes that the updates of steps have written. One lane counts them."""
        self.written_block_input_bytes = 0
        """Bytes of block inputs that steps and dry runs have written, to a file beside these. The
        same lane counts them.
        """

    def count_block_input(self, nbytes: int) -> None:
        """Counts a block input of `nbytes` bytes that was written."""
        self.written_block_input_bytes += nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.nbytes for file in self._files.values())

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        return all(file.is_direct for file in self._files.values())

    def __contains__(self, unit: str) -> bool:
        return unit in self._files

    def allocate(self, layouts: Iterable[UnitLayout], optimizer: Optimizer) -> None:
        """Allocates zeroed moments of these units. Raises DiskOffloadError where the disk has no
        space for them; then none is taken.
        """
        made: list[str] = []
        try:
            for layout in layouts:
                chunks = disk_chunks(layout, optimizer)
                end = chunks[-1].file_end if chunks else 0
                self._files[layout.unit] = DiskFile(self.folder, end)
                made.append(layout.unit)
                self._chunks[layout.unit] = {chunk.start: chunk for chunk in chunks}
        except BaseException:
            self.release(made)
            raise

    def release(self, units: Iterable[str]) -> None:
        """Frees the space of these units. No op may be running on them."""
        for unit in units:
            self._files.pop(unit).close()
            self._chunks.pop(unit, None)

    # ------------------------------------------------------------------ chunks

    def read_chunk(self, unit: str, start: int, ring: memoryview) -> None:
        """Reads all states of the chunk that begins at element `start` into a ring buffer."""
        chunk = self._chunks[unit][start]
        self._files[unit].read(ring[: chunk.rooms], chunk.offset)

    def write_chunk(self, unit: str, start: int, ring: memoryview) -> None:
        """Writes all states of that chunk from a ring buffer."""
        chunk = self._chunks[unit][start]
        self._files[unit].write(ring[: chunk.rooms], chunk.offset)
        self.written_bytes += chunk.rooms

    def states_in(self, unit: str, start: int, ring: memoryview) -> tuple[np.ndarray, ...]:
        """Returns each state of that chunk in a ring buffer, uint8 [bytes] each, sharing its
        memory.
        """
        chunk = self._chunks[unit][start]
        memory = np.frombuffer(ring, np.uint8)
        places = (number * chunk.room for number in range(len(chunk.planes)))
        return tuple(memory[place : place + chunk.bytes] for place in places)

    # ------------------------------------------------------------------ bytes of a plane

    def read(self, key: Key, begin: int, end: int) -> np.ndarray:
        """Returns a copy of the bytes between two places of a plane, uint8 [bytes]."""
        content = np.empty(end - begin, np.uint8)
        for first, last, offset in self._parts(key, begin, end):
            pages, skip = self._pages(key[0], offset, last - first)
            content[first - begin : last - begin] = pages[skip : skip + last - first]
        return content

    def write(self, key: Key, begin: int, content: np.ndarray) -> None:
        """Writes `content`, uint8 [bytes], from the byte `begin` of a plane on. The rest of the
        pages that it begins and ends in is kept, so no two threads may write to one page.
        """
        for first, last, offset in self._parts(key, begin, begin + content.size):
            pages, skip = self._pages(key[0], offset, last - first)
            pages[skip : skip + last - first] = content[first - begin : last - begin]
            self._files[key[0]].write(pages.data, offset - skip)

    def _parts(self, key: Key, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the parts of a range of a plane that are in one chunk each: where they begin and
        end in the plane, and where they begin in the file.
        """
        unit, plane = key
        for chunk in self._chunks[unit].values():
            first, last = max(begin, chunk.begin), min(end, chunk.end)
            if first < last:
                place = chunk.offset + chunk.planes.index(plane) * chunk.room
                yield first, last, place + first - chunk.begin

    def _pages(self, unit: str, offset: int, size: int) -> tuple[np.ndarray, int]:
        """Returns a copy of the whole pages of a file around `size` bytes from `offset` on, uint8
        [bytes], and the place of these bytes in it.
        """
        skip = offset % PAGE
        pages = np.frombuffer(map_memory(whole_pages(skip + size)), np.uint8)
        self._files[unit].read(pages.data, offset - skip)
        return pages, skip
