"""Tables hold the rows of one kind of event as arrays, a column for each field.

The curves are drawn from them. Their size is bounded, whatever a run's length.

The thread that appends must be the one that reads: a column cannot grow while an array that shares
its memory is alive.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar

from engine.runs.events import EvalFinished, MemorySampled, StepFinished, UnitNorms

EXPOSED_CAUSES = ("h2d", "d2h", "optimizer", "other")
"""These causes always have a column; a record may bring further ones."""

ROWS = 32_768
"""A table keeps at most this many rows. The number is a power of two."""
MOST_UNITS = 4096
"""Norms of at most this many units are kept, since a damaged record may name any number."""

StepEvent = StepFinished | MemorySampled | EvalFinished | UnitNorms
"""These kinds of events have a table; each event of them belongs to a step."""
E = TypeVar("E", bound=StepEvent)


def _integers() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


def _zeros(count: int) -> array[float]:
    return array("d", bytes(8 * count))


@dataclass
class EventTable(Generic[E]):
    """An `EventTable` holds the rows of one kind of event, an array for each field.

    Each row also has its Unix `time` and its `number` in the run, counted from 0. Steps never
    decrease.

    A run of any length takes a bounded memory and is drawn equally fast: once there are `ROWS`
    rows, the older half is thinned out to the rows whose number is a multiple of some power of two,
    so that they lie evenly. The record keeps every row.
    """

    worked_out: ClassVar[tuple[str, ...]] = ()
    """These columns are no fields of the event; the table works them out."""

    step: array[int] = field(default_factory=_integers)
    time: array[float] = field(default_factory=_floats)
    number: array[int] = field(default_factory=_integers)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def count(self) -> int:
        """Returns the number of rows of the run, those that were thinned out included."""
        return self.number[-1] + 1 if self.number else 0

    def append(self, time: float, event: E) -> None:
        if len(self.step) >= ROWS:
            self._thin_out()
        get = _fields_of(type(self))  # type: ignore[arg-type]  # a class has a hash
        for column, value in zip(get(self), get(event)):
            column.append(value)
        self.time.append(time)
        self.number.append(self.number[-1] + 1 if self.number else 0)
        self.step.append(event.step)

    def arrays(self) -> Iterator[array[Any]]:
        """Yields every array of the table, all of one length."""
        for column in dataclasses.fields(self):
            values = getattr(self, column.name)
            if isinstance(values, dict):
                yield from values.values()
            else:
                yield values

    def drop_after(self, step: int) -> None:
        """Forgets the rows of steps after `step`."""
        first = bisect.bisect_right(self.step, step)
        for values in self.arrays():
            del values[first:]

    def _thin_out(self) -> None:
        """Keeps about a quarter of `ROWS` rows of the older half.

        Rows that an earlier call kept are multiples of its stride, so the stride is doubled until
        few enough rows remain.
        """
        older, stride = ROWS // 2, 2
        kept: Sequence[int] = range(older)
        while len(kept) > ROWS // 4:
            kept = [row for row in kept if self.number[row] % stride == 0]
            stride *= 2
        for values in self.arrays():
            values[:older] = array(values.typecode, [values[row] for row in kept])


@functools.cache
def _fields_of(table: type[EventTable]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads the fields which a kind of table shares with its event.

    The function takes a table, and gives its columns, or an event, and gives its values.
    """
    own = ("step", "time", "number", *table.worked_out)
    names = [column.name for column in dataclasses.fields(table) if column.name not in own]
    if len(names) > 1:
        return attrgetter(*names)
    # attrgetter gives a tuple only for several names.
    return lambda row: tuple(getattr(row, name) for name in names)


@dataclass
class StepTable(EventTable[StepFinished]):
    """A `StepTable` holds the drawn fields of `StepFinished`.

    `exposed` holds an array for each cause, with 0.0 where a step does not name it.
    `tokens_so_far` counts the tokens of a step and of all steps before it.
    """

    worked_out = ("exposed", "tokens_so_far")

    loss: array[float] = field(default_factory=_floats)
    grad_norm: array[float] = field(default_factory=_floats)
    learning_rate: array[float] = field(default_factory=_floats)
    tokens: array[int] = field(default_factory=_integers)
    seconds: array[float] = field(default_factory=_floats)
    tokens_per_second: array[float] = field(default_factory=_floats)
    tflops: array[float] = field(default_factory=_floats)
    data_seconds: array[float] = field(default_factory=_floats)
    tokens_so_far: array[int] = field(default_factory=_integers)
    exposed: dict[str, array[float]] = field(
        default_factory=lambda: {cause: _floats() for cause in EXPOSED_CAUSES}
    )

    def append(self, time: float, event: StepFinished) -> None:
        super().append(time, event)
        before = self.tokens_so_far[-1] if self.tokens_so_far else 0
        self.tokens_so_far.append(before + event.tokens)
        given = event.exposed
        if not given.keys() <= self.exposed.keys():
            for cause in given:
                if cause not in self.exposed:
                    self.exposed[cause] = _zeros(len(self) - 1)
        for cause, seconds in self.exposed.items():
            seconds.append(given.get(cause, 0.0))


@dataclass
class MemoryTable(EventTable[MemorySampled]):
    """A `MemoryTable` holds the drawn fields of `MemorySampled`, in bytes and watts.

    `energy` counts the watt hours that the card took while the run trained, those for steps that a
    resume did again included.
    """

    worked_out = ("energy",)

    host_rss: array[int] = field(default_factory=_integers)
    host_pinned: array[int] = field(default_factory=_integers)
    gpu_allocated: array[int] = field(default_factory=_integers)
    gpu_reserved: array[int] = field(default_factory=_integers)
    gpu_peak: array[int] = field(default_factory=_integers)
    gpu_driver: array[int] = field(default_factory=_integers)
    gpu_total: array[int] = field(default_factory=_integers)
    host_total: array[int] = field(default_factory=_integers)
    power: array[float] = field(default_factory=_floats)
    energy: array[float] = field(default_factory=_floats)

    def append(self, time: float, event: MemorySampled, energy: float = 0.0) -> None:
        super().append(time, event)
        self.energy.append(energy)

    def watt_hours(self, time: float, event: MemorySampled, session_time: float | None) -> float:
        """Returns the watt hours that the card took between the latest sample and `event`.

        The power in between counts as the mean of both. Returns 0.0 where the latest sample was
        taken before the session began.
        """
        if not len(self) or self.time[-1] < (session_time or 0.0):
            return 0.0
        return (self.power[-1] + event.power) / 2 * max(0.0, time - self.time[-1]) / 3600


@dataclass
class EvalTable(EventTable[EvalFinished]):
    """An `EvalTable` holds the losses of `EvalFinished`."""

    loss: array[float] = field(default_factory=_floats)


@dataclass
class NormTable(EventTable[UnitNorms]):
    """A `NormTable` holds the norms of `UnitNorms`.

    `norms` has an array for each unit by its place, with 0.0 where a step does not name the unit.
    """

    worked_out = ("norms",)

    norms: dict[int, array[float]] = field(default_factory=dict)

    def append(self, time: float, event: UnitNorms) -> None:
        super().append(time, event)
        named = event.norms[:MOST_UNITS]
        for unit in range(len(self.norms), len(named)):
            self.norms[unit] = _zeros(len(self) - 1)
        for unit, values in self.norms.items():
            values.append(named[unit] if unit < len(named) else 0.0)
