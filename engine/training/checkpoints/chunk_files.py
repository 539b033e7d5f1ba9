"""A `ChunkFile` is a file of a checkpoint that several threads write, chunk by chunk.

Whole pages go to the disk directly, past the page cache (``O_DIRECT``). Dirty pages of the cache
would count against the same memory limit as the planes, and the kernel would stop training while it
writes them back. It is also faster: nothing is copied on the way. What is left, less than a page at
a plane's end, goes through the cache. Where the file system refuses direct writes, everything does;
each chunk is then synced and dropped from the cache before its thread writes the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.progress import Progress

# ---------------------------------------------------------------------- threads

# Several threads read or write a checkpoint, and tell one progress callback how far they are.


THREADS = 4


class Meter:
    """A meter adds up the bytes from all threads for one progress callback."""

    def __init__(self, total: int, progress: Progress):
        self._stopped = False
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds `count` bytes that a thread has written or read.

        Raises what the callback raises, and RuntimeError once the meter has been stopped.
        """
        # The callback is called under the lock, because only one thread at a time may call it.
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped, since another thread failed")
            self._done += count
            self._progress(self._done, self._total)

    def stop(self) -> None:
        """Makes the next `add` of every thread raise, which ends its task."""
        self._stopped = True


def in_threads(tasks: Sequence[Callable[[], Any]], meter: Meter) -> list[Any]:
    """Returns the results of all tasks, in order.

    The first exception is raised. The other tasks end soon, because their meter is stopped.
    """
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
        futures: list[Future] = [pool.submit(task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            meter.stop()
            for future in futures:
                future.cancel()
            raise


# ---------------------------------------------------------------------- chunk files


PAGE = 4096
"""Direct writes begin and end at multiples of this many bytes, in memory and in the file."""


class ChunkFile:
    """A `ChunkFile` is created by its constructor and must be closed. Any thread may write.

    run: no link is followed below this folder.
    """

    def __init__(self, path: Path, run: Path):
        self._cached = safe_files.create(path, run)
        self._direct: int | None = None
        # Some file systems, such as older versions of tmpfs, have no direct writes. The file is
        # opened again by its descriptor, since its name may lead elsewhere by now.
        with contextlib.suppress(OSError):
            again = f"/proc/self/fd/{self._cached}"
            self._direct = os.open(again, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, content: memoryview, offset: int) -> None:
        """Writes `content` to the bytes from `offset` on. Raises OSError.

        No two writes may share a page, unless neither begins at a page's start.
        """
        done = 0
        if self._direct is not None and offset % PAGE == 0:
            done = self._write_direct(content[: len(content) // PAGE * PAGE], offset)
        rest = content[done:]
        if not rest:
            return
        begin = offset + done
        _write_all(self._cached, rest, begin)
        if len(rest) >= PAGE:
            # Only pages that are on the disk can be dropped from the page cache.
            os.fdatasync(self._cached)
            os.posix_fadvise(self._cached, begin, len(rest), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Waits until all that was written is on the disk, and closes the file. Raises OSError."""
        try:
            os.fsync(self._cached)
            os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file without waiting for the disk. May be called twice."""
        for descriptor in (self._cached, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._cached, self._direct = -1, None

    def _write_direct(self, content: memoryview, offset: int) -> int:
        """Writes whole pages directly, and returns how many bytes the system took that way."""
        done = 0
        while done < len(content) and done % PAGE == 0 and self._direct is not None:
            try:
                done += os.pwrite(self._direct, content[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system takes the flag but not the write. The descriptor stays open until
                # the end, because another thread may be using it.
                break
        return done // PAGE * PAGE


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # a write may be partial
        count = os.pwrite(descriptor, content, offset)
        content = content[count:]
        offset += count
