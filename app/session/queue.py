"""Runs that wait for their turn: kept in ``queue.json`` beside the runs, so that a restart loses
none.

A restart starts none by itself either: what was queued before it is held until a person says that
it goes on. Where a run in a process of its own went on all the while, nothing was interrupted: the
queue goes on when that run ends, unless it is a person who ends it.
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
"""Between two looks whether the next can start: runs of other processes end without telling."""


@dataclass(frozen=True)
class Queued:
    """A run that waits: what it is called, its model and data in words, its settings, the Unix time
    at which it was added, why it could not be started, after which it waits no longer, and whether
    it is to be run in a process of its own.
    """

    id: str
    name: str
    model: str
    data: str
    added: float
    config: dict[str, Any]
    problem: str = ""
    detached: bool = False


class RunQueue:
    """All methods may be called from any thread."""

    def __init__(
        self,
        runs_dir: Path,
        start: Callable[[TrainConfig, bool], str],
        why_not: Callable[[], str | None],
        going_on: Callable[[], str | None] = lambda: None,
        went_its_way: Callable[[str], bool] = lambda run_id: True,
    ):
        """`start(config, detached)` starts a run and raises RamstreamError where it cannot;
        `why_not` tells why none can be started now. `going_on` names the run of another process
        that goes on, None where none does; once it is over, `went_its_way` tells whether it ended
        by itself.
        """
        self._path = runs_dir / QUEUE_FILE
        self._start, self._why_not, self._went_its_way = start, why_not, went_its_way
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._starting = ""
        """The id of the one that is being started, which takes a while and is done outside of the
        lock.
        """
        self._unread = self._unwritten = self._fault = ""
        was_held, self._queued = self._read()
        waiting = self._next() is not None
        self.behind = going_on() if waiting and not was_held else None
        """The run of another process that has gone on since before this server began, and that the
        queue waits for.
        """
        self.is_held = waiting and self.behind is None
        """Whether a person must say first that it goes on."""
        if self.is_held and not was_held:
            self._keep(self._queued, must=False)
        if self.behind is not None:
            with self._change:
                self._work()

    @property
    def problem(self) -> str:
        """Why an earlier queue could not be read, this one cannot be written or nothing can be
        started; empty where all is well.
        """
        return " ".join(filter(None, (self._unread, self._unwritten, self._fault)))

    def listed(self) -> list[Queued]:
        """In the order in which they start."""
        with self._change:
            return list(self._queued)

    def add(self, config: TrainConfig) -> int:
        """Queue a run; its place among those that wait, from 1. Raises RunError when the queue is
        full or cannot be kept.
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
            return sum(not other.problem and other.id != self._starting for other in self._queued)

    def remove(self, queued_id: str) -> None:
        with self._change:
            place = self._place(queued_id)
            self._refuse_starting(queued_id)
            self._keep(self._queued[:place] + self._queued[place + 1 :])
            if self._next() is None:
                self.is_held, self.behind = False, None

    def set_detached(self, queued_id: str, detached: bool) -> None:
        """Whether it is to be run in a process of its own, which goes on when this server ends."""
        with self._change:
            place, listed = self._place(queued_id), list(self._queued)
            self._refuse_starting(queued_id)
            listed[place] = replace(listed[place], detached=detached)
            self._keep(listed)

    def move_up(self, queued_id: str) -> None:
        """Before the one before it; the first stays where it is."""
        with self._change:
            place, listed = self._place(queued_id), list(self._queued)
            if place:
                listed[place - 1 : place + 1] = listed[place], listed[place - 1]
                self._keep(listed)

    def go_on(self) -> None:
        """A person has seen what was queued before a restart."""
        with self._change:
            self.is_held, self.behind = False, None
            self._keep(self._queued, must=False)
            self._work()

    def look(self) -> None:
        """A run has ended: look now whether the next can start."""
        with self._change:
            if self._next() is not None:
                self._work()

    def close(self) -> None:
        """Start nothing any more; what waits is kept for the next server. Waits for a start under
        way, so that whoever closes knows what runs.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._change.wait_for(lambda: not self._starting)

    # ------------------------------------------------------------------ starting

    def _work(self) -> None:
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
        try:
            while True:
                with self._change:
                    first = self._next()
                    if first is None or self._closed or self.is_held:
                        self._fault, self._thread = (
                            "",
                            None,
                        )  # in one with the look: whoever adds next begins anew
                        return
                if not self._look_once(first):
                    with self._change:
                        if not self._closed:
                            self._change.wait(LOOK_SECONDS)
        finally:
            with self._change:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _look_once(self, first: Queued) -> bool:
        """Start `first` if that can be now; whether the next look may follow at once. What fails is
        told and tried again.
        """
        try:
            is_free = self._why_not() is None
            if is_free and self._may_go_on():
                self._start_one(first)
            self._fault = ""
        except Exception as error:
            fault = f"The queue cannot go on ({type(error).__name__}: {error}); it keeps trying."
            if fault != self._fault:
                traceback.print_exc()
            self._fault, is_free = fault, False
        return is_free

    def _may_go_on(self) -> bool:
        """Once nothing is running: the queue is held where a person has ended the run that went on
        over the restart.
        """
        behind = self.behind
        went = behind is None or self._went_its_way(behind)
        with self._change:
            if self.behind != behind:  # a person has said meanwhile that it goes on
                return True
            self.behind = None
            if not went:
                self.is_held = True
                self._keep(self._queued, must=False)
            return went

    def _next(self) -> Queued | None:
        return next((queued for queued in self._queued if not queued.problem), None)

    def _start_one(self, queued: Queued) -> None:
        with self._change:
            # Removed or moved meanwhile, or the server is closing: what is started is what is first
            # now.
            if self._closed or self._next() != queued:
                return
            self._starting = queued.id
        left = [queued]
        try:
            left = self._left_of(queued)
        finally:
            with self._change:
                self._starting = ""
                place = self._place(queued.id)
                if left != [queued]:
                    self._keep(self._queued[:place] + left + self._queued[place + 1 :], must=False)
                self._change.notify_all()

    def _left_of(self, queued: Queued) -> list[Queued]:
        """Start it; what the queue then holds in its place: nothing, the same where somebody else
        was quicker, or itself with the reason why it cannot start.
        """
        try:
            self._start(TrainConfig.from_dict(queued.config), queued.detached)
        except RamstreamError as error:
            return [queued if self._why_not() is not None else replace(queued, problem=str(error))]
        except Exception as error:  # a fault of the program must not hold up the others
            traceback.print_exc()
            return [
                replace(
                    queued, problem=f"It could not be started ({type(error).__name__}: {error})."
                )
            ]
        return []

    def _refuse_starting(self, queued_id: str) -> None:
        if queued_id == self._starting:
            raise RunError("It is being started just now; once it runs, stop it there.")

    # ------------------------------------------------------------------ the file

    def _place(self, queued_id: str) -> int:
        for place, queued in enumerate(self._queued):
            if queued.id == queued_id:
                return place
        raise RunError("It is not in the queue any more: it was started or removed meanwhile.")

    def _keep(self, listed: list[Queued], must: bool = True) -> None:
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
        """Whether it was held, and what waits."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            kept = (
                {"held": False, "runs": kept} if isinstance(kept, list) else kept
            )  # as older versions wrote it
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
    """Raises TypeError for what is not one."""
    queued = Queued(**values)
    texts = (queued.id, queued.name, queued.model, queued.data, queued.problem)
    if not (
        all(isinstance(text, str) for text in texts)
        and isinstance(queued.config, dict)
        and isinstance(queued.added, (int, float))
        and isinstance(queued.detached, bool)
    ):
        raise TypeError("not a queued run")
    return queued
