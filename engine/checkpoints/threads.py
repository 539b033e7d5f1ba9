"""Several threads read or write a checkpoint, and tell one progress callback how far they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from engine.progress import Progress

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
