"""The timelines of a record by step, which are read one at a time.

A long record has hundreds of MB, nearly all of them spans. So the record is scanned once, line by
line, and the spans are not parsed. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from engine.errors import RunError
from engine.runs.record.events import Event, PlanSimulated, RunStarted, StepTimeline
from engine.runs.record.lines import AddedLines, line_kind, next_line, open_record, parse_line

# ---------------------------------------------------------------------- rank timelines

# These functions divide the timeline of a step that several ranks computed.


def ranks_in(timeline: StepTimeline) -> int:
    """Returns the number of ranks in a timeline; 1 in records that name none."""
    return 1 + max((span.get("rank", 0) for span in timeline.spans), default=0)


def of_rank(timeline: StepTimeline, rank: int) -> StepTimeline:
    """Returns the spans and waits of one rank in a timeline."""
    return StepTimeline(
        timeline.step,
        [span for span in timeline.spans if span.get("rank", 0) == rank],
        [wait for wait in timeline.waits if wait.get("rank", 0) == rank],
    )


# ---------------------------------------------------------------------- timeline index


E = TypeVar("E", bound=Event)

_HEAD_BYTES = 600
"""Number of bytes within which the step of a timeline is in its line, at most."""
_KEPT_EVENTS = 4
_STEP = re.compile(rb'\{"kind": ?"step_timeline",[^{}\[\]]*"step": ?(\d+), ?"spans": ?\[')


class TimelineIndex:
    """The steps of one record that have a timeline, and each timeline's offset.

    Each call first scans what was added to the record since the last call. Any thread may call.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._lock = threading.Lock()
        self._added = AddedLines(self._path, self._forget)
        self._forget()

    def _forget(self) -> None:
        """Resets the index, as if nothing of the record had been scanned.

        `_found` holds, by step, the offset of its timeline and the offset of the simulation of its
        session's plan. `_plan` is the offset of the latest such simulation.
        """
        self._plan: int | None = None
        self._found: dict[int, tuple[int, int | None]] = {}
        self._kept: OrderedDict[int, Event] = OrderedDict()

    def steps(self) -> list[int]:
        """Returns the steps in ascending order. Raises RunError for a record that cannot be
        read.
        """
        with self._lock:
            self._added.read(self._note)
            return sorted(self._found)

    def read(self, step: int | None = None) -> tuple[StepTimeline, PlanSimulated | None]:
        """Returns the timeline of `step` (the latest one for None) and, if one was recorded, the
        simulation of its session's plan.

        Raises RunError for a step without a timeline and for a record that cannot be read.
        """
        with self._lock:
            self._added.read(self._note)
            if not self._found:
                raise RunError(
                    "No step of this run has a timeline yet; output.timeline_every says which "
                    "steps get one."
                )
            wanted = max(self._found) if step is None else step
            if wanted not in self._found:
                raise RunError(
                    f"Step {wanted:,} has no timeline; the nearest one that has is step "
                    f"{nearest(sorted(self._found), wanted):,}."
                )
            place, plan = self._found[wanted]
        timeline = self._event(place, StepTimeline, wanted)
        if plan is None:
            return timeline, None
        return timeline, self._event(plan, PlanSimulated, wanted)

    def _event(self, offset: int, kind: type[E], step: int) -> E:
        """Returns the event at `offset`.

        The last few events are cached, since a person who zooms into a step loads it many times.
        """
        kept = self._kept
        event = kept.get(offset)
        if event is None:
            try:
                with open_record(self._path) as file:
                    file.seek(offset)
                    event = parse_line(next_line(file)).event
            except (OSError, ValueError):
                raise _damaged(step) from None
        if not isinstance(event, kind):
            raise _damaged(step)
        with self._lock:
            kept[offset] = event
            kept.move_to_end(offset)
            while len(kept) > _KEPT_EVENTS:
                kept.popitem(last=False)
        return event

    def _note(self, line: bytes, offset: int) -> None:
        match line_kind(line):
            case "step_timeline":
                head = _STEP.match(line[:_HEAD_BYTES])
                if head is not None:
                    self._found[int(head[1])] = offset, self._plan
            case "plan_built":
                self._plan = None
            case "plan_simulated":
                self._plan = offset
            case "run_started":
                self._drop_after(line)

    def _drop_after(self, line: bytes) -> None:
        """Removes the steps after the one from which a new session continues."""
        try:
            event = parse_line(line).event
        except ValueError:
            return
        if isinstance(event, RunStarted):
            last = event.resumed_step or 0
            self._found = {step: place for step, place in self._found.items() if step <= last}


def nearest(steps: Sequence[int], wanted: int) -> int:
    """Returns the step in `steps` nearest to `wanted`, or the earlier one of two equally near
    steps.
    """
    return min(steps, key=lambda step: (abs(step - wanted), step))


def _damaged(step: int) -> RunError:
    return RunError(
        f"The timeline of step {step:,} is damaged in the record and cannot be shown; "
        "choose another step."
    )
