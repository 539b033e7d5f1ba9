"""Long work that the app does besides a run, such as an export or loading weights to talk to: each
in a thread, with progress to ask for and a way to end it.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.words import in_bytes, in_time
from engine.errors import RamstreamError, RunError

KEPT_JOBS = 50
SHOWN = ("id", "title", "about", "state", "done", "total", "text", "result", "error")
LIKELY_SECONDS = 1.0
"""Before so much of a stage has gone by, nothing is said of the time that is left."""
GIVE_UP_SECONDS = 5
"""How long a server that ends waits for its jobs to clean up."""
BYTES = "bytes"


class Cancelled(Exception):
    """Raised inside a job by a request to cancel it."""


@dataclass
class Job:
    """`state` is working, done, failed or cancelled. `text` says what is being done; `result` and
    `error` are sentences. `about` is the id of the run that it is of, if it is of one; `unit` is
    what progress is counted in: bytes, or nothing that has a name.
    """

    id: int
    title: str
    about: str = ""
    unit: str = ""
    state: str = "working"
    done: float = 0
    total: float = 0
    text: str = ""
    result: str = ""
    error: str = ""
    _begun: float = field(default_factory=time.monotonic, repr=False)
    """When the stage under way began."""
    _cancel: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, work: Callable[[Job], str]) -> None:
        """Do `work`, whose sentence is the result, and tell how it ended; nothing is raised."""
        try:
            self.result = work(self)
            self.state = "done"
        except Cancelled:
            self.result, self.state = f"{self.title} was cancelled.", "cancelled"
        except RamstreamError as error:
            self.error, self.state = str(error), "failed"
        except Exception as error:
            traceback.print_exc()
            self.error = (
                f"{self.title} failed by a fault of the program ({type(error).__name__}: {error})."
            )
            self.state = "failed"

    def stage(self, text: str, unit: str = "") -> None:
        """From here on `text` is done, of which nothing is done yet."""
        self.text, self.unit, self.done, self.total = text, unit, 0, 0
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        """What is being done from here on, within the stage under way."""
        self.text = text

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Callback for the engine; another `text` than before begins another stage. Raises
        Cancelled once the job is to end.
        """
        self.check()
        if text and text != self.text:
            self.stage(text, self.unit)
        self.done, self.total = done, total

    def cancel(self) -> None:
        """Ask it to end, from any thread; it does so where it next looks. Nothing happens to one
        that is over.
        """
        self._cancel.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancel.is_set()

    def check(self) -> None:
        """Raises Cancelled once the job is to end."""
        if self.is_cancelled:
            raise Cancelled

    def seconds_left(self) -> float | None:
        """Of the stage under way, if it goes on as it went so far; None where that is not known."""
        spent = time.monotonic() - self._begun
        if self.state != "working" or self.done <= 0 or self.total <= 0 or spent < LIKELY_SECONDS:
            return None
        return spent * max(0.0, self.total - self.done) / self.done

    def to_dict(self) -> dict[str, Any]:
        """As JSON; `words` and `left` say in words how much is done and how long the rest will
        take.
        """
        left = self.seconds_left()
        return {name: getattr(self, name) for name in SHOWN} | {
            "words": self._words(),
            "left": "" if left is None else f"about {in_time(max(1, left))} left",
            "cancelling": self.state == "working" and self.is_cancelled,
        }

    def _words(self) -> str:
        if not self.total:
            return ""
        if self.unit == BYTES:
            return f"{in_bytes(self.done)} of {in_bytes(self.total)}"
        return f"{100 * min(1.0, self.done / self.total):.0f} %"


class Jobs:
    """One job at a time, since each may hold a whole model in memory; the latest ones can be asked
    for.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[Job] = deque(maxlen=KEPT_JOBS)
        self._worker: threading.Thread | None = None
        """Of the latest job."""
        self._lock = threading.Lock()

    def start(self, title: str, work: Callable[[Job], str], about: str = "", unit: str = "") -> Job:
        """Run `work(job)` in a thread; what it returns is the result. Raises RunError while another
        job is at work, and where the system gives no thread.
        """
        with self._lock:
            busy = next((job for job in self._recent if job.state == "working"), None)
            if busy is not None:
                raise RunError(f"{busy.title} is still under way; try again when it is done.")
            job = Job(next(self._numbers), title, about, unit)
            worker = threading.Thread(
                target=job.run, args=(work,), name=f"job-{job.id}", daemon=True
            )
            try:
                worker.start()
            except RuntimeError:  # the system gives no further thread
                raise RunError(
                    f"{title} cannot be started: the system allows this program no further thread. "
                    "End other programs and try again."
                ) from None
            self._recent.append(job)
            self._worker = worker
        return job

    def working(self) -> list[Job]:
        """Those that are under way."""
        with self._lock:
            return [job for job in self._recent if job.state == "working"]

    def close(self) -> None:
        """Cancel what is under way and wait a little for it to clean up."""
        for job in self.working():
            job.cancel()
        if self._worker is not None:
            self._worker.join(GIVE_UP_SECONDS)

    def find(self, number: int) -> Job | None:
        with self._lock:
            return next((job for job in self._recent if job.id == number), None)
