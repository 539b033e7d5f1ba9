"""Bytes of planes pass between two processes of a node through memory that both have mapped.
Through a pipe they would be copied five times, at a few hundred megabytes a second.
"""

from __future__ import annotations

import functools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.runtime.host.shared_memory import OwnedMemory

CHUNK_BYTES = 64 << 20
_KEY = ("buffer", "buffer")


@dataclass(frozen=True)
class InSharedBuffer:
    """The first `size` bytes of the buffer in the file `path`."""

    path: str
    inode: int
    """Inode, which tells the file from an earlier one whose path may have been the same."""
    size: int

    def content(self) -> np.ndarray:
        """Returns the bytes, uint8 [size], in the memory that is shared."""
        return _opened(self.path, self.inode)[: self.size]


class SharedBuffer:
    """Memory that this process owns. One exchange of bytes at a time may use it."""

    def __init__(self) -> None:
        memory = OwnedMemory()
        self.content = np.frombuffer(memory.map(_KEY, CHUNK_BYTES), np.uint8)
        """The memory, uint8 [CHUNK_BYTES]."""
        self._memory = memory
        self._path = memory.planes.path(_KEY)
        self._inode = Path(self._path).stat().st_ino

    def first(self, size: int) -> InSharedBuffer:
        """Returns how another process finds the first `size` bytes."""
        return InSharedBuffer(self._path, self._inode, size)

    def put(self, content: np.ndarray) -> InSharedBuffer:
        """Copies `content`, uint8 [bytes], to the beginning. Returns how another process finds
        it.
        """
        self.content[: content.size] = content
        return self.first(content.size)

    def close(self) -> None:
        """Lets go of the memory, which lasts for as long as another process has mapped it."""
        self.content = self.content[:0]
        self._memory.forget(_KEY)


@functools.cache
def _opened(path: str, inode: int) -> np.ndarray:  # noqa: ARG001  a part of the cache's key
    """Returns the buffer of another process, which stays mapped for as long as this one runs."""
    file = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(file, CHUNK_BYTES, flags=mmap.MAP_SHARED), np.uint8)
    finally:
        os.close(file)
