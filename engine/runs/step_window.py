"""Steps of a record in a row, read by column: the lines of a long record nearly all are of steps that follow each other, each
with a sample of the memory after it, and one at a time they take more than twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.runs.events import Event, MemorySampled, Record, StepFinished, are_good_envelopes, plain_form
from engine.runs.lines import plain_start, plain_values

LEAST, MOST = 16, 4096
"""Lines that are worth it; lines that are held at a time."""
STARTS = tuple(plain_start(kind) for kind in (StepFinished, MemorySampled))

Table = dict[str, Sequence[Any]]
"""Values by field, a row an event."""


@dataclass(frozen=True)
class Stretch(Event, is_recorded=False):
    """What a reader puts in the place of `StepFinished` whose steps count on by one, and of `MemorySampled` at them. The
    envelope is that of the last line."""

    steps: Table = field(repr=False)
    step_times: Sequence[float] = field(repr=False)
    exposed: Table = field(repr=False)
    """Of the steps, by cause."""
    last_step_line: int
    """From 1 for the first line here."""
    samples: Table = field(repr=False)
    """Without a row where no memory was sampled."""
    sample_times: Sequence[float] = field(repr=False)
    rows: list[dict[str, Any]] = field(repr=False)
    """The lines."""

    def records(self) -> list[Record]:
        """One by one, once: uses `rows` up."""
        return [Record.from_plain(row) for row in self.rows]


def read_stretch(lines: Sequence[bytes]) -> Record | None:
    """Lines that begin as `STARTS` as one record; None unless each is as this version writes it, and they are regular."""
    try:
        rows = plain_values(lines)
    except ValueError:
        return None
    steps = [row for row in rows if row.get("kind") == StepFinished.kind]
    samples = [row for row in rows if row.get("kind") == MemorySampled.kind]
    if len(steps) + len(samples) != len(rows) or not steps or rows[0] is not steps[0]:
        return None
    step_table, sample_table = _table(StepFinished, steps), _table(MemorySampled, samples)
    if step_table is None or sample_table is None:
        return None
    numbers = step_table["step"]
    if numbers[0] < 1 or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))) or not _follow(rows):
        return None
    exposed = _by_cause(step_table.pop("exposed"))
    if exposed is None:
        return None
    last = rows[-1]
    last_step_line = next(line for line in range(len(rows), 0, -1) if rows[line - 1] is steps[-1])
    return Record(last["run_id"], last["seq"], last["time"], Stretch(
        step_table, step_table.pop("time"), exposed, last_step_line, sample_table, sample_table.pop("time", ()), rows))


def _table(event_type: type[Event], rows: list[dict[str, Any]]) -> Table | None:
    """The fields and the time of these lines by column, none for no lines; None where a value is not what it must be."""
    if not rows:
        return {}
    form = plain_form(event_type)
    if set(map(tuple, rows)) != {form.names}:
        return None
    table = dict(zip(form.names, zip(*map(dict.values, rows))))
    kinds, run_ids, seqs, times = (table.pop(name) for name in ("kind", "run_id", "seq", "time"))
    if not are_good_envelopes(run_ids, seqs, times) or not form.holds_all(list(table.values())):
        return None
    return {**table, "time": times}


def _follow(rows: list[dict[str, Any]]) -> bool:
    """Whether every sample is of the step before it."""
    step = None
    for row in rows:
        if row["kind"] == StepFinished.kind:
            step = row["step"]
        elif row["step"] != step:
            return False
    return True


def _by_cause(exposed: Sequence[dict[str, float]]) -> Table | None:
    """By cause; None where not all name the same ones."""
    if len(set(map(tuple, exposed))) != 1:
        return None
    return dict(zip(exposed[0], zip(*map(dict.values, exposed))))
