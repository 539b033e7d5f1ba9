"""Runs that wait for their turn: kept in ``queue.json`` beside the runs, so that a restart loses none.

A restart starts none either: what was queued before it waits until a person says that it goes on.
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

from engine.config import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.runs import lasting_config, write_whole

QUEUE_FILE = "queue.json"
DAMAGED_FILE = "queue.damaged.json"
LIMIT = 100
LOOK_SECONDS = 1.0
"""Between two looks whether the next can start: runs of other processes end without telling."""


@dataclass(frozen=True)
class Queued:
    """A run that waits: what it is called, its model and data in words, its settings, the Unix time at which it was added, and
    why it could not be started, after which it waits no longer."""

    id: str
    name: str
    model: str
    data: str
    added: float
    config: dict[str, Any]
    problem: str = ""


class RunQueue:
    """All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, start: Callable[[TrainConfig], str], why_not: Callable[[], str | None]):
        """`start` starts a run and raises RamstreamError where it cannot; `why_not` tells why none can be started now."""
        self._path = runs_dir / QUEUE_FILE
        self._start, self._why_not = start, why_not
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.problem = ""
        """Why an earlier queue could not be read."""
        self._queued = self._read()
        self.is_held = any(not queued.problem for queued in self._queued)
        """Whether a person must say first that it goes on."""

    def listed(self) -> list[Queued]:
        """In the order in which they start."""
        with self._change:
            return list(self._queued)

    def add(self, config: TrainConfig) -> int:
        """Queue a run; its place among those that wait, from 1. Raises RunError when the queue is full or cannot be kept."""
        queued = Queued(secrets.token_hex(4), config.name, config.model.source, config.data.title, time.time(),
                        lasting_config(config).to_dict())
        with self._change:
            if len(self._queued) >= LIMIT:
                raise RunError(f"The queue holds {LIMIT} runs already; remove some of them in Runs first.")
            self._keep([*self._queued, queued])
            self._work()
            return sum(not other.problem for other in self._queued)

    def remove(self, queued_id: str) -> None:
        with self._change:
            place = self._place(queued_id)
            self._keep(self._queued[:place] + self._queued[place + 1:])
            self.is_held = self.is_held and self._next() is not None

    def move_up(self, queued_id: str) -> None:
        """Before the one before it; the first stays where it is."""
        with self._change:
            place, listed = self._place(queued_id), list(self._queued)
            if place:
                listed[place - 1:place + 1] = listed[place], listed[place - 1]
                self._keep(listed)

    def go_on(self) -> None:
        """A person has seen what was queued before a restart."""
        with self._change:
            self.is_held = False
            self._work()

    def look(self) -> None:
        """A run has ended: look now whether the next can start."""
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        """Start nothing any more; what waits is kept for the next server."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    # ------------------------------------------------------------------ starting

    def _work(self) -> None:
        if self._thread is None and not self.is_held and not self._closed:
            self._thread = threading.Thread(target=self._start_in_turn, name="queue", daemon=True)
            self._thread.start()
        self._change.notify_all()

    def _start_in_turn(self) -> None:
        while True:
            with self._change:
                first = self._next()
                if first is None or self._closed:
                    self._thread = None
                    return
            if self._why_not() is None:
                self._start_one(first)
            else:
                with self._change:
                    if not self._closed:
                        self._change.wait(LOOK_SECONDS)

    def _next(self) -> Queued | None:
        return next((queued for queued in self._queued if not queued.problem), None)

    def _start_one(self, queued: Queued) -> None:
        with self._change:
            # Removed or moved meanwhile, or the server is closing: what is started is what is first now.
            if self._closed or self._next() != queued:
                return
            try:
                self._start(TrainConfig.from_dict(queued.config))
            except RamstreamError as error:
                if self._why_not() is not None:  # somebody else was quicker; it keeps its place
                    return
                left = [replace(queued, problem=str(error))]
            except Exception as error:  # a fault of the program must not hold up the others
                traceback.print_exc()
                left = [replace(queued, problem=f"It could not be started ({type(error).__name__}: {error}).")]
            else:
                left = []
            place = self._queued.index(queued)
            self._keep(self._queued[:place] + left + self._queued[place + 1:], must=False)

    # ------------------------------------------------------------------ the file

    def _place(self, queued_id: str) -> int:
        for place, queued in enumerate(self._queued):
            if queued.id == queued_id:
                return place
        raise RunError("It is not in the queue any more: it was started or removed meanwhile.")

    def _keep(self, listed: list[Queued], must: bool = True) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps([asdict(queued) for queued in listed], indent=1))
        except OSError as error:
            if must:
                raise RunError(f"The queue cannot be written to {self._path} ({error.strerror}); free some disk space."
                               ) from None
            self.problem = f"The queue cannot be written to {self._path} ({error.strerror}): after a restart, it may be old."
        self._queued = listed

    def _read(self) -> list[Queued]:
        try:
            return [_queued(values) for values in json.loads(self._path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            aside = self._path.with_name(DAMAGED_FILE)
            try:
                self._path.replace(aside)
            except OSError:
                aside = self._path
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            self.problem = f"The queue of before cannot be read ({reason}): see {aside}."
            return []


def _queued(values: dict[str, Any]) -> Queued:
    """Raises TypeError for what is not one."""
    queued = Queued(**values)
    texts = (queued.id, queued.name, queued.model, queued.data, queued.problem)
    if not (all(isinstance(text, str) for text in texts) and isinstance(queued.config, dict)
            and isinstance(queued.added, (int, float))):
        raise TypeError("not a queued run")
    return queued
