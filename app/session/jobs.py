"""Jobs are long work that the app does besides a run, such as an export or loading weights to talk
to. Each has a thread of its own, shows its progress, and can be cancelled.
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
"""The time that is left is told only after this many seconds of a stage."""
GIVE_UP_SECONDS = 5
"""A server that ends waits this many seconds for its jobs to clean up."""
BYTES = "bytes"


class Cancelled(Exception):
    """A request to cancel a job raises this inside of it."""


@dataclass
class Job:
    """A `Job` is one piece of long work with its progress and its end.

    The job's thread writes the fields, and any thread may read them: each write replaces one value,
    so a reader needs no lock.
    """

    id: int
    title: str
    about: str = ""
    """This is the id of the run that the job is about; it may be empty."""
    unit: str = ""
    """Progress is counted in this unit: bytes, or something that has no name."""
    state: str = "working"
    """The state is working, done, failed or cancelled."""
    done: float = 0
    total: float = 0
    text: str = ""
    """The text says what is being done."""
    result: str = ""
    """This sentence says what the job has done."""
    error: str = ""
    """This sentence says why the job failed."""
    _begun: float = field(default_factory=time.monotonic, repr=False)
    """The stage under way began at this monotonic time."""
    _cancel: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, work: Callable[[Job], str]) -> None:
        """Does `work`, whose sentence is the result, and notes how it ended. It raises nothing.

        `state` is always set last: whoever reads that the job is over also finds its result or
        error.
        """
        try:
            self.result = work(self)
            self.state = "done"
        except Cancelled:
            self.result = f"{self.title} was cancelled."
            self.state = "cancelled"
        except RamstreamError as error:
            self.error = str(error)
            self.state = "failed"
        except Exception as error:  # noqa: BLE001  a fault of the program is told on the page
            traceback.print_exc()
            self.error = (
                f"{self.title} failed by a fault of the program ({type(error).__name__}: {error})."
            )
            self.state = "failed"

    def stage(self, text: str, unit: str = "") -> None:
        """Begins a stage, of which nothing is done yet. `text` says what it does."""
        self.text = text
        self.unit = unit
        self.done = 0
        self.total = 0
        self._begun = time.monotonic()

    def say(self, text: str) -> None:
        """Says what is done from here on, within the stage under way."""
        self.text = text

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Notes the progress of the stage; the engine calls this. Another `text` than before begins
        another stage. Raises Cancelled once the job is to end.
        """
        self.check()
        if text and text != self.text:
            self.stage(text, self.unit)
        self.done = done
        self.total = total

    def cancel(self) -> None:
        """Asks the job to end; any thread may call this. The job ends where it next calls `check`
        or `progress`. A job that is over stays as it is.
        """
        self._cancel.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancel.is_set()

    def check(self) -> None:
        """Raises Cancelled once somebody has cancelled the job."""
        if self.is_cancelled:
            raise Cancelled

    def seconds_left(self) -> float | None:
        """Returns the seconds that the stage under way will still take if it goes on as it went so
        far; None where that is not known.
        """
        spent = time.monotonic() - self._begun
        has_progress = self.done > 0 and self.total > 0
        if self.state != "working" or not has_progress or spent < LIKELY_SECONDS:
            return None
        return spent * max(0.0, self.total - self.done) / self.done

    def to_dict(self) -> dict[str, Any]:
        """Returns the job as the page takes it. `words` and `left` say in words how much is done
        and how long the rest will take.
        """
        left = self.seconds_left()
        shown = {name: getattr(self, name) for name in SHOWN}
        shown["words"] = self._words()
        shown["left"] = "" if left is None else f"about {in_time(max(1, left))} left"
        shown["cancelling"] = self.state == "working" and self.is_cancelled
        return shown

    def _words(self) -> str:
        if not self.total:
            return ""
        if self.unit == BYTES:
            return f"{in_bytes(self.done)} of {in_bytes(self.total)}"
        return f"{100 * min(1.0, self.done / self.total):.0f} %"


class Jobs:
    """`Jobs` runs one job at a time, since each may hold a whole model in memory.

    It keeps the latest jobs, so that pages can ask how they ended. All methods may be called from
    any thread.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[Job] = deque(maxlen=KEPT_JOBS)
        self._worker: threading.Thread | None = None
        """The latest job runs in this thread."""
        # The lock makes one step of "no job is at work" and "this one is", so that two requests at
        # the same moment cannot both start a job.
        self._lock = threading.Lock()

    def start(self, title: str, work: Callable[[Job], str], about: str = "", unit: str = "") -> Job:
        """Runs `work(job)` in a thread and returns the job at once. What `work` returns is the
        result. Raises RunError while another job is at work, and where the system gives no thread.
        """
        with self._lock:
            busy = next((job for job in self._recent if job.state == "working"), None)
            if busy is not None:
                raise RunError(f"{busy.title} is still under way; try again when it is done.")
            job = Job(next(self._numbers), title, about, unit)
            # A daemon does not keep a server alive that gave up waiting for it.
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
        """Returns the jobs that are under way."""
        with self._lock:
            return [job for job in self._recent if job.state == "working"]

    def close(self) -> None:
        """Cancels what is under way and waits a little for it to clean up."""
        for job in self.working():
            job.cancel()
        if self._worker is not None:
            self._worker.join(GIVE_UP_SECONDS)

    def find(self, number: int) -> Job | None:
        with self._lock:
            return next((job for job in self._recent if job.id == number), None)
