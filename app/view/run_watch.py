"""What the pages that look at one run are sent: its record is followed once, and each part is
serialised once, however many tabs ask.

A part (a figure, the details) is sent to a page when it changed after what the page has seen, which
it says with `since`; the run bar and the latest numbers are always sent. All runs are read from
their files, those of this process too, so that a live, a finished and a crashed run are drawn by
one path.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Hashable
from typing import Any

import orjson

from app.view.axes import Axis
from app.view.diagnosis import diagnosis
from app.view.run_figures import FIGURES, alarms, summaries
from app.view.run_words import details, prompt_answers, run_bar, tiles
from app.view.timeline_figure import timeline_part
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.runs.about import read_about
from engine.runs.folder import RunFolder
from engine.runs.following import Follower, catch_up
from engine.runs.snapshot import RunSnapshot
from engine.runs.timeline_index import TimelineIndex

REBUILD_SECONDS = 0.75
"""Shorter than the pauses of pages, so that each finds what is new, whenever it asks."""
ENDING = ("stop", "discard")
FORGET_AXIS_SECONDS = 30.0


class Watch:
    """Follows one run. `answer` may be awaited by any number of requests of one event loop;
    `note_request` is for other threads.
    """

    def __init__(self, folder: RunFolder, is_active: Callable[[], bool]):
        """`is_active`: whether this process is running it, which is so a little before its lock is
        taken.
        """
        self.folder = folder
        self._is_active = is_active
        self.snapshot = RunSnapshot()
        self._follower = Follower(folder.events_path)
        self.timelines = TimelineIndex(folder.events_path)
        """Timelines of earlier steps, for who asks for one."""
        self._lock = asyncio.Lock()
        self._read_at = -REBUILD_SECONDS
        self._head = b""
        self._parts: dict[tuple[str, Axis | None], _Part] = {}
        self._asked_at: dict[Axis, float] = {}
        self._request: tuple[str, int] | None = None
        self._changes = 0

    async def answer(self, since: int, axis: Axis) -> bytes:
        """The members of a JSON object, without its braces. Raises RunError when the record cannot
        be read.
        """
        async with self._lock:
            now = time.monotonic()
            is_new = axis not in self._asked_at
            self._asked_at[axis] = now
            if is_new or now - self._read_at >= REBUILD_SECONDS:
                await asyncio.to_thread(self._rebuild)
            changed = [
                part.body
                for (_, part_axis), part in self._parts.items()
                if part.seq > since and part_axis in (axis, None)
            ]
            return self._head + b',"parts":{' + b",".join(changed) + b"}"

    def note_request(self, command: str, taken: int) -> None:
        """A command was sent to the run: shown until the run says that it has taken it. One to end
        it stays shown when somebody else asks for something at the same time, since it is what
        comes of it. `taken`: how many commands the snapshot knew the run to have taken before this
        one was sent.
        """
        before = self._request  # which another thread may set to None meanwhile
        if before is None or before[0] not in ENDING or command in ENDING:
            self._request = command, taken
        self._read_at = -REBUILD_SECONDS

    def _rebuild(self) -> None:
        # Asked before the record is read: a run that ends in between is then not taken for an
        # interrupted one.
        is_running = self._is_active() or self.folder.is_running()
        catch_up(self.snapshot, self._follower)
        snapshot = self.snapshot
        if self._request is not None and (
            not is_running or snapshot.requests_taken > self._request[1]
        ):
            self._request = None
        about, config = read_about(self.folder.path), self._config()
        bar = run_bar(
            snapshot,
            self.folder.id,
            about.name or self._name(),
            is_running,
            self._request[0] if self._request else None,
            config and config.train.learning_rate,
        )
        bar["note"] = about.note
        head = {
            "run_id": self.folder.id,
            "seq": snapshot.last_seq,
            "bar": bar,
            "tiles": tiles(snapshot),
            "diagnosis": diagnosis(snapshot, config).to_dict(),
        }
        self._head = _serialised(head)[1:-1]
        said, alarmed = summaries(snapshot), alarms(snapshot)
        curves = (
            snapshot.sessions,
            snapshot.steps.count,
            snapshot.memory.count,
            snapshot.evals.count,
        )
        for axis in self._axes_in_use():
            for name, build in FIGURES.items():
                # A map of all units is larger than a curve, and changes in few steps alone.
                key = (snapshot.sessions, snapshot.norms.count) if name == "norms" else curves
                self._keep(
                    name,
                    axis,
                    key,
                    lambda: {
                        **build(snapshot, axis),
                        "said": said.get(name, ""),
                        "tone": "warn" if name in alarmed else "",
                    },
                )
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
        known = (
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
            snapshot.forecast and (snapshot.forecast.step, snapshot.forecast.moment),
        )
        self._keep("details", None, known, lambda: details(snapshot))
        answered = snapshot.prompt_answers
        self._keep(
            "prompts",
            None,
            (snapshot.sessions, len(answered), answered[-1].step if answered else None),
            lambda: prompt_answers(snapshot),
        )
        self._read_at = time.monotonic()

    def _name(self) -> str:
        """From the configuration until the run has described itself, which it does once everything
        is prepared.
        """
        if self.snapshot.name:
            return self.snapshot.name
        try:
            return self.folder.config.name
        except RamstreamError:
            return self.folder.id

    def _config(self) -> TrainConfig | None:
        """The settings, which a change writes anew; None where they do not load."""
        if self._changes != len(self.snapshot.changes):
            self._changes = len(self.snapshot.changes)
            self.folder.read_config_again()
        try:
            return self.folder.config
        except RamstreamError:
            return None

    def _axes_in_use(self) -> list[Axis]:
        """All are rebuilt together, since one `seq` tells a page how much it has seen."""
        now = time.monotonic()
        for axis in [
            axis for axis, asked in self._asked_at.items() if now - asked > FORGET_AXIS_SECONDS
        ]:
            del self._asked_at[axis]
            self._parts = {key: part for key, part in self._parts.items() if key[1] != axis}
        return list(self._asked_at)

    def _keep(self, name: str, axis: Axis | None, key: Hashable, build: Any) -> None:
        """Build and serialise a part unless what it is made of (`key`) is what it was."""
        part = self._parts.get((name, axis))
        if part is None or part.key != key:
            body = json.dumps(name).encode() + b":" + _serialised(build())
            # Counted from 1 so that a page that has seen nothing (since 0) is also sent the parts
            # of an empty record.
            self._parts[name, axis] = _Part(key, max(1, self.snapshot.last_seq), body)


class _Part:
    """One serialised member: what it was made of, the `seq` it is as of, and its bytes."""

    __slots__ = ("body", "key", "seq")

    def __init__(self, key: Hashable, seq: int, body: bytes):
        self.key, self.seq, self.body = key, seq, body


def _serialised(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
