"""The state after one step, written while later steps run.

The planes are cut into chunks, in the order in which a step updates the units. Each chunk becomes
safe in one of two ways: it is written from the plane, or it is copied to `StagingBuffers` and
written from there. The rules are these:

- An update of a later step waits in `protect` until all chunks of its unit are safe. While there is
  room for copies, it copies what is left of its unit itself, and so waits for no disk.
- Copying threads do not wait for an update. They copy from the first chunk on, while the device
  computes, until there is no room.
- Writing threads first take chunks that are not safe, in order, and then the copies. So with room
  for P bytes, updates wait for the disk only until all but P bytes are written.
- When the snapshot is ended before it is written, every waiting update goes on. An update that
  waits ends it itself where `gives_way` says so: a person wants the run to end, for example.

A chunk is compared by identity: it is an entry of a work list.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.training.checkpoints import staging as copying
from engine.training.checkpoints.staging import StagingBuffers

if TYPE_CHECKING:
    from engine.runtime.host.host_states import HostStates


POLL_SECONDS = 0.1
"""An update that waits asks each time this many seconds have passed whether it still must."""


class Ended(Exception):
    """The snapshot was ended, so the checkpoint that is being written is given up."""


@dataclass(eq=False)
class Chunk:
    """A chunk is a range of one plane."""

    unit: str
    plane: str
    begin: int
    """The chunk begins at this byte of the plane."""
    read: Callable[[], np.ndarray]
    """It returns the content, uint8 [bytes]: the plane's own memory, a copy of it if the unit lives
    on the device or, once the chunk is copied, that copy.
    """
    room: memoryview | None = None
    """The copy lies in this room of `StagingBuffers`; None where the chunk is not copied."""

    def copy_to(self, room: memoryview) -> memoryview:
        """Copies the content to `room`, and returns the copy. The chunk has its old content still,
        so that its user decides when the copy counts.
        """
        content = self.read()
        copy = room[: content.size]
        # Numpy copies without the interpreter's lock.
        np.copyto(np.frombuffer(copy, np.uint8), content)
        return copy

    def use(self, copy: memoryview, room: memoryview) -> None:
        """Makes a copy, which lies in `room`, the content of this chunk."""
        self.read, self.room = partial(np.frombuffer, copy, np.uint8), room

    def leave_room(self) -> memoryview:
        """Returns the room of the copy, which may be overwritten from now on."""
        assert self.room is not None
        room, self.room = self.room, None
        return room


class Snapshot:
    """What is to be written: `planes` of all units in host states.

    It is ready once `arm` is called: then all updates of its step are applied, and no later one has
    begun. Any thread may call the methods.
    """

    def __init__(
        self,
        states: HostStates,
        planes: Sequence[str],
        copies: StagingBuffers | None = None,
        gives_way: Callable[[], bool] | None = None,
    ):
        self._copies = copies
        self._gives_way = gives_way
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._ended = False
        self._pending: deque[Chunk] = deque()
        for unit in states.layouts:
            for plane in planes:
                self._pending.extend(_cut(states, unit, plane))
        self._unsafe = Counter(chunk.unit for chunk in self._pending)
        """This many chunks of each unit are not safe yet."""
        self._copied: deque[Chunk] = deque()
        self._copying = 0
        self._waiting = 0
        self._waiting_since = 0.0
        self._waited = 0.0
        self.copied_bytes = 0
        """This many bytes were copied before they were written."""

    # ------------------------------------------------------------------ training

    def arm(self) -> None:
        """Says that the planes now hold the state to be written."""
        self._ready.set()

    def protect(self, unit: str) -> None:
        """Returns once an update may change the planes of `unit`."""
        if self._ended or (self._ready.is_set() and not self._unsafe[unit]):
            return
        self._begin_waiting()
        try:
            while not self._ready.wait(POLL_SECONDS):
                self._ask()
            while not self._is_safe(unit):
                if not self._copy(unit):
                    self._wait_for(unit)
        finally:
            self._end_waiting()

    def end(self) -> None:
        """Lets all updates go on. Threads that write the snapshot get `Ended`."""
        with self._changed:
            self._ended = True
            self._ready.set()
            self._changed.notify_all()

    @property
    def is_ready(self) -> bool:
        """Tells whether the planes hold the state to be written, or the snapshot was ended."""
        return self._ready.is_set()

    @property
    def waited_seconds(self) -> float:
        """Returns for how many seconds so far any update was held back, copying included.

        Training waited for no longer: an update may also wait for the step before it, or while the
        device computes.
        """
        with self._changed:
            going_on = time.monotonic() - self._waiting_since if self._waiting else 0.0
            return self._waited + going_on

    # ------------------------------------------------------------------ copying and writing

    def wait_until_ready(self) -> None:
        """Waits until the planes hold the state to be written. Raises Ended."""
        self._ready.wait()
        if self._ended:
            raise Ended

    def copy_ahead(self) -> None:
        """Copies chunks in order while there is room, and returns when there is no more to do."""
        self._ready.wait()
        is_copying = True
        while is_copying:
            is_copying = self._copy(None)

    def next_to_write(self) -> Chunk | None:
        """Returns the next chunk to write, or None when each chunk is written or in work.

        It waits until the snapshot is ready. Raises Ended.
        """
        self._ready.wait()
        with self._changed:
            while True:
                if self._ended:
                    raise Ended
                if self._pending:
                    return self._pending.popleft()
                if self._copied:
                    return self._copied.popleft()
                if not self._copying:
                    return None
                self._changed.wait()

    def written(self, chunk: Chunk) -> None:
        """Says that a chunk is in its file, so that its plane may change."""
        with self._changed:
            if chunk.room is None:
                self._unsafe[chunk.unit] -= 1
            else:
                self._give_back(chunk)
            self._changed.notify_all()

    def drop(self, chunk: Chunk) -> None:
        """Says that a chunk could not be written, so that the room of its copy is free again."""
        with self._changed:
            if chunk.room is not None:
                self._give_back(chunk)

    def release(self) -> None:
        """Gives back the room of all copies. No thread may write any more."""
        with self._changed:
            while self._copying:  # an update may still copy its unit
                self._changed.wait()
            while self._copied:
                self._give_back(self._copied.popleft())

    # ------------------------------------------------------------------ inside

    def _is_safe(self, unit: str) -> bool:
        return self._ended or not self._unsafe[unit]

    def _wait_for(self, unit: str) -> None:
        """Waits until something has changed, unless `unit` is safe already."""
        with self._changed:
            has_changed = self._is_safe(unit) or self._changed.wait(POLL_SECONDS)
        if not has_changed:
            self._ask()

    def _ask(self) -> None:
        """Ends the snapshot if it is to give way to the update that waits."""
        if self._gives_way is not None and self._gives_way():
            self.end()

    def _copy(self, unit: str | None) -> bool:
        """Copies the next chunk, of `unit` or of any. Returns False if there is none, or no room
        for its copy.
        """
        with self._changed:
            taken = self._taken(unit)
            if taken is None:
                return False
            chunk, room = taken
            self._copying += 1
        try:
            copy = chunk.copy_to(room)
        except BaseException:
            self._put_back(chunk, room)
            raise
        with self._changed:
            chunk.use(copy, room)
            self._copying -= 1
            self._unsafe[chunk.unit] -= 1
            self.copied_bytes += len(copy)
            self._copied.append(chunk)
            self._changed.notify_all()
        return True

    def _put_back(self, chunk: Chunk, room: memoryview) -> None:
        """Leaves a chunk that could not be copied to the writing threads."""
        assert self._copies is not None
        with self._changed:
            self._copying -= 1
            self._copies.give(room)
            self._pending.appendleft(chunk)
            self._changed.notify_all()

    def _taken(self, unit: str | None) -> tuple[Chunk, memoryview] | None:
        """Returns a chunk that nobody works on yet, of `unit` or of any, and room for its copy, if
        there are both.
        """
        if self._ended or self._copies is None:
            return None
        for chunk in self._pending:
            if unit in (None, chunk.unit):
                room = self._copies.take()
                if room is None:  # another snapshot may have it
                    return None
                self._pending.remove(chunk)
                return chunk, room
        return None

    def _give_back(self, chunk: Chunk) -> None:
        assert self._copies is not None  # a chunk with a copy came from there
        self._copies.give(chunk.leave_room())

    def _begin_waiting(self) -> None:
        with self._changed:
            if not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting += 1

    def _end_waiting(self) -> None:
        with self._changed:
            self._waiting -= 1
            if not self._waiting:
                self._waited += time.monotonic() - self._waiting_since


def _cut(states: HostStates, unit: str, plane: str) -> list[Chunk]:
    """Returns the chunks of one plane, in order, without weights that no update changes."""
    size, most = states.nbytes(unit, plane), copying.CHUNK_BYTES
    if plane == "weight_high":
        begin, end = states.layouts[unit].frozen_range(states.dtype)
        size -= end - begin
    return [
        Chunk(
            unit,
            plane,
            begin,
            partial(states.content, unit, plane, begin, min(begin + most, size)),
        )
        for begin in range(0, size, most)
    ]
