"""The log of a run holds every evaluation, checkpoint, export, change, request, state and message
of its record, each with its step and time. None is left out, however long the record is.

The record is scanned once, line by line; lines of steps, memory and timelines are not parsed.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from app.form.settings_form import as_labeled
from app.labels import (
    STATE_LABELS,
    in_bytes,
    in_digits,
    in_loss,
    in_share,
    in_short_time,
    state_label,
)
from app.shared.run_bar import JOB_LABELS
from engine.runs.record.events import (
    BestKept,
    CheckpointWritten,
    ControlReceived,
    EvalFinished,
    Event,
    ExactMatchMeasured,
    ExportWritten,
    LogLine,
    PlannedAnew,
    PromptsAnswered,
    RunEnded,
    RunStarted,
    SettingsChanged,
    StateChanged,
    StepSkipped,
)
from engine.runs.record.lines import AddedLines, line_kind, parse_line
from engine.runs.record.snapshot import LogEntry
from engine.text import counted

_STEP = re.compile(rb'"step": ?(\d+)')
PASSING = ("preparing", "running", "pausing", "stopping", "saving")
"""States that need no entry among what matters."""
CHANGED = {"train.learning_rate": "learning rate", "train.steps": "total steps"}
"""Settings that can be changed while a run goes on, in the words of the dialog for that."""
_HEAD = 300
"""Number of bytes at the beginning of a line that hold its step."""


class RunLog:
    """Reads the log of one record, from where it stopped the last time. Any thread may call."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._lock = threading.Lock()
        self._added = AddedLines(self._path, self._forget)
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._lines = 0
        self._time = 0.0
        self._is_paused = False
        self._entries: list[dict[str, Any]] = []
        self._messages: set[str] = set()

    def entries(self, after: int = 0, shown: Iterable[LogEntry] = ()) -> dict[str, Any]:
        """Returns the entries after the first `after` ones, and how many there are now. Raises
        RunError for a record that cannot be read.

        `shown` is the log of a snapshot. Its lines on records that could not be applied stand in no
        record; they are returned as `damage`.
        """
        with self._lock:
            self._added.read(self._take)
            damage = [entry for entry in shown if entry.text not in self._messages]
            return {
                "count": len(self._entries),
                "entries": self._entries[after:],
                "damage": [_entry("message", e.time, 0, e.text, e.level) for e in damage],
            }

    def _take(self, line: bytes, _: int) -> None:
        self._lines += 1
        kind = line_kind(line)
        if kind == "step_finished":
            found = _STEP.search(line[:_HEAD])
            self._step = int(found[1]) if found else self._step
            return
        if kind in _SILENT:
            return
        try:
            record = parse_line(line)
        except ValueError:
            text = (
                f"Line {self._lines} of {self._path.name} is damaged: what it recorded is not "
                "shown."
            )
            self._add("message", self._time, text, "warning")
            return
        self._time = record.time
        sentence = _entry_text(record.event)
        if sentence is None:
            return
        if isinstance(record.event, RunStarted):
            self._step = record.event.resumed_step or 0
        if isinstance(record.event, StepSkipped):
            self._step = record.event.step
        # An export or an answer may belong to the best step, an earlier one: the run is not there.
        step = getattr(record.event, "step", None) or self._step
        is_minor = self._is_minor(record.event)
        self._add(sentence[0], record.time, sentence[1], _level(record.event), step, is_minor)

    def _is_minor(self, event: Event) -> bool:
        """Returns whether an entry only repeats what another one tells, or a state that passes."""
        if not isinstance(event, StateChanged):
            return isinstance(event, (ControlReceived, SettingsChanged, PromptsAnswered))
        was_paused, self._is_paused = self._is_paused, event.state == "paused"
        goes_on = event.state == "running" and was_paused
        return not event.reason and event.state in PASSING and not goes_on

    def _add(
        self,
        kind: str,
        time: float,
        text: str,
        level: str,
        step: int | None = None,
        is_minor: bool = False,
    ) -> None:
        at = self._step if step is None else step
        self._entries.append(_entry(kind, time, at, text, level) | {"is_minor": is_minor})
        if kind == "message":
            self._messages.add(text)


def _entry(kind: str, time: float, step: int, text: str, level: str) -> dict[str, Any]:
    for dotted, label in CHANGED.items():
        text = text.replace(dotted, label)
    return {"kind": kind, "time": time, "step": step, "text": as_labeled(text), "level": level}


_SILENT = {
    *("step_timeline", "unit_norms", "memory_sampled", "job_progressed", "plan_simulated"),
    *("fit_reported", "plan_built", "data_prepared", "forecast_checked"),
}
"""Kinds of events that are drawn elsewhere."""


def _level(event: Event) -> str:
    if isinstance(event, LogLine):
        return event.level
    if isinstance(event, RunEnded) and event.state == "failed":
        return "error"
    if isinstance(event, StateChanged) and event.lacks_space_for not in ("", "found"):
        return "warning"
    return "warning" if isinstance(event, (StepSkipped, PlannedAnew)) else "info"


def _entry_text(event: Event) -> tuple[str, str] | None:
    """Returns the kind of an entry and its words, or None for an event that has none."""
    for event_type, (kind, words) in _ENTRIES.items():
        if isinstance(event, event_type):
            return kind, words(event)
    return None


def _checkpoint(event: CheckpointWritten) -> str:
    """Returns a text on how a checkpoint was written. Older records do not have how long training
    waited.
    """
    alone = ", weights alone" if event.holds == "weights" else ""
    text = f"Checkpoint of step {event.step:,}{alone}: {in_bytes(event.bytes)} in "
    text += in_short_time(event.seconds)
    if event.seconds:
        text += f" ({in_bytes(event.bytes / event.seconds)}/s)"
    if event.waited_seconds:
        text += f"; training waited at most {1e3 * event.waited_seconds:,.0f} ms for it"
    if event.due_step:
        text += f"; due after step {event.due_step:,}, postponed while another was written"
    return f"{text}."


def _evaluation(event: EvalFinished) -> str:
    tokens = counted(event.loss_tokens, "token")
    return (
        f"Validation loss {in_loss(event.loss)} over {tokens}, in {in_short_time(event.seconds)}."
    )


def _exact(event: ExactMatchMeasured) -> str:
    share = f" ({in_share(event.correct / event.total)})" if event.total else ""
    return f"Answers right: {event.correct:,} of {event.total:,}{share}."


def _best(event: BestKept) -> str:
    by = f"validation loss {in_loss(event.loss)}"
    if event.total:
        by = f"{event.correct:,} of {event.total:,} answers right, {by}"
    return f"Best so far: step {event.step:,}, {by}. Its weights are kept."


def _changed(event: SettingsChanged) -> str:
    return f"From step {event.step:,} on: {_values(event.values)}."


def _asked(event: ControlReceived) -> str:
    values = _values(event.values)
    return f"Requested: {event.command}{f' ({values})' if values else ''}."


def _values(values: Mapping[str, Any]) -> str:
    """Returns settings and their values as text; `_entry` writes their labels."""
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    return in_digits(value) if isinstance(value, float) else str(value)


def _state(event: StateChanged) -> str:
    return _with_reason(STATE_LABELS[event.state], event.reason)


def _with_reason(word: str, reason: str) -> str:
    """Returns the label of a state with its reason. A reason that begins with that label includes
    it.
    """
    if not reason:
        return f"{word}."
    return reason if reason.startswith(word) else f"{word}: {reason}"


def _started(event: RunStarted) -> str:
    if event.resumed_step is None:
        return f"Ready to train {counted(event.total_steps, 'step')}."
    return f"Resumed after step {event.resumed_step:,} of {event.total_steps:,}."


def _ended(event: RunEnded) -> str:
    return _with_reason(state_label(event.state, event.export_failed), event.reason)


def _planned_anew(event: PlannedAnew) -> str:
    during = JOB_LABELS.get(event.during, event.during.replace("_", " "))
    where = f" ({during})" if during else ""
    changed = ", ".join(f"{name} {_plain(value)}" for name, value in event.after.items())
    return f"The GPU ran out of memory{where}: planned anew with {changed or 'less'}."


_ENTRIES: dict[type[Event], tuple[str, Callable[[Any], str]]] = {
    LogLine: ("message", lambda event: event.text),
    EvalFinished: ("evaluation", _evaluation),
    ExactMatchMeasured: ("evaluation", _exact),
    PromptsAnswered: (
        "evaluation",
        lambda event: f"{counted(len(event.answers), 'sample prompt')} answered.",
    ),
    CheckpointWritten: ("saved", _checkpoint),
    BestKept: ("best", _best),
    ExportWritten: (
        "checkpoint",
        lambda event: f"Exported step {event.step:,} to {event.path} ({in_bytes(event.bytes)}).",
    ),
    SettingsChanged: ("change", _changed),
    ControlReceived: ("change", _asked),
    StepSkipped: (
        "message",
        lambda event: f"Step {event.step:,} was skipped: its {event.what} was not finite.",
    ),
    PlannedAnew: ("message", _planned_anew),
    StateChanged: ("state", _state),
    RunStarted: ("state", _started),
    RunEnded: ("state", _ended),
}
"""Types of events that are entries, each with its kind and its text. The view counts `best` and
`saved` among the checkpoints.
"""
