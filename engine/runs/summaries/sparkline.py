"""The curves of a run in a list of runs: its loss as a small curve, the lowest validation loss, the
number of validation prompts that were answered exactly, and whether the run has made its model
worse.

A record is read once and few of its lines are parsed, so that a list of a thousand runs can have a
sparkline for each.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine.runs.record.before_training import (
    NOISE_STEPS,
    Worse,
    is_better_at,
    of_evaluations,
    of_training,
)
from engine.runs.record.evaluations import Evaluated, RowLosses, of_the_same_rows
from engine.runs.record.events import (
    BestKept,
    DataPrepared,
    EvalFinished,
    Event,
    ExactMatchMeasured,
    ExportWritten,
    RunEnded,
    RunStarted,
    StepFinished,
)
from engine.runs.record.lines import complete_lines, line_kind, open_record, parse_line

POINTS = 40
"""Number of points of the small curve, at most."""
_PARSED = 400
"""Number of lines of steps that are parsed, at most. They are spread evenly over the run."""


@dataclass(frozen=True)
class Sparkline:
    """Curve and numbers of a run; a run that has made no step has none."""

    losses: tuple[float, ...] = ()
    """Means of the training loss over equal parts of the run, in order."""
    validation_loss: float | None = None
    """Lowest validation loss after a step, or None without evaluations."""
    correct: int = 0
    total: int = 0
    """Number of the `total` validation prompts that were answered exactly at the newest measurement
    after a step. `total` is 0 if none was asked since training began.
    """
    before: float | None = None
    """Validation loss before training, or None if it was not evaluated."""
    worse: Worse | None = None
    """How the latest weights are worse than those before training."""
    is_over: bool = False
    """The record has the end of the run."""
    leaves_better: bool = False
    """Weights that are better than those before training are kept, and no others are exported."""

    @property
    def accuracy(self) -> float | None:
        """Fraction of validation prompts that were answered exactly, or None."""
        return self.correct / self.total if self.total else None


NO_SPARKLINE = Sparkline()


def read_sparkline(path: Path) -> Sparkline:
    """Returns the sparkline of the record in the file `path`; an empty one if there is no such file
    or it cannot be read. Lines that are damaged or not complete are left out.
    """
    reader = _Reader()
    try:
        with open_record(path) as file:
            for line, _ in complete_lines(file):
                reader.add(line)
    except OSError:
        return NO_SPARKLINE
    return reader.sparkline()


class _Reader:
    """Takes the lines of a record in order, and keeps few of those of the steps."""

    def __init__(self) -> None:
        self._first = b""
        """The line of the first step."""
        self._latest: deque[bytes] = deque(maxlen=NOISE_STEPS)
        """The lines of the latest steps."""
        self._kept: list[bytes] = []
        """Every `_stride`-th line of a step, and every line of another kind that is needed."""
        self._steps = 0
        self._stride = 1

    def add(self, line: bytes) -> None:
        """Adds the next line."""
        kind = line_kind(line)
        if kind == StepFinished.kind:
            self._steps += 1
            self._first = self._first or line
            self._latest.append(line)
            if self._steps % self._stride == 0:
                self._kept.append(line)
            if self._steps == self._stride * _PARSED:
                self._thin_out()
        elif kind in _OTHERS:
            self._kept.append(line)
            if kind == RunStarted.kind:
                self._go_back(line)

    def _go_back(self, started: bytes) -> None:
        """Drops the latest steps that a session does not continue from."""
        event = _event(started)
        resumed = (event.resumed_step or 0) if isinstance(event, RunStarted) else 0
        self._latest = deque(
            (line for line in self._latest if _step(line) <= resumed), maxlen=NOISE_STEPS
        )
        if not resumed:
            self._first = b""

    def _thin_out(self) -> None:
        """Leaves out every second of the steps that are kept."""
        thinned, keeps = [], False
        for line in self._kept:
            if line_kind(line) == StepFinished.kind:
                if keeps:
                    thinned.append(line)
                keeps = not keeps
            else:
                thinned.append(line)
        self._kept = thinned
        self._stride *= 2

    def sparkline(self) -> Sparkline:
        """Returns the sparkline of the lines so far."""
        found = _Found()
        for line in self._kept:
            with contextlib.suppress(ValueError):
                found.apply(parse_line(line).event)
        return found.sparkline(_event(self._first), [_event(line) for line in self._latest])


_OTHERS = (
    RunStarted.kind,
    DataPrepared.kind,
    EvalFinished.kind,
    ExactMatchMeasured.kind,
    BestKept.kind,
    ExportWritten.kind,
    RunEnded.kind,
)


def _event(line: bytes) -> Event | None:
    """Returns the event of a line, or None if it is damaged."""
    with contextlib.suppress(ValueError):
        return parse_line(line).event
    return None


def _step(line: bytes) -> int:
    event = _event(line)
    return event.step if isinstance(event, StepFinished) else 0


class _Found:
    """Content of the lines of a record, without the steps that a resume discarded."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._evals: dict[int, EvalFinished] = {}
        self._pairs: int | None = None
        self._is_over = False
        self._answers: dict[int, ExactMatchMeasured] = {}
        self._best: int | None = None
        self._exported: int | None = None

    def apply(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            resumed = -1 if event.resumed_step is None else event.resumed_step
            self._losses = {step: loss for step, loss in self._losses.items() if step <= resumed}
            self._evals = {of: event for of, event in self._evals.items() if of <= resumed}
            self._is_over = False
            self._answers = {of: event for of, event in self._answers.items() if of <= resumed}
            if self._best is not None and self._best > resumed:
                self._best = None
        elif isinstance(event, StepFinished):
            self._losses[event.step] = event.loss
        elif isinstance(event, EvalFinished):
            self._evals[event.step] = event
        elif isinstance(event, ExactMatchMeasured):
            self._answers[event.step] = event
        elif isinstance(event, DataPrepared):
            pairs = event.summary.get("eval_rows")
            self._pairs = pairs if isinstance(pairs, int) else None
        elif isinstance(event, BestKept):
            self._best = event.step
        elif isinstance(event, ExportWritten):
            self._exported = event.step
        elif isinstance(event, RunEnded):
            self._is_over = True

    def sparkline(self, first: Event | None, latest: list[Event | None]) -> Sparkline:
        """Returns the sparkline of these lines. `first` is the first step, and `latest` are the
        latest.
        """
        after_steps = [event.loss for step, event in self._evals.items() if step > 0]
        before = self._evals.get(0)
        answered = [step for step in self._answers if step > 0]
        newest = self._answers[max(answered)] if answered else None
        losses = [loss for _, loss in sorted(self._losses.items()) if math.isfinite(loss)]
        return Sparkline(
            _means(losses),
            min(filter(math.isfinite, after_steps), default=None),
            0 if newest is None else newest.correct,
            0 if newest is None else newest.total,
            None if before is None else before.loss,
            self._worse(first, [step for step in latest if isinstance(step, StepFinished)]),
            self._is_over,
            self._leaves_better(),
        )

    def _leaves_better(self) -> bool:
        if self._best is None or self._exported not in (None, self._best):
            return False
        return is_better_at(self._best, self._evaluations())

    def _evaluations(self) -> list[Evaluated]:
        """Returns the evaluations of the present validation rows, in order."""
        found = [self._evaluated(event) for _, event in sorted(self._evals.items())]
        return of_the_same_rows(found) if found else []

    def _worse(self, first: Event | None, latest: list[StepFinished]) -> Worse | None:
        """Returns how the run is worse than before training, by
        `engine.runs.record.before_training`, from the whole record.
        """
        evals = self._evaluations()
        worse = of_evaluations(evals, self._is_over)
        made = latest[-1].step if latest else 0
        if worse is not None or (evals and evals[-1].step >= made):
            return worse
        if not isinstance(first, StepFinished) or first.step != 1:
            return None
        return of_training(first.loss, [step.loss for step in latest], made, self._is_over)

    def _evaluated(self, event: EvalFinished) -> Evaluated:
        rows = RowLosses(tuple(event.row_losses), tuple(event.row_tokens))
        pairs = self._pairs if event.preference else None
        counted = event.loss_tokens if pairs is None else pairs
        return Evaluated(
            event.step, event.loss, event.loss_tokens, counted, rows if rows.losses else None
        )


def _means(values: list[float]) -> tuple[float, ...]:
    """Returns the means of `POINTS` equal parts of `values`, or the values if they are fewer."""
    if len(values) <= POINTS:
        return tuple(values)
    borders = [len(values) * part // POINTS for part in range(POINTS + 1)]
    parts = [values[start:end] for start, end in pairwise(borders)]
    return tuple(sum(part) / len(part) for part in parts)
