"""Timelines of a record by step, read one at a time. A long record is hundreds of MB, nearly all of
them spans: it is looked through once, line by line, without parsing them. No torch.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine.errors import RunError
from engine.runs.events import PlanSimulated, RunStarted, StepTimeline
from engine.runs.lines import line_kind, parse_line

_HEAD_BYTES = 600
_KEPT_EVENTS = 4
_STEP = re.compile(rb'\{"kind": ?"step_timeline",[^{}\[\]]*"step": ?(\d+), ?"spans": ?\[')


class TimelineIndex:
    """The steps of one record that have a timeline. Each call looks at what was added since the
    last; any thread may call.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._plan: int | None = None
        self._found: dict[int, tuple[int, int | None]] = {}
        self._kept: OrderedDict[int, StepTimeline | PlanSimulated] = OrderedDict()

    def steps(self) -> list[int]:
        """In ascending order. Raises RunError when the record cannot be read."""
        with self._lock:
            self._look()
            return sorted(self._found)

    def read(self, step: int | None = None) -> tuple[StepTimeline, PlanSimulated | None]:
        """The timeline of `step`, the latest for None, with the simulation of its session's plan
        where one was recorded.

        Raises RunError for a step that has none and for a record that cannot be read.
        """
        with self._lock:
            self._look()
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
        timeline = self._event(place, wanted)
        return timeline, None if plan is None else self._event(plan, wanted)

    def _event(self, offset: int, step: int) -> StepTimeline | PlanSimulated:
        """What stands at `offset`; the last few are kept, since who zooms into a step asks for it
        many times.
        """
        kept = self._kept
        event = kept.get(offset)
        if event is None:
            try:
                with open(self._path, "rb") as file:
                    file.seek(offset)
                    event = parse_line(file.readline()).event
            except (OSError, ValueError):
                raise RunError(
                    f"The timeline of step {step:,} is damaged in the record and cannot be shown; "
                    "choose another step."
                ) from None
        with self._lock:
            kept[offset] = event
            kept.move_to_end(offset)
            while len(kept) > _KEPT_EVENTS:
                kept.popitem(last=False)
        return event

    def _look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                if (
                    os.fstat(file.fileno()).st_size < self._offset
                ):  # another record has taken its place
                    self._forget()
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._note(line)
                    self._offset += len(line)
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            raise RunError(f"The record {self._path} cannot be read ({error.strerror}).") from None

    def _note(self, line: bytes) -> None:
        match line_kind(line):
            case "step_timeline":
                head = _STEP.match(line[:_HEAD_BYTES])
                if head is not None:
                    self._found[int(head[1])] = self._offset, self._plan
            case "plan_built":
                self._plan = None
            case "plan_simulated":
                self._plan = self._offset
            case "run_started":
                self._drop_after(line)

    def _drop_after(self, line: bytes) -> None:
        """A session that goes on from an earlier step takes those after it out of the story."""
        try:
            event = parse_line(line).event
        except ValueError:
            return
        if isinstance(event, RunStarted):
            last = event.resumed_step or 0
            self._found = {step: place for step, place in self._found.items() if step <= last}


def nearest(steps: Sequence[int], wanted: int) -> int:
    """The one of `steps` that is next to `wanted`, the earlier of two."""
    return min(steps, key=lambda step: (abs(step - wanted), step))
