"""Rows of one kind of event as arrays, one column for each field.

The curves are drawn from these tables. Their size is bounded, however long a run is.

Rows must be appended and read by the same thread: a column cannot grow while another array shares
its memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar

from engine.runs.record.events import EvalFinished, MemorySampled, StepFinished, UnitNorms

EXPOSED_CAUSES = ("h2d", "d2h", "optimizer", "other")
"""Causes that always have a column; a record may contain others as well."""

ROWS = 32_768
"""Number of rows that a table keeps, at most. It must be a power of two."""
MOST_UNITS = 4096
"""Number of units whose norms are kept, at most, since a damaged record may contain any number of
them.
"""

MOST_NAMES = 64
"""Number of names whose values are kept, at most, for the same reason."""

StepEvent = StepFinished | MemorySampled | EvalFinished | UnitNorms
"""Events that have a table; each belongs to a step."""
E = TypeVar("E", bound=StepEvent)


def _integers() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


def _zeros(count: int) -> array[float]:
    return array("d", bytes(8 * count))


def _append_named(
    columns: dict[str, array[float]], given: Mapping[str, float], row: int, absent: float
) -> None:
    """Appends the values of an event by name as row number `row` of these columns. A name that is
    new has the value `absent` in all rows before, and so has one that the event lacks.
    """
    for name in given:
        if name not in columns and len(columns) < MOST_NAMES:
            columns[name] = array("d", [absent]) * row
    for name, values in columns.items():
        values.append(given.get(name, absent))


@dataclass
class EventTable(Generic[E]):
    """The rows of one kind of event, with one array for each field.

    Each row also has its Unix `time` and its `number` in the run, counted from 0. Steps never
    decrease.

    The memory and the drawing time of a table are bounded for a run of any length: once there are
    `ROWS` rows, the older half is reduced to the rows whose number is a multiple of some power of
    two, so that they are evenly spaced. The record keeps every row.
    """

    worked_out: ClassVar[tuple[str, ...]] = ()
    """Columns that are not fields of the event; the table computes them."""

    step: array[int] = field(default_factory=_integers)
    time: array[float] = field(default_factory=_floats)
    number: array[int] = field(default_factory=_integers)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def count(self) -> int:
        """Number of rows that the run has had, including rows that were thinned out."""
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
        """Yields every array of the table; all have the same length."""
        for column in dataclasses.fields(self):
            values = getattr(self, column.name)
            if isinstance(values, dict):
                yield from values.values()
            else:
                yield values

    def drop_after(self, step: int) -> None:
        """Removes the rows of steps after `step`."""
        first = bisect.bisect_right(self.step, step)
        for values in self.arrays():
            del values[first:]

    def _thin_out(self) -> None:
        """Reduces the older half of the rows to about a quarter of `ROWS`.

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
    """Returns a function that reads the fields that a type of table shares with its event.

    Given a table, the function returns its columns; given an event, it returns its values.
    """
    own = ("step", "time", "number", *table.worked_out)
    names = [column.name for column in dataclasses.fields(table) if column.name not in own]
    if len(names) > 1:
        return attrgetter(*names)
    # attrgetter returns a tuple only when it has several names.
    return lambda row: tuple(getattr(row, name) for name in names)


@dataclass
class StepTable(EventTable[StepFinished]):
    """Fields of `StepFinished` that are drawn.

    `exposed` holds an array for each cause, with 0.0 for a step that does not name the cause, and
    `preference` one for each figure of pairs, with NaN for a step without.
    `tokens_so_far` counts the tokens of a step and of all steps before it.
    """

    worked_out = ("exposed", "preference", "tokens_so_far")

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
    preference: dict[str, array[float]] = field(default_factory=dict)

    def append(self, time: float, event: StepFinished) -> None:
        super().append(time, event)
        before = self.tokens_so_far[-1] if self.tokens_so_far else 0
        self.tokens_so_far.append(before + event.tokens)
        _append_named(self.exposed, event.exposed, len(self) - 1, 0.0)
        _append_named(self.preference, event.preference, len(self) - 1, math.nan)


@dataclass
class MemoryTable(EventTable[MemorySampled]):
    """Fields of `MemorySampled` that are drawn or judged, in bytes and watts.

    `energy` counts the watt hours that the card used while the run trained, including those for
    steps that were repeated after a resume.
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
    cpu_others: array[float] = field(default_factory=_floats)
    energy: array[float] = field(default_factory=_floats)

    def append(self, time: float, event: MemorySampled, energy: float = 0.0) -> None:
        super().append(time, event)
        self.energy.append(energy)

    def watt_hours(self, time: float, event: MemorySampled, session_time: float | None) -> float:
        """Returns the watt hours that the card used between the latest sample and `event`.

        The power in between is taken as the mean of the two samples. Returns 0.0 if the latest
        sample was taken before the session began.
        """
        if not len(self) or self.time[-1] < (session_time or 0.0):
            return 0.0
        return (self.power[-1] + event.power) / 2 * max(0.0, time - self.time[-1]) / 3600


@dataclass
class EvalTable(EventTable[EvalFinished]):
    """The losses of `EvalFinished`, the numbers of their tokens, and the figures of pairs as in a
    `StepTable`.
    """

    worked_out = ("preference",)

    loss: array[float] = field(default_factory=_floats)
    loss_tokens: array[int] = field(default_factory=_integers)
    preference: dict[str, array[float]] = field(default_factory=dict)

    def append(self, time: float, event: EvalFinished) -> None:
        super().append(time, event)
        _append_named(self.preference, event.preference, len(self) - 1, math.nan)


@dataclass
class NormTable(EventTable[UnitNorms]):
    """Norms of `UnitNorms`.

    `norms` has an array for each unit, by the unit's index, with 0.0 for a step that does not name
    the unit.
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
