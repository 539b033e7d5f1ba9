"""The last of a plan's three passes finds what each op must wait for, from what all ops read and
write. No torch.

- An op waits for the op that last wrote each buffer that it reads (read after write).
- It waits for the op that last wrote each buffer that it overwrites, and for every op that has read
  that buffer since (write after write, write after read). This is why a prefetch cannot overwrite a
  slot in use: it writes the slot, so it waits for all ops that compute from the slot's weights.
- A wait is left out where the order of a lane, or another wait, implies it. Each op has a vector
  clock, which gives for every lane the latest op that has finished before the op starts. Where this
  clock already covers an op that must have finished, no wait is added.
- The ops that must have finished are checked from the latest to the earliest, because a later op's
  clock often covers the earlier ones. So few waits remain, and each of them is needed.
- Plans of consecutive steps are equal, so the drafts of one step are processed twice: in the second
  pass, a wait for an op of the first pass is a wait for the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.planning.schedule.buffers import Buffer, Content
from engine.planning.schedule.ops import Lane, Op

# ---------------------------------------------------------------------- vector clocks

# A vector clock gives, for each lane, the latest op that is known to have finished. No torch.
#
# Ops of one lane run in order, so the latest finished op of a lane implies that all ops before it
# have finished. When an op waits for another, everything in the other's clock has finished too, so
# the clocks are merged (Mattern, "Virtual time and global states of distributed systems", 1989).


VectorClock = dict[Lane, int]
"""Position of the latest op that has finished on each lane."""


def merge(clock: VectorClock, other: VectorClock) -> None:
    """Raises the positions in `clock` to those in `other` where the latter are later."""
    for lane, position in other.items():
        if position > clock.get(lane, -1):
            clock[lane] = position


# ---------------------------------------------------------------------- derive waits


@dataclass(slots=True)
class Draft:
    """A draft is an op whose waits have not been derived yet."""

    type: type[Op]
    unit: str
    reads: Mapping[Buffer, Content]
    writes: Mapping[Buffer, Content]
    fields: Mapping[str, Any]
    """Fields specific to the op's kind, by name."""

    def op(
        self, index: int, waits: tuple[int, ...] = (), waits_previous: tuple[int, ...] = ()
    ) -> Op:
        """Returns the op at this place of its plan, with its waits."""
        return self.type(
            index,
            self.unit,
            tuple(self.reads.items()),
            tuple(self.writes.items()),
            waits=waits,
            waits_previous=waits_previous,
            **self.fields,
        )


def with_waits(drafts: Sequence[Draft]) -> tuple[Op, ...]:
    """Returns the ops of a step in the steady state: the same step went before it, and another
    follows.
    """
    history = _History()
    for draft in drafts:  # the step before
        history.add(draft)
    count = len(drafts)
    ops = []
    for index, draft in enumerate(drafts):
        needed = sorted(history.add(draft))
        waits = tuple(position - count for position in needed if position >= count)
        waits_previous = tuple(position for position in needed if position < count)
        ops.append(draft.op(index, waits, waits_previous))
    return tuple(ops)


def without_waits(drafts: Sequence[Draft]) -> tuple[Op, ...]:
    """Returns the ops of a step in program order, without what they wait for: `simulate` needs no
    waits, and three fifths of the time of a plan go into finding them.
    """
    return tuple(draft.op(index) for index, draft in enumerate(drafts))


@dataclass
class _History:
    """A history records, for the ops processed so far, which of them used each buffer last and what
    each of them implies to have finished. Positions count over both steps.
    """

    _lanes: list[Lane] = field(default_factory=list)
    """Lane of the op at each position."""
    _clocks: list[VectorClock] = field(default_factory=list)
    """The clock of the op at each position; once that op has finished, everything in its clock has
    too.
    """
    _latest: dict[Lane, int] = field(default_factory=dict)
    _writer: dict[Buffer, int] = field(default_factory=dict)
    _readers: dict[Buffer, list[int]] = field(default_factory=dict)
    """Ops that have read a buffer since it was last written."""

    def add(self, draft: Draft) -> list[int]:
        """Adds `draft` as the next op, and returns the positions of the ops that it waits for."""
        position = len(self._lanes)
        lane = draft.type.lane
        clock = self._clocks[self._latest[lane]].copy() if lane in self._latest else {}
        waits = []
        for need in sorted(self._needs(draft), reverse=True):
            if clock.get(self._lanes[need], -1) >= need:
                continue
            waits.append(need)
            merge(clock, self._clocks[need])
        clock[lane] = position
        self._clocks.append(clock)
        self._lanes.append(lane)
        self._latest[lane] = position
        for buffer in draft.reads:
            self._readers.setdefault(buffer, []).append(position)
        for buffer in draft.writes:
            self._writer[buffer] = position
            self._readers[buffer] = []
        return waits

    def _needs(self, draft: Draft) -> set[int]:
        """Returns the ops that must have finished before `draft` starts, implied ones included."""
        writer = self._writer
        needs = {writer[buffer] for buffer in draft.reads if buffer in writer}
        for buffer in draft.writes:
            if buffer in writer:
                needs.add(writer[buffer])
            needs.update(self._readers.get(buffer, ()))
        return needs
