"""`StagingBuffers` holds copies of chunks of planes that were not written yet when their update
began.

It is mapped and touched once, when a run is prepared, and has exactly the bytes that the fit report
set aside for it. So the memory of a run does not grow when the first checkpoint is written, and no
update waits for the system to find pages.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from engine.planning.fit.checkpoint_sizes import STAGING_CHUNK_BYTES

CHUNK_BYTES = STAGING_CHUNK_BYTES
"""Planes are written, copied, read and hashed in chunks of this many bytes, which are whole pages.
"""


class StagingBuffers:
    """A `StagingBuffers` of `nbytes` bytes lends room for one chunk at a time, each of
    `CHUNK_BYTES`.

    Any thread may call `take` and `give`: a list takes and gives its last entry at once. The last
    room may be smaller than a chunk, and is not used then.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._map: mmap.mmap | None = None
        self._free: list[memoryview] = []
        if nbytes < CHUNK_BYTES:
            self.nbytes = 0
            return
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            # Where the kernel lacks one of these, copies take longer, and nothing else changes.
            with contextlib.suppress(OSError):
                self._map.madvise(advice)
        np.frombuffer(self._map, np.uint8).fill(0)  # from now on the system has given the memory
        whole = memoryview(self._map)
        self._free = [
            whole[begin : begin + CHUNK_BYTES]
            for begin in range(0, nbytes - CHUNK_BYTES + 1, CHUNK_BYTES)
        ]

    def take(self) -> memoryview | None:
        """Returns room for a chunk, or None where there is none."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, room: memoryview) -> None:
        """Takes room back. `room` is a whole view that `take` returned."""
        self._free.append(room)

    def close(self) -> None:
        """Frees the memory. No copy may be in use."""
        self._free.clear()
        if self._map is not None:
            # A view that is still alive keeps the memory; the system frees it with the view.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
