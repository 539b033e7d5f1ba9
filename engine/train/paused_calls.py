"""Work of other threads on a paused run, done by the run's own thread while it waits: so nothing
races, and the run goes on afterwards as if nobody had asked. No torch.
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
    """Open while a run is paused. `opened` and `serve` are for the run's thread, the rest for any
    other.
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
        """`work(prepared)` on the run's thread, and what it returns or raises. It must be short:
        the run's requests wait for it, as they do for a step. Raises RunError where the run is not
        paused, or goes on before it came to this.
        """
        answer: Future = Future()
        with self._lock:
            if not self._open:
                raise RunError(GOES_ON)
            self._calls.put((work, answer))
        return answer.result()

    def when_over(self, name: str, act: Callable[[], None]) -> None:
        """Call `act`, once and on the run's thread, before the run goes on or ends; what `name`
        asked for before is forgotten. Raises RunError where the run is not paused.
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
                acts, self._when_over = list(self._when_over.values()), {}
            while not self._calls.empty():
                self._calls.get()[1].set_exception(RunError(GOES_ON))
            for act in acts:
                act()

    def serve(self, prepared: Prepared, seconds: float) -> None:
        """Do the next thing that is asked for; return after it, or after `seconds` without."""
        try:
            work, answer = self._calls.get(timeout=seconds)
        except queue.Empty:
            return
        try:
            answer.set_result(work(prepared))
        except BaseException as error:  # the asker's to tell: a run does not end for an answer
            with contextlib.suppress(Exception):  # nor do its lanes stay broken for one
                prepared.engine.drain()
            answer.set_exception(error)
