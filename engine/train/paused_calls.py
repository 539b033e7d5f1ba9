"""Other threads can have work done on a paused run through `PausedCalls`.

The run's own thread does the work while it waits. So nothing races, and the run goes on afterwards
as if nobody had asked. No torch is imported.
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
    from engine.train.prepare import Prepared

T = TypeVar("T")

GOES_ON = "The run is not paused any more; pause it to talk to its weights."


class PausedCalls:
    """A `PausedCalls` is open while its run is paused.

    `opened` and `serve` are for the run's thread, the rest is for any other thread.
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
        """Calls `work(prepared)` on the run's thread; returns or raises what it returns or raises.

        The work must be short: requests to the run wait for it, as they do for a step. Raises
        RunError where the run is not paused, or goes on before it came to this work.
        """
        answer: Future = Future()
        with self._lock:
            if not self._open:
                raise RunError(GOES_ON)
            self._calls.put((work, answer))
        return answer.result()

    def when_over(self, name: str, act: Callable[[], None]) -> None:
        """Has `act` called once, on the run's thread, before the run goes on or ends.

        It replaces what was asked for before under the same `name`. Raises RunError where the run
        is not paused.
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
            # Nobody can add to the queue any more; whoever still waits in it gets an answer.
            while not self._calls.empty():
                self._calls.get()[1].set_exception(RunError(GOES_ON))
            for act in acts:
                act()

    def serve(self, prepared: Prepared, seconds: float) -> None:
        """Does the next piece of work; returns after it, or after `seconds` without any."""
        try:
            work, answer = self._calls.get(timeout=seconds)
        except queue.Empty:
            return
        try:
            answer.set_result(work(prepared))
        except BaseException as error:  # noqa: BLE001  the asker gets it; the run does not end
            # Draining clears what the failed work left in the lanes.
            with contextlib.suppress(Exception):
                prepared.engine.drain()
            answer.set_exception(error)
