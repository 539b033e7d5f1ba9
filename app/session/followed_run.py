"""The record of one run, read while it grows, and whether the run continues.

All runs are read from their files, including those of this process, so that the same code serves
live, finished and crashed runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine import safe_files
from engine.errors import RunError
from engine.runs.record.events import Record, RunEnded
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.recorder import lost_text
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot

T = TypeVar("T")

ENDING = ("stop", "discard")
"""Commands that end a run."""


class FollowedRun:
    """A run that pages show or that was asked for something.

    What begins with `note_` may be called from any thread, and `read` from one at a time.
    """

    def __init__(
        self,
        folder: RunFolder,
        is_active: Callable[[], bool],
        is_starting: Callable[[], bool] = lambda: False,
    ):
        """`is_active` returns whether this process is running the run, which becomes true shortly
        before the run takes its lock. `is_starting` returns whether a process of the run's own is
        starting, which has written nothing yet.
        """
        self.folder = folder
        self.is_active = is_active
        self.is_starting = is_starting
        self.snapshot = RunSnapshot()
        self._follower = Follower(folder.events_path)
        self.has_news = False
        """Whether something was noted that the next answer about the run shows."""
        self._made: dict[Callable[[FollowedRun], Any], Any] = {}
        self._was_running = False
        """Whether the run had a process when the record was last read."""
        self.is_lost = False
        """Whether the run's folder vanished while the run was under way."""
        self._request: tuple[str, int] | None = None
        """Pending command, and number of commands that the run had taken when it was sent."""

    @property
    def is_outdated(self) -> bool:
        """Whether the folder was deleted, or put back, so that what was read is no longer there. Of
        a run whose folder vanished while it was under way, it stays so.
        """
        if self.is_lost:
            return self._has_record()
        return not self._was_running and not safe_files.is_folder(
            self.folder.path, self.folder.root
        )

    def note_begin(self) -> None:
        """Notes that the run begins, whether or not a page asks for it."""
        self._was_running = True
        self.has_news = True

    def note_end(self) -> None:
        """Notes that the run has ended in this process."""
        self._was_running = not self._has_record()

    def note_request(self, command: str, taken: int) -> None:
        """Records a command that was sent to the run; it is shown until the run reports that it has
        taken it. `taken` is the number of commands that the run had taken, according to the
        snapshot, before this one was sent.

        A command that ends the run stays shown if somebody else requests something at the same
        time, since the run will end in any case.
        """
        before = self._request  # a copy, since another thread may set the field to None meanwhile
        if before is None or before[0] not in ENDING or command in ENDING:
            self._request = command, taken
        self.has_news = True

    def read(self) -> bool:
        """Reads what the record has got meanwhile. Returns whether the run has a process."""
        self.has_news = False
        # This is checked before the record is read, so that a run that ends in between is not taken
        # for an interrupted one.
        is_running = self.is_active() or self.folder.is_running()
        catch_up(self.snapshot, self._follower)
        if self.snapshot.export_failed and self.folder.has_export:
            self.snapshot.take_later_export()
        self._notice_loss(is_running)
        return is_running

    def once(self, make: Callable[[FollowedRun], T]) -> T:
        """Returns what `make` makes of the run. It is made once, and kept for as long as the run is
        followed. Called on the event loop alone.
        """
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    def pending(self, is_running: bool) -> str | None:
        """Returns the command that the run has not taken yet. A command that it has taken, or never
        will take, is dropped.
        """
        request = self._request
        if request is None:
            return None
        command, taken = request
        if is_running and self.snapshot.requests_taken <= taken:
            return command
        self._request = None
        return None

    def _notice_loss(self, is_running: bool) -> None:
        """Ends the run in the snapshot if its folder vanished while it was under way: nobody can
        read what its process recorded then.
        """
        vanished = self._was_running and not self._has_record()
        self._was_running = is_running
        if is_running or not vanished or self.snapshot.is_over:
            return
        self.is_lost = True
        ended = RunEnded("failed", lost_text(self.folder.path), RunError.__name__)
        snapshot = self.snapshot
        snapshot.apply(
            Record(self.folder.id, snapshot.last_seq + 1, snapshot.last_time or 0.0, ended)
        )

    def _has_record(self) -> bool:
        return safe_files.is_file(self.folder.events_path, self.folder.root)
