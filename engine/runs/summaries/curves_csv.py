"""The curves of a run as CSV, with one row for each step.

A row has what the step measured, and the evaluation and the answers after it, where there were any.
Steps that a resume discarded have no row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.runs.record.events import (
    EvalFinished,
    Event,
    ExactMatchMeasured,
    RunStarted,
    StepFinished,
)
from engine.runs.record.following import replay

_OF_STEP = (
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "loss_tokens",
    "seconds",
    "tokens_per_second",
    "tflops",
)
COLUMNS = ("step", "unix_time", *_OF_STEP, "validation_loss", "answered_exactly", "prompts_asked")
"""Names of the columns. `seconds` is the time of the step; `unix_time` is when it was over, by the
clock of the machine.
"""


def curves_csv(path: Path) -> Iterator[str]:
    """Yields the lines of the CSV for the record in the file `path`, the names of the columns
    first. Step 0 is the state before the first step. Raises RunError if the record cannot be read.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in replay(path):
        _apply(rows, record.time, record.event)
    yield _line(COLUMNS)
    for step in sorted(rows):
        row = rows[step] | {"step": step}
        yield _line([row.get(name, "") for name in COLUMNS])


def _apply(rows: dict[int, dict[str, Any]], time: float, event: Event) -> None:
    if isinstance(event, RunStarted):
        kept = -1 if event.resumed_step is None else event.resumed_step
        for step in [step for step in rows if step > kept]:
            del rows[step]
    elif isinstance(event, StepFinished):
        values = {name: getattr(event, name) for name in _OF_STEP}
        rows.setdefault(event.step, {}).update(values, unix_time=round(time, 3))
    elif isinstance(event, EvalFinished):
        rows.setdefault(event.step, {})["validation_loss"] = event.loss
    elif isinstance(event, ExactMatchMeasured):
        answers = {"answered_exactly": event.correct, "prompts_asked": event.total}
        rows.setdefault(event.step, {}).update(answers)


def _line(values: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
