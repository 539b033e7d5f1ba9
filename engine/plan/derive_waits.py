"""The last of a plan's three passes finds what each op must wait for, from what all ops read and
write. No torch.

- An op waits for the op that last wrote each buffer that it reads (read after write).
- It waits for the op that last wrote each buffer that it overwrites, and for every op that has read
  that buffer since (write after write, write after read). This is why a prefetch cannot overwrite a
  slot in use: it writes the slot, so it waits for all ops that compute from the slot's weights.
- A wait is left out where the order of a lane, or another wait, implies it. Each op has a vector
  clock, which knows the latest op of every lane that has finished before the op starts. An op whose
  need is in its clock already needs no wait for it.
- The needs are looked at from the latest op to the earliest, because a later op's clock often
  covers the earlier ones. So few waits remain, and each of them is needed.
- Plans of consecutive steps are equal. The drafts of one step are looked at twice: in the second
  turn, waits for ops of the first turn are waits for the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.plan.buffers import Buffer, Content
from engine.plan.ops import Lane, Op
from engine.plan.vector_clocks import VectorClock, merge


@dataclass(slots=True)
class Draft:
    """A draft is an op before it is known what the op waits for."""

    type: type[Op]
    unit: str
    reads: Mapping[Buffer, Content]
    writes: Mapping[Buffer, Content]
    fields: Mapping[str, Any]
    """These are the fields that only ops of its kind have."""


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
        ops.append(
            draft.type(
                index,
                draft.unit,
                tuple(draft.reads.items()),
                tuple(draft.writes.items()),
                waits=tuple(position - count for position in needed if position >= count),
                waits_previous=tuple(position for position in needed if position < count),
                **draft.fields,
            )
        )
    return tuple(ops)


@dataclass
class _History:
    """A history knows, of the ops that were looked at so far, which touched each buffer last and
    which are known to have finished. A position counts the ops over both steps.
    """

    _lanes: list[Lane] = field(default_factory=list)
    """The op at each position runs on this lane."""
    _clocks: list[VectorClock] = field(default_factory=list)
    """Once the op at a position has finished, so has everything in its clock."""
    _latest: dict[Lane, int] = field(default_factory=dict)
    _writer: dict[Buffer, int] = field(default_factory=dict)
    _readers: dict[Buffer, list[int]] = field(default_factory=dict)
    """These ops have read a buffer since it was last written."""

    def add(self, draft: Draft) -> list[int]:
        """Returns the positions of the ops that `draft`, the next op, waits for, and adds it."""
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
