"""A machine that sends a request to stop may soon end the process by force: a container gives ten
seconds. One op of a step on the CPU can take longer, and nothing interrupts it.

So the step before it, which is finished, is written by other threads meanwhile. They take it from
the training loop, which lends it only while it computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

POLL_SECONDS = 0.2
"""Seconds until a request is noticed, at most."""


class EarlySave:
    """A context in which an urgent request makes `begin` save the step that is lent, from a thread
    of its own. `begin` returns whether no more is to be done.
    """

    def __init__(self, is_urgent: Callable[[], bool], begin: Callable[[int], bool]):
        self._is_urgent = is_urgent
        self._begin = begin
        self._lock = threading.Lock()
        self._step = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def lends(self, step: int) -> Generator[None, None, None]:
        """A context in which the planes may hold `step`, and the training loop saves nothing."""
        with self._lock:
            self._step = step
        try:
            yield
        finally:
            with self._lock:  # what was begun is begun whole
                self._step = 0

    def __enter__(self) -> EarlySave:
        self._thread = threading.Thread(target=self._watch, name="early-save", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        is_done = False
        while not is_done and not self._ended.wait(POLL_SECONDS):
            if self._is_urgent():
                with self._lock:
                    try:
                        is_done = self._step > 0 and self._begin(self._step)
                    except Exception:  # noqa: BLE001  the training loop tries again, and reports it
                        is_done = True
