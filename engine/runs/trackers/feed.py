"""The curves of one run for one tracker, sent by a thread of its own.

- It reads the record, so it holds back no step, and needs no memory for what is not sent yet.
- A tracker that raises is opened again after a while and asked what it has; the rest follows. So
  it is treated like one of a resumed run, and a failure leaves neither a gap nor a doubled step.
- The first failure is reported, once. So is a call that does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from engine.errors import first_line
from engine.runs.record.events import RunStarted
from engine.runs.record.following import EVENTS_FILE, Follower
from engine.runs.trackers.ledger import Noted
from engine.runs.trackers.points import Point, points_of
from engine.runs.trackers.tracker import Rewinding, TrackedRun, Tracker

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Seconds between two reads of the record."""
AGAIN_SECONDS = 60.0
"""Seconds after which a tracker that failed is opened again."""
HANGS_SECONDS = 60.0
"""Seconds after which a tracker that does not answer is reported."""
BATCH = 500
"""Number of points that a tracker gets at once, at most."""


@dataclass(frozen=True)
class Ending:
    """The end of a session in `state`; the record up to `seq` is to be sent, or all there is."""

    state: str
    seq: int | None = None


@dataclass(frozen=True)
class Timing:
    """Times of a feed, in seconds."""

    poll: float = POLL_SECONDS
    again: float = AGAIN_SECONDS
    hangs: float = HANGS_SECONDS


USUAL = Timing()


class Feed:
    """Feeds a tracker until `end` is called and everything was sent, or sending failed once more.

    `open_tracker` imports and opens the tracker. `report` takes what went wrong, such as "failed";
    two threads call it.
    """

    def __init__(
        self,
        run: TrackedRun,
        open_tracker: Callable[[TrackedRun], Tracker],
        noted: Noted,
        report: Callable[[str], None],
        timing: Timing = USUAL,
    ):
        self._run = run
        self._open = open_tracker
        self._report = report
        self._timing = timing
        self._noted = noted
        self._ending: Ending | None = None
        self._ended = threading.Event()
        self._reported = False
        self._calling_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, ending: Ending) -> None:
        """Makes the feed send the rest and stop; it may be called from any thread."""
        self._ending = ending
        self._ended.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Reports, once, that the tracker has not answered for too long."""
        since = self._calling_since  # read once, since the feed's thread changes it
        if since is not None and time.monotonic() - since > self._timing.hangs:
            self._warn(f"has not answered for {self._timing.hangs:,.0f} s")

    # ------------------------------------------------------------------ the feed's thread

    def _work(self) -> None:
        while True:
            is_last = self._ended.is_set()
            try:
                self._feed()
                return
            except Exception as error:  # noqa: BLE001  a tracker may raise anything
                self._calling_since = None
                self._warn(f"failed ({type(error).__name__}: {first_line(error)})")
            if is_last:
                return
            self._ended.wait(self._timing.again)

    def _feed(self) -> None:
        """Opens the tracker and sends the record until the session has ended."""
        known_as = self._noted.run
        tracker = self._call(lambda: self._open(replace(self._run, known_as=known_as)))
        last = {} if isinstance(tracker, Rewinding) else self._what_it_has(tracker)
        follower = Follower(self._run.folder / EVENTS_FILE)
        while True:
            # The request is read first, so that nothing before it is missed.
            ending = self._ending
            for points in self._batches(tracker, follower, last):
                self._send(tracker, points, last)
            if ending is not None:
                self._call(partial(tracker.close, ending.state))
                return
            self._ended.wait(self._timing.poll)

    def _what_it_has(self, tracker: Tracker) -> dict[str, int]:
        """Returns the last step of each curve. The tracker's own answer, where it gives one, counts
        more than the ledger: a kill may have come between sending and noting.
        """
        noted = self._noted.last if tracker.run == self._noted.run else {}
        last = noted | dict(self._call(tracker.held))
        self._noted.write(tracker.run, tracker.where, last)
        return last

    def _batches(
        self, tracker: Tracker, follower: Follower, last: dict[str, int]
    ) -> Iterator[list[Point]]:
        """Yields the new points of the record, some at a time, and rewinds a tracker that can."""
        points: list[Point] = []
        for record in follower.new_records():
            if isinstance(record.event, RunStarted) and isinstance(tracker, Rewinding):
                yield points
                points = []
                begins_after = record.event.resumed_step
                tracker.rewind(-1 if begins_after is None else begins_after)
                last.clear()
            point = points_of(record)
            if point is not None:
                points.append(point)
            if len(points) >= BATCH:
                yield points
                points = []
            # A session may end, and the next begin, while a slow tracker takes these points.
            ending = self._ending
            if ending is not None and ending.seq is not None and record.seq >= ending.seq:
                break
        yield points

    def _send(self, tracker: Tracker, points: list[Point], last: dict[str, int]) -> None:
        """Sends those values that the tracker does not have yet."""
        new = []
        for point in points:
            values = {
                name: value
                for name, value in point.values.items()
                if point.step > last.get(name, -1)
            }
            if values:
                new.append(Point(point.step, point.time, values))
                last.update(dict.fromkeys(values, point.step))
        if new:
            self._call(lambda: tracker.log(new))
            self._noted.write(tracker.run, tracker.where, last)

    def _call(self, work: Callable[[], T]) -> T:
        self._calling_since = time.monotonic()
        try:
            return work()
        finally:
            self._calling_since = None

    def _warn(self, what: str) -> None:
        if self._reported:
            return
        self._reported = True
        self._report(what)
