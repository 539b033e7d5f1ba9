"""A `Glance` is what a list of runs shows of a run's curves: its loss as a small curve, the lowest
held-out loss, and how many held-out prompts were answered exactly.

A glance reads a record once and parses few of its lines, so that a list of a thousand runs can have
one of each.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine.runs.events import (
    EvalFinished,
    Event,
    ExactMatchMeasured,
    RunStarted,
    StepFinished,
)
from engine.runs.lines import line_kind, parse_line

POINTS = 40
"""The small curve has at most this many points."""
_PARSED = 400
"""At most this many lines of steps are parsed. They are spread evenly over the run."""


@dataclass(frozen=True)
class Glance:
    """A `Glance` has no curve and no numbers for a run that has made no step."""

    losses: tuple[float, ...] = ()
    """These are means of the training loss over equal parts of the run, in order."""
    held_out: float | None = None
    """This is the lowest held-out loss after a step, or None without evaluations."""
    correct: int = 0
    total: int = 0
    """At the newest measurement, `correct` of `total` held-out prompts were answered exactly.
    `total` is 0 if none was asked.
    """

    @property
    def accuracy(self) -> float | None:
        """Returns the share of held-out prompts that were answered exactly, or None."""
        return self.correct / self.total if self.total else None


NO_GLANCE = Glance()


def read_glance(path: Path) -> Glance:
    """Returns the glance of the record in the file `path`; an empty one if there is no such file or
    it cannot be read. Lines that are damaged or not complete are left out.
    """
    reader = _Reader()
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    reader.add(line)
    except OSError:
        return NO_GLANCE
    return reader.glance()


class _Reader:
    """A `_Reader` takes the lines of a record in order, and keeps few of those of the steps."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        """Every `_stride`-th line of a step, and every line of another kind that is needed."""
        self._steps = 0
        self._stride = 1

    def add(self, line: bytes) -> None:
        """Takes the next line."""
        kind = line_kind(line)
        if kind == StepFinished.kind:
            self._steps += 1
            if self._steps % self._stride == 0:
                self._kept.append(line)
            if self._steps == self._stride * _PARSED:
                self._thin_out()
        elif kind in _OTHERS:
            self._kept.append(line)

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

    def glance(self) -> Glance:
        """Returns what the lines so far tell."""
        found = _Found()
        for line in self._kept:
            with contextlib.suppress(ValueError):
                found.apply(parse_line(line).event)
        return found.glance()


_OTHERS = (RunStarted.kind, EvalFinished.kind, ExactMatchMeasured.kind)


class _Found:
    """What the lines of a record tell, without the steps that a resume discarded."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._held_out: dict[int, float] = {}
        self._answers: dict[int, ExactMatchMeasured] = {}

    def apply(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            resumed = -1 if event.resumed_step is None else event.resumed_step
            self._losses = {step: loss for step, loss in self._losses.items() if step <= resumed}
            self._held_out = {of: loss for of, loss in self._held_out.items() if of <= resumed}
            self._answers = {of: told for of, told in self._answers.items() if of <= resumed}
        elif isinstance(event, StepFinished):
            self._losses[event.step] = event.loss
        elif isinstance(event, EvalFinished):
            self._held_out[event.step] = event.loss
        elif isinstance(event, ExactMatchMeasured):
            self._answers[event.step] = event

    def glance(self) -> Glance:
        after_steps = [loss for step, loss in self._held_out.items() if step > 0]
        newest = self._answers[max(self._answers)] if self._answers else None
        losses = [loss for _, loss in sorted(self._losses.items()) if math.isfinite(loss)]
        return Glance(
            _means(losses),
            min(filter(math.isfinite, after_steps), default=None),
            0 if newest is None else newest.correct,
            0 if newest is None else newest.total,
        )


def _means(values: list[float]) -> tuple[float, ...]:
    """Returns the means of `POINTS` equal parts of `values`, or the values if they are fewer."""
    if len(values) <= POINTS:
        return tuple(values)
    borders = [len(values) * part // POINTS for part in range(POINTS + 1)]
    parts = [values[start:end] for start, end in pairwise(borders)]
    return tuple(sum(part) / len(part) for part in parts)
