"""A `PlaneVersion` says which optimizer step's state the planes of host states hold.

The lanes report to it when they begin to write a step into the planes and when all of it is
written. So a run that fails at any moment knows whether its planes are whole, and of which step:

- Before the first update of a step, the planes hold the step before.
- With every optimizer on the host, updates need the device no more once the first one has begun.
  That one waits for the gradient of the embedding, which is the last one to leave the device. So a
  device that is lost then stops no update, and the planes soon hold the whole step.
- With an optimizer on the device, a device that is lost among the updates leaves a mixture.

A checkpoint, and what keeps the best weights, may read the planes while steps go on. An op that is
about to change planes then waits until each reader lets it
(`engine.training.checkpoints.plane_snapshot`). No plan knows of this wait: it delays an op on its
own lane, and delays change no result (law 3).

Units that live on the device are updated on the lane COMPUTE, whose ops are launched long before
the device runs them, and before the step before is complete. So lanes write under a lock, and a
step that began counts from its launch on. Readers come and go between two steps, before any op of a
later step is submitted, or while the later step has begun no update.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class PlaneReader(Protocol):
    """Reads the planes as they are after one step. Any thread may call it."""

    @property
    def is_ready(self) -> bool:
        """Whether `arm` or `end` was called."""

    def arm(self) -> None:
        """Says that the planes now hold that step, and no later one."""

    def protect(self, unit: str) -> None:
        """Returns once an op of a later step may change the planes of `unit`."""

    def end(self) -> None:
        """Says that the planes will not be read any more; every op may continue."""


class PlaneVersion:
    """Version of the planes of a `HostStates`; steps count from 1, and 0 is before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._applied = 0
        self._writing = 0
        self._skipped: list[int] = []
        self._readers: tuple[tuple[int, PlaneReader], ...] = ()

    @property
    def step(self) -> int:
        """Latest step that is written completely, or that was skipped after one."""
        return self._applied

    @property
    def is_mixed(self) -> bool:
        """Whether some but not all planes hold a later step than `step`."""
        return self._writing != self._applied

    @property
    def writing(self) -> int:
        """The step whose updates began last."""
        return self._writing

    @property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were taken without an update."""
        return tuple(self._skipped)

    def update_number(self, step: int) -> int:
        """Returns which update of AdamW step `step` is. Skipped steps are not counted, as
        torch's GradScaler does not count them.
        """
        return step - len(self._skipped)

    def restore(self, step: int, skipped: Sequence[int] = ()) -> None:
        """Says that the planes were filled with the state after `step`."""
        self._applied = self._writing = step
        self._skipped = list(skipped)

    def begin(self, step: int, unit: str) -> None:
        """Says that an update of `step` is about to change planes of `unit`. It returns once no
        reader needs these planes as they are.
        """
        while True:
            # Read once, since another thread may release one of them.
            readers = self._readers
            for of_step, reader in readers:
                if step > of_step:
                    reader.protect(unit)
            with self._lock:
                # Another reader may have come meanwhile.
                if self._readers is readers:
                    self._writing = max(self._writing, step)
                    return

    def complete(self, step: int) -> None:
        """Says that every update of `step` is in the planes."""
        with self._lock:
            self._applied = step
            self._writing = max(self._writing, step)
        self._arm()

    def abort(self) -> None:
        """Says that the updates that began changed no bit.

        That is so for a step whose norm is not finite: updates on the device write back what they
        read, and those on the host do not begin.
        """
        self._writing = self._applied

    def skip(self, step: int) -> None:
        """Says that `step` is over without an update. The planes must be whole."""
        self.complete(step)
        self._skipped.append(step)

    # ------------------------------------------------------------------ readers of the planes

    def read_by(self, step: int, reader: PlaneReader) -> bool:
        """Lets `reader` read the planes as they are after `step`. Returns False where the updates
        of a later step have begun, and the reader is not taken.
        """
        with self._lock:
            if self._writing > step:
                return False
            self._readers += ((step, reader),)
        self._arm()  # the step may be complete already
        return True

    def release(self, reader: PlaneReader) -> None:
        """Says that `reader` is done."""
        with self._lock:
            self._readers = tuple(entry for entry in self._readers if entry[1] is not reader)

    def fail(self) -> None:
        """Says that a step has failed. A reader whose step is not complete would wait for ever, and
        so would the ops that wait for it.
        """
        for _, reader in self._readers:
            if not reader.is_ready:
                reader.end()

    def _arm(self) -> None:
        for step, reader in self._readers:
            if step == self._applied and not reader.is_ready:
                reader.arm()
