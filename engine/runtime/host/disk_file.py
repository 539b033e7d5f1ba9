"""A file of moments or of saved block inputs in the folder `engine.disk`.

- It has no name. So the system frees its space when the process ends, however it ends: no crash
  and no kill leaves anything behind, and nobody removes it by mistake.
- Its space is reserved when it is made. So a disk that is too small is found before training.
- Reads and writes go past the page cache (``O_DIRECT``), where the file system allows that: pages
  of the cache would take the RAM that the file is there to save. They begin and end at whole pages
  (`engine.planning.layout.disk_chunks.PAGE`), in memory and in the file.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from engine.errors import DiskOffloadError
from engine.files import FULL, disk_full_text, nameless_file


class DiskFile:
    """File of `nbytes` bytes in `folder`, which read as zeros at first. Any thread may read and
    write. what: the file's content, in words. Raises DiskOffloadError where the system refuses.
    """

    def __init__(self, folder: Path, nbytes: int, what: str = "moments"):
        self._folder = folder
        self._what = what
        self.nbytes = nbytes
        self.is_direct = True
        """Reads and writes go past the page cache."""
        self._descriptor = -1
        self._closing: weakref.finalize | None = None
        try:
            self._descriptor = self._opened()
            # An engine whose construction fails later frees its files, too.
            self._closing = weakref.finalize(self, os.close, self._descriptor)
            if nbytes:
                self._reserve()
        except OSError as error:
            self.close()
            raise self._error("be reserved", error) from error

    def read(self, memory: memoryview, offset: int) -> None:
        """Fills `memory` with the bytes from `offset` on. Raises DiskOffloadError."""
        self._transfer(memory, offset, os.preadv, "be read")

    def write(self, memory: memoryview, offset: int) -> None:
        """Writes `memory` to the bytes from `offset` on. Raises DiskOffloadError."""
        self._transfer(memory, offset, os.pwritev, "be written")

    def close(self) -> None:
        """Frees the space of the file. May be called twice."""
        self._descriptor = -1
        if self._closing is not None:
            self._closing()

    # ------------------------------------------------------------------ inside

    def _opened(self) -> int:
        """Returns the descriptor of a new file without a name."""
        try:
            return nameless_file(self._folder, os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        self.is_direct = False
        return nameless_file(self._folder)

    def _reserve(self) -> None:
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
            return
        except OSError as error:
            if not self.is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        # Where a file system cannot reserve space, the C library writes a byte to each of its
        # blocks, which is no whole page.
        cached = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR)
        try:
            os.posix_fallocate(cached, 0, self.nbytes)
        finally:
            os.close(cached)

    def _transfer(
        self, memory: memoryview, offset: int, move: Callable[..., int], what: str
    ) -> None:
        done = 0
        try:
            while done < len(memory):
                # Neither call holds the interpreter's lock.
                count = move(self._descriptor, [memory[done:]], offset + done)
                if not count:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count
        except OSError as error:
            raise self._error(what, error) from error

    def _error(self, what: str, error: OSError) -> DiskOffloadError:
        where = f"{self._what} that engine.disk keeps in {self._folder}"
        if error.errno in FULL:
            return DiskOffloadError(
                f"{disk_full_text(error)}: {where} cannot {what}; free some of its space, or "
                "name another folder."
            )
        return DiskOffloadError(
            f"{where[0].upper()}{where[1:]} cannot {what} ({error.strerror}); check that disk, or "
            "name another folder."
        )
