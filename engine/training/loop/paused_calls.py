"""Work of other threads on a paused run.

The run's own thread does the work while it waits. So there are no races, and the run then continues
as if nothing had been done. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import RunError

if TYPE_CHECKING:
    from engine.training.loop.prepare import Prepared

T = TypeVar("T")

GOES_ON = "The run is not paused any more; pause it to use its weights."


class PausedCalls:
    """Calls that a paused run takes; open while it is paused.

    `opened` and `serve` are for the run's thread; the other methods are for any other thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[Prepared], Any], Future]] = (
            queue.SimpleQueue()
        )
        self._when_over: dict[str, Callable[[], None]] = {}
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def do(self, work: Callable[[Prepared], T]) -> T:
        """Calls `work(prepared)` on the run's thread; returns its result or raises its exception.

        The work must be short: requests to the run wait for it, as they do for a step. Raises
        RunError if the run is not paused, or continues before it reached this work.
        """
        answer: Future = Future()
        with self._lock:
            if not self._open:
                raise RunError(GOES_ON)
            self._calls.put((work, answer))
        return answer.result()

    def when_over(self, name: str, act: Callable[[], None]) -> None:
        """Arranges for `act` to be called once, on the run's thread, before the run continues or
        ends.

        It replaces an earlier `act` with the same `name`. Raises RunError if the run is not paused.
        """
        with self._lock:
            if not self._open:
                raise RunError(GOES_ON)
            self._when_over[name] = act

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with self._lock:
            self._open = True
        try:
            yield
        finally:
            with self._lock:
                self._open = False
                acts = list(self._when_over.values())
                self._when_over = {}
            # Nothing can be added to the queue any more; every caller still waiting in it gets an
            # answer.
            while not self._calls.empty():
                self._calls.get()[1].set_exception(RunError(GOES_ON))
            for act in acts:
                act()

    def serve(self, prepared: Prepared, seconds: float) -> None:
        """Does the next call; returns after it, or after `seconds` without any."""
        try:
            work, answer = self._calls.get(timeout=seconds)
        except queue.Empty:
            return
        try:
            answer.set_result(work(prepared))
        except BaseException as error:  # noqa: BLE001
            # The error is raised in the calling thread, and the run does not end. Draining clears
            # what the failed work left in the lanes.
            with contextlib.suppress(Exception):
                prepared.engine.drain()
            answer.set_exception(error)
