"""Kernels run here in several threads, on chunks of host planes.

A kernel is serial and releases the interpreter's lock (the GIL), so several threads run it at the
same time. The bounds of the chunks are fixed, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.machine.cgroups import usable_cores
from engine.machine.update_threads import threads_of

CHUNK = 1 << 20
"""A worker takes this many elements at once. They are a few milliseconds of work, and a multiple of
every vector width.
"""
SHARE = 1 << 18
"""A kernel that takes its chunks itself, without the interpreter's lock, takes this many elements
at once.
"""


def default_threads() -> int:
    """Returns the number of threads that work on planes: the cores that this process may use, less
    two on a machine with eight or more.
    """
    return threads_of(usable_cores())


class Workers:
    """A `Workers` object owns threads that work through a list of chunks. With one thread, the
    calling thread does the work itself.
    """

    def __init__(self, threads: int | None, name: str):
        self.threads = default_threads() if threads is None else max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        if self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=name)

    def run(self, task: Callable[..., None], chunks: Iterable[tuple]) -> None:
        """Calls ``task(*chunk)`` for every chunk and returns when all are done. Raises the first
        error.
        """
        waiting = deque(chunks)
        if self._pool is None or len(waiting) == 1:
            _drain(task, waiting)
            return
        count = min(self.threads, len(waiting))
        futures = [self._pool.submit(_drain, task, waiting) for _ in range(count)]
        # `exception` waits for the thread. All threads must have ended before an error is raised,
        # since the caller may then free the planes.
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def share(self, kernel: Callable[..., None], numel: int, *arguments: Any) -> None:
        """Calls ``kernel(counter, SHARE, *arguments)`` in every thread, for `numel` elements.

        Such a kernel takes its chunks from `counter` (int64 [1]) itself, by an atomic addition. So
        no thread waits for the interpreter's lock between two chunks.
        """
        counter = np.zeros(1, np.int64)
        shares = -(-numel // SHARE)
        self.run(kernel, [(counter, SHARE, *arguments)] * min(self.threads, shares))

    def close(self) -> None:
        """Ends the threads once their work is done."""
        if self._pool is not None:
            self._pool.shutdown()


def _drain(task: Callable[..., None], waiting: deque) -> None:
    """Runs the task on the chunks that are still waiting; several threads do so at the same
    time.
    """
    while True:
        try:
            chunk = waiting.popleft()  # atomic, so that no chunk is taken twice
        except IndexError:
            return
        try:
            task(*chunk)
        except BaseException:
            waiting.clear()  # the other threads stop after their current chunk
            raise


def ranges(start: int, stop: int, size: int = CHUNK) -> list[tuple[int, int]]:
    """Returns ``(start, stop)`` pairs of at most `size` elements that cover a range in order."""
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
