"""The last of a plan's three passes: what each op must wait for, from what all of them read and
write. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.plan.buffers import Buffer, Content
from engine.plan.ops import Lane, Op


@dataclass(slots=True)
class Draft:
    """An op before it is known what it waits for."""

    type: type[Op]
    unit: str
    reads: Mapping[Buffer, Content]
    writes: Mapping[Buffer, Content]
    fields: Mapping[str, Any]
    """Of its kind."""


def with_waits(drafts: Sequence[Draft]) -> tuple[Op, ...]:
    """The ops of a step in the steady state: the same step went before it, and another follows.

    An op waits for whoever filled what it reads, and for whoever filled or read what it overwrites
    (read after write, write after write, write after read). A wait is left out that the order of a
    lane, or other waits, imply: each op has a vector clock, the latest op of every lane that is
    known to have finished before it.
    """
    clocks = _Clocks()
    for draft in drafts:
        clocks.waits(draft)
    count, ops = len(drafts), []
    for index, draft in enumerate(drafts):
        waits = sorted(clocks.waits(draft))
        ops.append(
            draft.type(
                index,
                draft.unit,
                tuple(draft.reads.items()),
                tuple(draft.writes.items()),
                tuple(wait - count for wait in waits if wait >= count),
                tuple(wait for wait in waits if wait < count),
                **draft.fields,
            )
        )
    return tuple(ops)


@dataclass
class _Clocks:
    """Who touched each buffer last, and what is known to have finished, after the ops that were
    looked at so far.
    """

    _lanes: list[Lane] = field(default_factory=list)
    _clocks: list[dict[Lane, int]] = field(default_factory=list)
    _latest: dict[Lane, int] = field(default_factory=dict)
    _writer: dict[Buffer, int] = field(default_factory=dict)
    _readers: dict[Buffer, list[int]] = field(default_factory=dict)

    def waits(self, draft: Draft) -> list[int]:
        """The ops that the next one, `draft`, waits for; it counts as looked at from then on."""
        index, lane = len(self._lanes), draft.type.lane
        clock = self._clocks[self._latest[lane]].copy() if lane in self._latest else {}
        waits = []
        for need in sorted(self._needs(draft), reverse=True):
            if clock.get(self._lanes[need], -1) >= need:
                continue
            waits.append(need)
            for name, value in self._clocks[need].items():
                if value > clock.get(name, -1):
                    clock[name] = value
        clock[lane] = index
        self._clocks.append(clock)
        self._lanes.append(lane)
        self._latest[lane] = index
        for buffer in draft.reads:
            self._readers.setdefault(buffer, []).append(index)
        for buffer in draft.writes:
            self._writer[buffer] = index
            self._readers[buffer] = []
        return waits

    def _needs(self, draft: Draft) -> set[int]:
        writer = self._writer
        needs = {writer[buffer] for buffer in draft.reads if buffer in writer}
        for buffer in draft.writes:
            if buffer in writer:
                needs.add(writer[buffer])
            needs.update(self._readers.get(buffer, ()))
        return needs
