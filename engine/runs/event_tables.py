"""Rows of one kind of event as arrays, a column a field: what the curves are drawn from. Bounded,
whatever a run's length.

The thread that appends is the one that reads: a column cannot grow while an array made from it is
alive.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from engine.runs.events import Event, MemorySampled, StepFinished, UnitNorms

EXPOSED_CAUSES = ("h2d", "d2h", "optimizer", "other")
"""Causes that always have a column; a record may bring further ones."""

ROWS = 32_768
"""Rows that a table keeps at most; a power of two."""
MOST_UNITS = 4096
"""Units that norms are kept of; a damaged record may name more."""


def _whole() -> array:
    return field(default_factory=lambda: array("q"))


def _real() -> array:
    return field(default_factory=lambda: array("d"))


@dataclass
class EventTable:
    """Rows of one kind of event, an array a field, with the Unix time of each row and its number in
    the run, from 0. Steps never decrease.

    A run of any length takes a bounded memory and is drawn as fast: once there are `ROWS` rows, of
    the older half only those stay whose number a power of two divides, so that they lie evenly. The
    record keeps every row.
    """

    worked_out: ClassVar[tuple[str, ...]] = ()
    """Columns that are no field of the event."""

    step: array = _whole()
    time: array = _real()
    number: array = _whole()

    def __len__(self) -> int:
        return len(self.step)

    @property
    def count(self) -> int:
        """Rows of the run, those that were left out here included."""
        return self.number[-1] + 1 if self.number else 0

    def append(self, time: float, event: Event) -> None:
        if len(self.step) >= ROWS:
            self._thin()
        get = _fields_of(type(self))
        for column, value in zip(get(self), get(event)):
            column.append(value)
        self.time.append(time)
        self.number.append(self.number[-1] + 1 if self.number else 0)
        self.step.append(event.step)

    def arrays(self) -> Iterator[array]:
        for column in dataclasses.fields(self):
            values = getattr(self, column.name)
            yield from values.values() if isinstance(values, dict) else (values,)

    def drop_after(self, step: int) -> None:
        """Forget the rows of later steps."""
        first = bisect.bisect_right(self.step, step)
        for values in self.arrays():
            del values[first:]

    def _thin(self) -> None:
        older, stride = ROWS // 2, 2
        kept = range(older)
        while len(kept) > ROWS // 4:
            kept = [k for k in kept if self.number[k] % stride == 0]
            stride *= 2
        for values in self.arrays():
            values[:older] = array(values.typecode, [values[k] for k in kept])


@functools.cache
def _fields_of(table: type[EventTable]) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the values of the fields that a kind of table shares with its event, of either."""
    names = [
        column.name
        for column in dataclasses.fields(table)
        if column.name not in ("step", "time", "number", *table.worked_out)
    ]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda row: tuple(getattr(row, name) for name in names)


@dataclass
class StepTable(EventTable):
    """`StepFinished` by the fields that are drawn; `exposed` holds an array for each cause, 0.0
    where a step does not name it. `tokens_so_far`: of this step and all before it.
    """

    worked_out = ("exposed", "tokens_so_far")

    loss: array = _real()
    grad_norm: array = _real()
    learning_rate: array = _real()
    tokens: array = _whole()
    seconds: array = _real()
    tokens_per_second: array = _real()
    tflops: array = _real()
    data_seconds: array = _real()
    tokens_so_far: array = _whole()
    exposed: dict[str, array] = field(
        default_factory=lambda: {cause: array("d") for cause in EXPOSED_CAUSES}
    )

    def append(self, time: float, event: StepFinished) -> None:
        super().append(time, event)
        self.tokens_so_far.append(
            event.tokens + (self.tokens_so_far[-1] if self.tokens_so_far else 0)
        )
        given = event.exposed
        if not given.keys() <= self.exposed.keys():
            for cause in given:
                if cause not in self.exposed:
                    self.exposed[cause] = array("d", bytes(8 * (len(self) - 1)))
        for cause, seconds in self.exposed.items():
            seconds.append(given.get(cause, 0.0))


@dataclass
class MemoryTable(EventTable):
    """`MemorySampled` by the fields that are drawn, in bytes and watts. `energy`: watt hours that
    the card took while the run trained, for steps that a resume did again too.
    """

    worked_out = ("energy",)

    host_rss: array = _whole()
    host_pinned: array = _whole()
    gpu_allocated: array = _whole()
    gpu_reserved: array = _whole()
    gpu_peak: array = _whole()
    gpu_driver: array = _whole()
    gpu_total: array = _whole()
    host_total: array = _whole()
    power: array = _real()
    energy: array = _real()

    def append(self, time: float, event: MemorySampled, energy: float = 0.0) -> None:
        super().append(time, event)
        self.energy.append(energy)

    def watt_hours(self, time: float, event: MemorySampled, session_time: float | None) -> float:
        """What the card took from the sample before to `event`; nothing where that was before the
        session began.
        """
        if not len(self) or self.time[-1] < (session_time or 0.0):
            return 0.0
        return (self.power[-1] + event.power) / 2 * max(0.0, time - self.time[-1]) / 3600


@dataclass
class EvalTable(EventTable):
    """`EvalFinished`: its loss."""

    loss: array = _real()


@dataclass
class NormTable(EventTable):
    """`UnitNorms`: in `norms` an array for each unit by its place, 0.0 where a step does not name
    it.
    """

    worked_out = ("norms",)

    norms: dict[int, array] = field(default_factory=dict)

    def append(self, time: float, event: UnitNorms) -> None:
        super().append(time, event)
        named = event.norms[:MOST_UNITS]
        for unit in range(len(self.norms), len(named)):
            self.norms[unit] = array("d", bytes(8 * (len(self) - 1)))
        for unit, values in self.norms.items():
            values.append(named[unit] if unit < len(named) else 0.0)
