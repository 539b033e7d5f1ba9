"""Jobs are long work apart from a run, such as an export or loading weights for a chat. Each job
has its own thread, shows its progress, and can be cancelled.
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

from app.labels import in_bytes, in_time
from engine.errors import RamstreamError, RunError

KEPT_JOBS = 50
SHOWN = ("id", "title", "about", "state", "done", "total", "text", "result", "error")
LIKELY_SECONDS = 1.0
"""Seconds of a stage after which the remaining time is estimated."""
GIVE_UP_SECONDS = 5
"""Seconds that a server that ends waits for its jobs to clean up."""
BYTES = "bytes"


class Cancelled(Exception):
    """Raised in the work of a job that is cancelled."""


@dataclass
class Job:
    """One long job, with its progress and its result.

    Only the job's thread writes the fields, and any thread may read them: each write replaces one
    value, so readers need no lock.
    """

    id: int
    title: str
    about: str = ""
    """Id of the run that the job works on, or empty."""
    unit: str = ""
    """Unit in which progress is counted: bytes, or another unit without a name."""
    state: str = "working"
    """One of working, done, failed and cancelled."""
    done: float = 0
    total: float = 0
    text: str = ""
    """Name of the current stage of the work."""
    result: str = ""
    """Sentence about the result of the job."""
    error: str = ""
    """Sentence about why the job failed."""
    _begun: float = field(default_factory=time.monotonic, repr=False)
    """Monotonic time at which the current stage began."""
    _cancel: threading.Event = field(default_factory=threading.Event, repr=False)

    def run(self, work: Callable[[Job], str]) -> None:
        """Calls `work`, which returns the result as a sentence, and records how it ended. It raises
        no exception.

        `state` is always set last: a reader that sees that the job is over also finds its result or
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
        except Exception as error:  # noqa: BLE001  a fault of the program is shown on the page
            traceback.print_exc()
            self.error = (
                f"{self.title} failed by a fault of the program ({type(error).__name__}: {error})."
            )
            self.state = "failed"

    def stage(self, text: str, unit: str = "") -> None:
        """Begins a stage, with nothing of it done yet. `text` describes the stage."""
        self.text = text
        self.unit = unit
        self.done = 0
        self.total = 0
        self._begun = time.monotonic()

    def report(self, text: str) -> None:
        """Changes the text of the current stage."""
        self.text = text

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Records the progress of the stage; the engine calls this. A new `text` begins a new
        stage. Raises Cancelled once the job was cancelled.
        """
        self.check()
        if text and text != self.text:
            self.stage(text, self.unit)
        self.done = done
        self.total = total

    def cancel(self) -> None:
        """Requests the end of the job; any thread may call this. The job ends at its next call of
        `check` or `progress`. A job that is over does not change.
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
        """Returns the seconds that the current stage will still take at its average pace so far, or
        None if that is not known.
        """
        spent = time.monotonic() - self._begun
        has_progress = self.done > 0 and self.total > 0
        if self.state != "working" or not has_progress or spent < LIKELY_SECONDS:
            return None
        return spent * max(0.0, self.total - self.done) / self.done

    def to_dict(self) -> dict[str, Any]:
        """Returns the job in the form that pages receive. `amount` describes how much is done, and
        `left` how long the rest will take.
        """
        left = self.seconds_left()
        shown = {name: getattr(self, name) for name in SHOWN}
        shown["amount"] = self._amount()
        shown["left"] = "" if left is None else f"about {in_time(max(1, left))} left"
        shown["cancelling"] = self.state == "working" and self.is_cancelled
        return shown

    def _amount(self) -> str:
        if not self.total:
            return ""
        if self.unit == BYTES:
            return f"{in_bytes(self.done)} of {in_bytes(self.total)}"
        return f"{100 * min(1.0, self.done / self.total):.0f} %"


class Jobs:
    """Runs one job at a time, since each may hold a whole model in memory.

    It keeps the latest jobs, so that pages can learn how they ended. All methods may be called from
    any thread.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[Job] = deque(maxlen=KEPT_JOBS)
        self._worker: threading.Thread | None = None
        """Thread of the latest job."""
        # Under the lock, checking that no job is running and starting this one are one step, so
        # that two simultaneous requests cannot both start a job.
        self._lock = threading.Lock()

    def start(self, title: str, work: Callable[[Job], str], about: str = "", unit: str = "") -> Job:
        """Runs `work(job)` in a thread and returns the job at once. The value that `work` returns
        is the result. Raises RunError while another job is running, and if the system cannot start
        a thread.
        """
        with self._lock:
            busy = next((job for job in self._recent if job.state == "working"), None)
            if busy is not None:
                raise RunError(f"{busy.title} is still running. Try again when it is done.")
            job = Job(next(self._numbers), title, about, unit)
            # This is a daemon thread, so that it does not keep the server alive after the wait for
            # it ended.
            worker = threading.Thread(
                target=job.run, args=(work,), name=f"job-{job.id}", daemon=True
            )
            try:
                worker.start()
            except RuntimeError:  # the system has no more threads
                raise RunError(
                    f"{title} cannot be started: the system allows this program no further thread. "
                    "End other programs and try again."
                ) from None
            self._recent.append(job)
            self._worker = worker
        return job

    def working(self) -> list[Job]:
        """Returns the jobs that are running."""
        with self._lock:
            return [job for job in self._recent if job.state == "working"]

    def close(self) -> None:
        """Cancels the running jobs and waits briefly for them to clean up."""
        for job in self.working():
            job.cancel()
        if self._worker is not None:
            self._worker.join(GIVE_UP_SECONDS)

    def find(self, number: int) -> Job | None:
        with self._lock:
            return next((job for job in self._recent if job.id == number), None)
