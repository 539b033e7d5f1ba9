"""Long work that the app does besides a run, such as an export or an answer: each in a thread, with progress to ask for."""

from __future__ import annotations

import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RamstreamError, RunError

KEPT_JOBS = 50
SHOWN = ("id", "title", "state", "done", "total", "text", "result", "error")


class Cancelled(Exception):
    """Raised inside a job by a request to cancel it."""


@dataclass
class Job:
    """`state` is working, done, failed or cancelled. `text` grows while an answer is written; `result` and `error` are
    sentences."""

    id: int
    title: str
    state: str = "working"
    done: float = 0
    total: float = 0
    text: str = ""
    result: str = ""
    error: str = ""
    _cancel: threading.Event = field(default_factory=threading.Event, repr=False)

    def progress(self, done: float, total: float, *_: Any) -> None:
        """Callback for the engine. Raises Cancelled once the job is to end."""
        self.check()
        self.done, self.total = done, total

    def cancel(self) -> None:
        """Ask it to end, from any thread; it does so where it next looks. Nothing happens to one that is over."""
        self._cancel.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancel.is_set()

    def check(self) -> None:
        """Raises Cancelled once the job is to end."""
        if self.is_cancelled:
            raise Cancelled

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SHOWN}


class Jobs:
    """One job at a time, since each may hold a whole model in memory; the latest ones can be asked for."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._recent: deque[Job] = deque(maxlen=KEPT_JOBS)
        self._lock = threading.Lock()

    def start(self, title: str, work: Callable[[Job], str]) -> Job:
        """Run `work(job)` in a thread; what it returns is the result. Raises RunError while another job is at work."""
        with self._lock:
            busy = next((job for job in self._recent if job.state == "working"), None)
            if busy is not None:
                raise RunError(f"{busy.title} is still under way; try again when it is done.")
            job = Job(next(self._numbers), title)
            self._recent.append(job)
        threading.Thread(target=self._do, args=(job, work), name=f"job-{job.id}", daemon=True).start()
        return job

    def find(self, number: int) -> Job | None:
        with self._lock:
            return next((job for job in self._recent if job.id == number), None)

    @staticmethod
    def _do(job: Job, work: Callable[[Job], str]) -> None:
        try:
            job.result = work(job)
            job.state = "done"
        except Cancelled:
            job.result, job.state = f"{job.title} was cancelled.", "cancelled"
        except RamstreamError as error:
            job.error, job.state = str(error), "failed"
        except Exception as error:
            traceback.print_exc()
            job.error = f"{job.title} failed by a fault of the program ({type(error).__name__}: {error})."
            job.state = "failed"
