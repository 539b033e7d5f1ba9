"""The queue of runs, in ``queue.json`` next to the runs, so that no queued run is lost in a
restart.

- A restart does not start runs automatically. Runs that were queued before it are held until a
  person continues the queue.
- If a run in a process of its own kept running through the restart, nothing was interrupted. The
  queue then continues when that run ends, unless a person ended it.
- One thread starts the runs in turn. It exists only while runs wait.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from engine import safe_files
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.runs.record.run_folder import RunFolder, lasting_config
from engine.runs.summaries.names import names_of_runs, own_name, shown_name
from engine.safe_files import FileFault

QUEUE_FILE = "queue.json"
LIMIT = 100
_LARGEST = 128 << 20
"""Largest number of bytes of the file. The settings of a run have at most those of a request."""
POLL_SECONDS = 1.0
"""Seconds between two checks whether the next run can start: runs of other processes do not report
their end.
"""


@dataclass(frozen=True)
class Queued:
    """One waiting run, with what the page shows about it."""

    id: str
    name: str
    model: str
    """Name of the model."""
    data: str
    """Name of the data set."""
    added: float
    """Unix time at which the run was queued."""
    config: dict[str, Any]
    """Settings of the run, as returned by `TrainConfig.to_dict`."""
    problem: str = ""
    """Why the run could not be started. A run with such a text waits no longer."""
    detached: bool = False
    """Whether the run gets a process of its own."""
    resumes: str = ""
    """Id of a run to resume; empty if a new run is started."""


class _Kept(msgspec.Struct):
    """Content of the file."""

    held: bool
    runs: list[Queued]


class RunQueue:
    """Starts the waiting runs one after the other. All methods may be called from any
    thread.
    """

    def __init__(
        self,
        runs_dir: Path,
        start: Callable[[Queued], str],
        why_not: Callable[[], str | None],
        going_on: Callable[[], str | None] = lambda: None,
        went_its_way: Callable[[str], bool] = lambda _run_id: True,
    ):
        """Reads the queue's file. These four functions belong to the session.

        - `start(queued)` starts or resumes a run, or raises RamstreamError if it cannot.
        - `why_not` returns why no run can be started now, or None if one can.
        - `going_on` returns the id of the run that is active in another process, or None.
        - `went_its_way` returns, once that run is over, whether it ended without a person ending
          it.
        """
        self._path = runs_dir / QUEUE_FILE
        self._start = start
        self._why_not = why_not
        self._went_its_way = went_its_way
        # The condition's lock guards every field below. A change that the thread waits for notifies
        # the condition. A run is started without holding the lock: that takes seconds, during which
        # pages must still be able to list the queue.
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._starting = ""
        """Id of the run that is being started without the lock, or an empty text."""
        self._unread = ""
        """Why an earlier queue could not be read."""
        self._unwritten = ""
        """Why this queue cannot be written."""
        self._fault = ""
        """Why nothing can be started."""
        was_held, self._queued = self._read()
        waiting = self._next() is not None
        self.behind = going_on() if waiting and not was_held else None
        """Run of another process that the queue waits for, which was already active when this
        server started.
        """
        self.is_held = waiting and self.behind is None
        """Whether the queue waits for a person to continue it."""
        if self.is_held and not was_held:
            self._keep(self._queued, must=False)
        if self.behind is not None:
            with self._change:
                self._work()

    @property
    def problem(self) -> str:
        """Why an earlier queue could not be read, why this one cannot be written and why nothing
        can be started. The text is empty if there is no problem.
        """
        problems = (self._unread, self._unwritten, self._fault)
        return " ".join(problem for problem in problems if problem)

    @property
    def behind_name(self) -> str:
        """The name of the run `behind`; empty if there is none."""
        behind = self.behind
        return "" if behind is None else shown_name(RunFolder(self._path.parent / behind))

    def listed(self) -> list[Queued]:
        """Returns the queued runs in the order in which they start. One that is to be resumed has
        the name that it is shown under.
        """
        with self._change:
            queued = list(self._queued)
        return [self._named(each) for each in queued]

    def _named(self, queued: Queued) -> Queued:
        if not queued.resumes:
            return queued
        name = shown_name(RunFolder(self._path.parent / queued.resumes))
        return queued if name == queued.resumes else replace(queued, name=name)

    @property
    def waits(self) -> bool:
        """Whether a run waits to be started."""
        with self._change:
            return self._next() is not None

    def add(self, config: TrainConfig, resumes: str = "", detached: bool = False) -> int:
        """Queues a run and returns its position among the waiting runs, from 1. A new run gets a
        name of its own. `resumes` is the id of a run to resume, with its settings. detached: as for
        `set_detached`. Raises RunError if the queue is full or cannot be written, or if that run is
        queued already.
        """
        named = [] if resumes else names_of_runs(self._path.parent)
        with self._change:
            if resumes and any(resumes == other.resumes for other in self._queued):
                raise RunError(f"{config.name} is in the queue already.")
            if not resumes:
                name = own_name(config.name, [*named, *(other.name for other in self._queued)])
                config = config.with_values({"name": name})
            queued = Queued(
                secrets.token_hex(4),
                config.name,
                config.model.source,
                config.data.title,
                time.time(),
                lasting_config(config).to_dict(),
                detached=detached,
                resumes=resumes,
            )
            if len(self._queued) >= LIMIT:
                raise RunError(f"The queue is full ({LIMIT} runs). Remove some in Runs first.")
            self._keep([*self._queued, queued])
            self._work()
            waiting = [
                other for other in self._queued if not other.problem and other.id != self._starting
            ]
            return len(waiting)

    def remove(self, queued_id: str) -> None:
        """Takes a run out of the queue. Raises RunError if it is no longer queued, or is being
        started.
        """
        with self._change:
            place = self._place(queued_id)
            self._refuse_starting(queued_id)
            self._keep(self._queued[:place] + self._queued[place + 1 :])
            if self._next() is None:
                self.is_held = False
                self.behind = None

    def set_detached(self, queued_id: str, detached: bool) -> None:
        """Chooses whether a run gets a process of its own, which continues when this server ends.
        Raises as `remove` does.
        """
        with self._change:
            place = self._place(queued_id)
            self._refuse_starting(queued_id)
            listed = list(self._queued)
            listed[place] = replace(listed[place], detached=detached)
            self._keep(listed)

    def move_up(self, queued_id: str) -> None:
        """Moves a run up by one place; the first one stays first."""
        with self._change:
            place = self._place(queued_id)
            if place > 0:
                listed = list(self._queued)
                moved = listed.pop(place)
                listed.insert(place - 1, moved)
                self._keep(listed)

    def go_on(self) -> None:
        """Continues a queue that was held after a restart, at a person's request."""
        with self._change:
            self.is_held = False
            self.behind = None
            self._keep(self._queued, must=False)
            self._work()

    def poll(self) -> None:
        """Checks at once whether the next run can start, since a run has ended."""
        with self._change:
            if self._next() is not None:
                self._work()

    def start_no_more(self) -> None:
        """Starts no further run from now on. A signal handler may call this, so it takes no
        lock.
        """
        self._closed = True

    def close(self) -> None:
        """Closes the queue: no further run is started, and waiting runs are kept for the next
        server. Waits for a start in progress, so that the caller knows which run is active.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._starting)

    # ------------------------------------------------------------------ starting

    def _work(self) -> None:
        """Wakes the thread that starts runs, or starts that thread. The caller holds the lock."""
        if self._thread is None and not self.is_held and not self._closed:
            thread = threading.Thread(target=self._start_in_turn, name="queue", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the system has no more threads; the next check tries again
                self._fault = (
                    "The queue cannot go on: the system allows this program no further thread. End "
                    "other programs."
                )
        self._change.notify_all()

    def _start_in_turn(self) -> None:
        """Starts the runs in turn until none waits; the thread runs this."""
        try:
            while True:
                with self._change:
                    first = self._next()
                    if first is None or self._closed or self.is_held:
                        # This is under the same lock as the check: a run that is added later finds
                        # no thread and starts one, so that no run is left waiting.
                        self._fault = ""
                        self._thread = None
                        return
                may_poll_at_once = self._poll_once(first)
                if not may_poll_at_once:
                    with self._change:
                        if not self._closed:
                            self._change.wait(POLL_SECONDS)
        finally:
            # A thread that an exception ended must not count as running.
            with self._change:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _poll_once(self, first: Queued) -> bool:
        """Starts `first` if that is possible now. Returns whether the next check may follow at
        once. A failure is reported, and the start is tried again at the next check.
        """
        try:
            is_free = self._why_not() is None
            if is_free and self._may_go_on():
                self._start_one(first)
            self._fault = ""
        except Exception as error:  # noqa: BLE001  the queue survives every fault of the program
            fault = f"The queue cannot go on ({type(error).__name__}: {error}); it keeps trying."
            if fault != self._fault:  # the same fault is printed once, not every second
                traceback.print_exc()
            self._fault = fault
            return False
        return is_free

    def _may_go_on(self) -> bool:
        """Returns whether the queue continues, now that no run is active. It does not if a person
        ended the run that was active through the restart; in that case the queue is held.
        """
        behind = self.behind
        # This is called without the lock, since it reads the run's record.
        went_its_way = behind is None or self._went_its_way(behind)
        with self._change:
            if self.behind != behind:  # a person has continued the queue meanwhile
                return True
            self.behind = None
            if not went_its_way:
                self.is_held = True
                self._keep(self._queued, must=False)
            return went_its_way

    def _next(self) -> Queued | None:
        return next((queued for queued in self._queued if not queued.problem), None)

    def _start_one(self, queued: Queued) -> None:
        with self._change:
            # The run may have been removed or moved meanwhile, or the server may be closing. Only
            # the run that is first now is started.
            if self._closed or self._next() != queued:
                return
            self._starting = queued.id
        left: Queued | None = queued
        try:
            left = self._left_of(queued)
        finally:
            with self._change:
                self._starting = ""
                # Other runs may have been moved past it while it was started, but it cannot have
                # been removed.
                place = self._place(queued.id)
                if left != queued:
                    in_its_place = [] if left is None else [left]
                    before, after = self._queued[:place], self._queued[place + 1 :]
                    # The run may already be active, so a failure to write the queue must not end
                    # this.
                    self._keep(before + in_its_place + after, must=False)
                self._change.notify_all()

    def _left_of(self, queued: Queued) -> Queued | None:
        """Starts a run and returns what remains of it in the queue: None, the same run if another
        request started a run first, or the run with the reason why it cannot start.
        """
        try:
            self._start(queued)
        except RamstreamError as error:
            somebody_was_quicker = self._why_not() is not None
            return queued if somebody_was_quicker else replace(queued, problem=str(error))
        except Exception as error:  # noqa: BLE001  a fault must not block the other runs
            traceback.print_exc()
            problem = f"It could not be started ({type(error).__name__}: {error})."
            return replace(queued, problem=problem)
        return None

    def _refuse_starting(self, queued_id: str) -> None:
        if queued_id == self._starting:
            raise RunError("This run is starting; stop it on its page.")

    # ------------------------------------------------------------------ the file

    def _place(self, queued_id: str) -> int:
        """Returns the index of a run. Raises RunError if it is no longer queued."""
        for place, queued in enumerate(self._queued):
            if queued.id == queued_id:
                return place
        raise RunError("This run has left the queue: it was started or removed.")

    def _keep(self, listed: list[Queued], must: bool = True) -> None:
        """Writes `listed` to the file, then makes it the queue; the caller holds the lock.

        If the file cannot be written and it `must` be, the queue stays unchanged and RunError is
        raised. If it need not be, the problem is recorded and the queue changes anyway.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"held": self.is_held, "runs": [asdict(queued) for queued in listed]}
            runs = self._path.parent
            content = json.dumps(kept, indent=1)
            safe_files.write_whole(self._path, content, runs, mode=safe_files.PRIVATE)
        except OSError as error:
            if must:
                raise RunError(
                    f"The queue cannot be written to {self._path} ({error.strerror}); free some "
                    "disk space."
                ) from None
            self._unwritten = (
                f"The queue cannot be written to {self._path} ({error.strerror}): after a restart, "
                "it may be old."
            )
        else:
            self._unwritten = ""
        self._queued = listed

    def _read(self) -> tuple[bool, list[Queued]]:
        """Returns whether the queue was held, and the queued runs. An unreadable file is set
        aside.
        """
        runs = self._path.parent
        try:
            content = safe_files.read_bytes(self._path, runs, _LARGEST)
            kept: _Kept = safe_files.decoded(self._path, content, _Kept)
            if not all(math.isfinite(queued.added) for queued in kept.runs):
                raise FileFault(self._path, "has a time that is no number")
            if any(_is_deep(queued.config) for queued in kept.runs):
                raise FileFault(self._path, "has settings that are nested too deeply")
            return kept.held, kept.runs
        except FileNotFoundError:
            return False, []
        except OSError as error:
            aside = self._path
            with contextlib.suppress(OSError):
                aside = safe_files.set_aside(self._path, runs)
            self._unread = f"The earlier queue cannot be read ({error.strerror}): see {aside}."
            print(f"ramstream: {self._unread}", file=sys.stderr)
            return False, []


def _is_deep(value: Any, levels: int = 16) -> bool:
    """Returns whether settings are nested deeper than those of any run."""
    if not isinstance(value, (dict, list)):
        return False
    below = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deep(each, levels - 1) for each in below)
