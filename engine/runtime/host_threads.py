"""The threads of this file run kernels on chunks of host planes.

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

CHUNK = 1 << 20
"""A worker takes this many elements at once: some milliseconds of work, and a multiple of every
vector width.
"""
SHARE = 1 << 18
"""A kernel that takes its chunks itself, without the interpreter's lock, takes this many elements
at once.
"""

MAX_THREADS = 32
"""More threads than these gain nothing: host memory is saturated by then."""
FREE_CORES = 2
"""On a machine of eight cores and more, this many are left to the threads that launch the device's
work.
"""


def default_threads() -> int:
    """Returns the number of threads that work on planes: the cores that this process may use, but
    for two where there are many.
    """
    cores = usable_cores()
    if cores >= 4 * FREE_CORES:
        cores -= FREE_CORES
    return min(cores, MAX_THREADS)


class Workers:
    """A `Workers` object owns threads that work through a list of chunks. With one thread, the
    caller does the work itself.
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
        # Asking for the error waits for the thread. All must be done before one error is raised,
        # since the caller may free the planes then.
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
    """Works through the chunks that are still waiting; several threads do so at the same time."""
    while True:
        try:
            chunk = waiting.popleft()  # atomic, so that no chunk is taken twice
        except IndexError:
            return
        try:
            task(*chunk)
        except BaseException:
            waiting.clear()  # the other threads stop after the chunk that they are at
            raise


def ranges(start: int, stop: int, size: int = CHUNK) -> list[tuple[int, int]]:
    """Returns ``(start, stop)`` pairs of at most `size` elements that cover a range in order."""
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]
