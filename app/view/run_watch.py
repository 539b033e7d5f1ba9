"""A `Watch` follows one run and makes what the pages that look at it are sent: the record is read
once, and each part is serialised once, however many tabs ask.

- A part is a figure, the details, or the timeline. A page says with `since` what it has seen, and
  is sent the parts that changed after that.
- The run bar and the latest numbers are always sent.
- All runs are read from their files, those of this process too, so that a live, a finished and a
  crashed run are drawn by one path.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import orjson

from app.view.axes import Axis
from app.view.diagnosis import diagnosis
from app.view.run_bar import ShownRun, run_bar
from app.view.run_figures import FIGURES, alarms, summaries
from app.view.run_words import details, prompt_answers, tiles
from app.view.timeline_figure import timeline_part
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.runs.about import read_about
from engine.runs.folder import RunFolder
from engine.runs.following import Follower, catch_up
from engine.runs.snapshot import RunSnapshot
from engine.runs.timeline_index import TimelineIndex

REBUILD_SECONDS = 0.75
"""The parts are made anew after so many seconds at the earliest. Pages pause for longer, so that
each finds what is new, whenever it asks.
"""
ENDING = ("stop", "discard")
"""These commands end a run."""
FORGET_AXIS_SECONDS = 30.0
"""Figures on an axis that no page has asked for in so many seconds are made no longer."""


class Watch:
    """A `Watch` follows one run. Any number of requests of one event loop may await `answer`;
    `note_request` may be called from any thread.
    """

    def __init__(self, folder: RunFolder, is_active: Callable[[], bool]):
        """`is_active` returns whether this process is running the run, which it is a little before
        it takes the run's lock.
        """
        self.folder = folder
        self._is_active = is_active
        self.snapshot = RunSnapshot()
        self._follower = Follower(folder.events_path)
        self.timelines = TimelineIndex(folder.events_path)
        """A page may ask here for the timeline of an earlier step."""
        # One request at a time rebuilds the parts; those that wait find them ready. It is a lock of
        # the event loop, so that waiting holds up no other request.
        self._lock = asyncio.Lock()
        self._read_at = -REBUILD_SECONDS
        self._head = b""
        self._parts: dict[tuple[str, Axis | None], _Part] = {}
        self._asked_at: dict[Axis, float] = {}
        self._request: tuple[str, int] | None = None
        """This command was sent to the run when it had taken so many, and is not taken yet."""
        self._changes = 0

    async def answer(self, since: int, axis: Axis) -> bytes:
        """Returns the members of a JSON object, without its braces. Raises RunError when the record
        cannot be read.
        """
        async with self._lock:
            now = time.monotonic()
            is_new = axis not in self._asked_at
            self._asked_at[axis] = now
            if is_new or now - self._read_at >= REBUILD_SECONDS:
                # In a thread, since a long record takes seconds to read the first time.
                await asyncio.to_thread(self._rebuild)
            changed = [
                part.body
                for (_, part_axis), part in self._parts.items()
                if part.seq > since and part_axis in (axis, None)
            ]
            return self._head + b',"parts":{' + b",".join(changed) + b"}"

    def note_request(self, command: str, taken: int) -> None:
        """Notes a command that was sent to the run; it is shown until the run says that it has
        taken it. `taken` is how many commands the snapshot knew the run to have taken before this
        one was sent.

        A command that ends the run stays shown when somebody else asks for something at the same
        time, since the end is what comes of it.
        """
        before = self._request  # copied, since another thread may set it to None meanwhile
        if before is None or before[0] not in ENDING or command in ENDING:
            self._request = command, taken
        self._read_at = -REBUILD_SECONDS  # the next answer shows it

    # ------------------------------------------------------------------ rebuilding

    def _rebuild(self) -> None:
        # Asked before the record is read: a run that ends in between is then not taken for an
        # interrupted one.
        is_running = self._is_active() or self.folder.is_running()
        catch_up(self.snapshot, self._follower)
        config = self._config()
        pending = self._pending(is_running)
        self._head = self._head_of(is_running, pending, config)
        self._keep_figures()
        self._keep_timeline()
        self._keep_details()
        self._keep_prompts()
        self._read_at = time.monotonic()

    def _pending(self, is_running: bool) -> str | None:
        """Returns the command that the run has not taken yet, and forgets one that it has taken or
        never will.
        """
        request = self._request
        if request is None:
            return None
        command, taken = request
        if is_running and self.snapshot.requests_taken <= taken:
            return command
        self._request = None
        return None

    def _head_of(self, is_running: bool, pending: str | None, config: TrainConfig | None) -> bytes:
        """Returns the members that every answer begins with."""
        snapshot = self.snapshot
        about = read_about(self.folder.path)
        run = ShownRun(
            self.folder.id,
            about.name or self._name(),
            is_running,
            pending,
            None if config is None else config.train.learning_rate,
        )
        head = {
            "run_id": self.folder.id,
            "seq": snapshot.last_seq,
            "bar": run_bar(snapshot, run) | {"note": about.note},
            "tiles": tiles(snapshot),
            "diagnosis": diagnosis(snapshot, config).to_dict(),
        }
        return _serialised(head)[1:-1]

    def _keep_figures(self) -> None:
        snapshot = self.snapshot
        said = summaries(snapshot)
        alarmed = alarms(snapshot)
        curves = (
            snapshot.sessions,
            snapshot.steps.count,
            snapshot.memory.count,
            snapshot.evals.count,
        )
        # A map of all units is larger than a curve, and changes in few steps alone.
        norms = (snapshot.sessions, snapshot.norms.count)
        for axis in self._axes_in_use():
            for name in FIGURES:
                words = {
                    "said": said.get(name, ""),
                    "tone": "warn" if name in alarmed else "",
                }
                build = functools.partial(_figure, name, snapshot, axis, words)
                self._keep(name, axis, norms if name == "norms" else curves, build)

    def _keep_timeline(self) -> None:
        snapshot = self.snapshot
        step = snapshot.timeline.step if snapshot.timeline is not None else None
        self._keep(
            "timeline",
            None,
            (snapshot.sessions, step, bool(snapshot.simulated)),
            lambda: {
                **timeline_part(snapshot.timeline, snapshot.simulated),
                "steps": snapshot.timeline_steps,
            },
        )

    def _keep_details(self) -> None:
        snapshot = self.snapshot
        forecast = snapshot.forecast
        made_of = (
            snapshot.sessions,
            snapshot.damaged_lines,
            len(snapshot.log),
            snapshot.log[-1].time if snapshot.log else 0,
            len(snapshot.exact_matches),
            len(snapshot.checkpoints),
            len(snapshot.exports),
            snapshot.state,
            bool(snapshot.data),
            bool(snapshot.plan_choices),
            None if forecast is None else (forecast.step, forecast.moment),
        )
        self._keep("details", None, made_of, lambda: details(snapshot))

    def _keep_prompts(self) -> None:
        snapshot = self.snapshot
        answered = snapshot.prompt_answers
        latest = answered[-1].step if answered else None
        made_of = (snapshot.sessions, len(answered), latest)
        self._keep("prompts", None, made_of, lambda: prompt_answers(snapshot))

    def _keep(
        self, name: str, axis: Axis | None, made_of: Hashable, build: Callable[[], dict[str, Any]]
    ) -> None:
        """Builds and serialises a part unless what it is made of is what it was."""
        part = self._parts.get((name, axis))
        if part is None or part.made_of != made_of:
            body = json.dumps(name).encode() + b":" + _serialised(build())
            # Counted from 1 so that a page that has seen nothing (since 0) is also sent the parts
            # of an empty record.
            self._parts[name, axis] = _Part(made_of, max(1, self.snapshot.last_seq), body)

    # ------------------------------------------------------------------ what a rebuild needs

    def _name(self) -> str:
        """Returns the run's own name. It stands in the configuration until the run has described
        itself, which it does once everything is prepared.
        """
        if self.snapshot.name:
            return self.snapshot.name
        try:
            return self.folder.config.name
        except RamstreamError:
            return self.folder.id

    def _config(self) -> TrainConfig | None:
        """Returns the settings, which a change writes anew, or None where they do not load."""
        if self._changes != len(self.snapshot.changes):
            self._changes = len(self.snapshot.changes)
            self.folder.read_config_again()
        try:
            return self.folder.config
        except RamstreamError:
            return None

    def _axes_in_use(self) -> list[Axis]:
        """Returns the axes that pages look at, and forgets the figures on other axes. All figures
        are rebuilt together, since one `seq` tells a page how much it has seen.
        """
        now = time.monotonic()
        for axis, asked_at in list(self._asked_at.items()):
            if now - asked_at > FORGET_AXIS_SECONDS:
                del self._asked_at[axis]
                self._parts = {key: part for key, part in self._parts.items() if key[1] != axis}
        return list(self._asked_at)


@dataclass(frozen=True, slots=True)
class _Part:
    """A `_Part` is one serialised member of the answer."""

    made_of: Hashable
    """The part was made of these numbers. It is as it was while they are."""
    seq: int
    """The part is as of this record."""
    body: bytes


def _figure(name: str, snapshot: RunSnapshot, axis: Axis, words: dict[str, str]) -> dict[str, Any]:
    """Returns a figure with what is said of it."""
    return FIGURES[name](snapshot, axis) | words


def _serialised(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
