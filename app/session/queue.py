"""Runs can wait in a queue for their turn. The queue is kept in ``queue.json`` beside the runs, so
that a restart loses none.

- A restart starts no run by itself. What was queued before it is held until a person says that it
  goes on.
- Where a run in a process of its own went on all the while, nothing was interrupted. The queue then
  goes on when that run ends, unless a person ends it.
- One thread starts the runs in turn. It exists only while runs wait.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.files import write_whole
from engine.runs.folder import lasting_config

QUEUE_FILE = "queue.json"
DAMAGED_FILE = "queue.damaged.json"
LIMIT = 100
LOOK_SECONDS = 1.0
"""The queue looks after so many seconds whether the next run can start: runs of other processes end
without telling.
"""


@dataclass(frozen=True)
class Queued:
    """A `Queued` is one run that waits, with what the page shows of it."""

    id: str
    name: str
    model: str
    """The model is named in words."""
    data: str
    """The data set is named in words."""
    added: float
    """The run was added at this Unix time."""
    config: dict[str, Any]
    """These are the run's settings as `TrainConfig.to_dict` gives them."""
    problem: str = ""
    """The text says why the run could not be started, after which it waits no longer."""
    detached: bool = False
    """The run gets a process of its own where this is set."""


class RunQueue:
    """A `RunQueue` starts the runs that wait, one after the other. All methods may be called from
    any thread.
    """

    def __init__(
        self,
        runs_dir: Path,
        start: Callable[[TrainConfig, bool], str],
        why_not: Callable[[], str | None],
        going_on: Callable[[], str | None] = lambda: None,
        went_its_way: Callable[[str], bool] = lambda _run_id: True,
    ):
        """Reads what waits. These four functions are the session's.

        - `start(config, detached)` starts a run and raises RamstreamError where it cannot.
        - `why_not` returns why no run can be started now, None where one can.
        - `going_on` returns the id of the run that goes on in another process, or None.
        - `went_its_way` returns, once that run is over, whether it ended by itself.
        """
        self._path = runs_dir / QUEUE_FILE
        self._start = start
        self._why_not = why_not
        self._went_its_way = went_its_way
        # The condition's lock guards every field below. Whoever changes something that the thread
        # waits for notifies it. A run is started outside of the lock: that takes seconds, in which
        # pages must still be able to list the queue.
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._starting = ""
        """This is the id of the run that is being started outside of the lock, or empty."""
        self._unread = ""
        """Says why an earlier queue could not be read."""
        self._unwritten = ""
        """Says why this queue cannot be written."""
        self._fault = ""
        """Says why nothing can be started."""
        was_held, self._queued = self._read()
        waiting = self._next() is not None
        self.behind = going_on() if waiting and not was_held else None
        """The queue waits for this run of another process, which has gone on since before this
        server began.
        """
        self.is_held = waiting and self.behind is None
        """A person must say first that the queue goes on."""
        if self.is_held and not was_held:
            self._keep(self._queued, must=False)
        if self.behind is not None:
            with self._change:
                self._work()

    @property
    def problem(self) -> str:
        """Says why an earlier queue could not be read, why this one cannot be written and why
        nothing can be started. It is empty where all is well.
        """
        problems = (self._unread, self._unwritten, self._fault)
        return " ".join(problem for problem in problems if problem)

    def listed(self) -> list[Queued]:
        """Returns the runs of the queue in the order in which they start."""
        with self._change:
            return list(self._queued)

    def add(self, config: TrainConfig) -> int:
        """Queues a run and returns its place among those that wait, from 1. Raises RunError when
        the queue is full or cannot be written.
        """
        queued = Queued(
            secrets.token_hex(4),
            config.name,
            config.model.source,
            config.data.title,
            time.time(),
            lasting_config(config).to_dict(),
        )
        with self._change:
            if len(self._queued) >= LIMIT:
                raise RunError(
                    f"The queue holds {LIMIT} runs already; remove some of them in Runs first."
                )
            self._keep([*self._queued, queued])
            self._work()
            waiting = [
                other for other in self._queued if not other.problem and other.id != self._starting
            ]
            return len(waiting)

    def remove(self, queued_id: str) -> None:
        """Takes a run out of the queue. Raises RunError when it is not there any more, or is being
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
        """Chooses whether a run gets a process of its own, which goes on when this server ends.
        Raises as `remove` does.
        """
        with self._change:
            place = self._place(queued_id)
            self._refuse_starting(queued_id)
            listed = list(self._queued)
            listed[place] = replace(listed[place], detached=detached)
            self._keep(listed)

    def move_up(self, queued_id: str) -> None:
        """Moves a run before the one before it; the first stays where it is."""
        with self._change:
            place = self._place(queued_id)
            if place > 0:
                listed = list(self._queued)
                moved = listed.pop(place)
                listed.insert(place - 1, moved)
                self._keep(listed)

    def go_on(self) -> None:
        """Lets the queue go on: a person has seen what was queued before a restart."""
        with self._change:
            self.is_held = False
            self.behind = None
            self._keep(self._queued, must=False)
            self._work()

    def look(self) -> None:
        """Looks now whether the next run can start, since a run has ended."""
        with self._change:
            if self._next() is not None:
                self._work()

    def close(self) -> None:
        """Closes the queue: nothing is started any more, and what waits is kept for the next
        server. Waits for a start under way, so that whoever closes knows what runs.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._starting)

    # ------------------------------------------------------------------ starting

    def _work(self) -> None:
        """Wakes the thread that starts runs, or starts it. The lock is held."""
        if self._thread is None and not self.is_held and not self._closed:
            thread = threading.Thread(target=self._start_in_turn, name="queue", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the system gives no further thread; the next look tries again
                self._fault = (
                    "The queue cannot go on: the system allows this program no further thread. End "
                    "other programs."
                )
        self._change.notify_all()

    def _start_in_turn(self) -> None:
        """Starts the runs in turn until none waits; this is the thread's work."""
        try:
            while True:
                with self._change:
                    first = self._next()
                    if first is None or self._closed or self.is_held:
                        # Under the same lock as the look itself: whoever adds a run next finds no
                        # thread and starts one, so that no run is left waiting for nobody.
                        self._fault = ""
                        self._thread = None
                        return
                may_look_at_once = self._look_once(first)
                if not may_look_at_once:
                    with self._change:
                        if not self._closed:
                            self._change.wait(LOOK_SECONDS)
        finally:
            # A thread that a fault has ended must not count as one that is at work.
            with self._change:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _look_once(self, first: Queued) -> bool:
        """Starts `first` if that can be now. Returns whether the next look may follow at once.
        What fails is told, and is tried again at the next look.
        """
        try:
            is_free = self._why_not() is None
            if is_free and self._may_go_on():
                self._start_one(first)
            self._fault = ""
        except Exception as error:  # noqa: BLE001  the queue outlives every fault of the program
            fault = f"The queue cannot go on ({type(error).__name__}: {error}); it keeps trying."
            if fault != self._fault:  # the same fault is printed once, not every second
                traceback.print_exc()
            self._fault = fault
            return False
        return is_free

    def _may_go_on(self) -> bool:
        """Whether the queue goes on, now that nothing is running. It does not where a person has
        ended the run that went on over the restart; the queue is held then.
        """
        behind = self.behind
        # Asked outside of the lock, since it reads the run's record.
        went_its_way = behind is None or self._went_its_way(behind)
        with self._change:
            if self.behind != behind:  # a person has said meanwhile that the queue goes on
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
            # what is first now is started.
            if self._closed or self._next() != queued:
                return
            self._starting = queued.id
        left: Queued | None = queued
        try:
            left = self._left_of(queued)
        finally:
            with self._change:
                self._starting = ""
                # Others may have moved the run while it was started. Nobody can have removed it.
                place = self._place(queued.id)
                if left != queued:
                    in_its_place = [] if left is None else [left]
                    before, after = self._queued[:place], self._queued[place + 1 :]
                    # The run may be going on already, so an unwritten queue must not stop here.
                    self._keep(before + in_its_place + after, must=False)
                self._change.notify_all()

    def _left_of(self, queued: Queued) -> Queued | None:
        """Starts a run and returns what the queue holds in its place then: None, the same where
        somebody else was quicker, or the run with the reason why it cannot start.
        """
        try:
            self._start(TrainConfig.from_dict(queued.config), queued.detached)
        except RamstreamError as error:
            somebody_was_quicker = self._why_not() is not None
            return queued if somebody_was_quicker else replace(queued, problem=str(error))
        except Exception as error:  # noqa: BLE001  a fault of the program holds up no other run
            traceback.print_exc()
            problem = f"It could not be started ({type(error).__name__}: {error})."
            return replace(queued, problem=problem)
        return None

    def _refuse_starting(self, queued_id: str) -> None:
        if queued_id == self._starting:
            raise RunError("It is being started just now; once it runs, stop it there.")

    # ------------------------------------------------------------------ the file

    def _place(self, queued_id: str) -> int:
        """Returns the index of a run. Raises RunError when it is not there any more."""
        for place, queued in enumerate(self._queued):
            if queued.id == queued_id:
                return place
        raise RunError("It is not in the queue any more: it was started or removed meanwhile.")

    def _keep(self, listed: list[Queued], must: bool = True) -> None:
        """Writes the queue, then takes `listed` for it; the lock is held.

        Where the file cannot be written: if it `must` be, the queue stays as it was and RunError is
        raised; otherwise the problem is noted and the queue changes all the same.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"held": self.is_held, "runs": [asdict(queued) for queued in listed]}
            write_whole(self._path, json.dumps(kept, indent=1))
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
        """Returns whether the queue was held, and what waits. A file that cannot be read is put
        aside.
        """
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(kept, list):  # as older versions wrote it
                kept = {"held": False, "runs": kept}
            return kept["held"] is True, [_queued(values) for values in kept["runs"]]
        except FileNotFoundError:
            return False, []
        except (OSError, ValueError, KeyError, TypeError) as error:
            aside = self._path.with_name(DAMAGED_FILE)
            try:
                self._path.replace(aside)
            except OSError:
                aside = self._path
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            self._unread = f"The queue of before cannot be read ({reason}): see {aside}."
            return False, []


def _queued(values: dict[str, Any]) -> Queued:
    """Returns the run that the values describe. Raises TypeError where they describe none."""
    queued = Queued(**values)
    texts = (queued.id, queued.name, queued.model, queued.data, queued.problem)
    are_texts = all(isinstance(text, str) for text in texts)
    has_config = isinstance(queued.config, dict)
    has_time = isinstance(queued.added, (int, float))
    if not (are_texts and has_config and has_time and isinstance(queued.detached, bool)):
        raise TypeError("not a queued run")
    return queued
