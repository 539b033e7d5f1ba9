"""Data for the pages that show a run: its record is read once, and each part is serialized once,
however many tabs request it.

- A part is a figure, the details, or the timeline. A page reports with `since` what it has seen,
  and gets the parts that changed after that.
- The run bar and the latest numbers are always included.
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, TypeVar

import msgspec

from app.pages.run.answers import answers, answers_by_step
from app.pages.run.head import head
from app.pages.run.rank_figure import timeline_part
from app.pages.run.ranks import rank_table, ranks_text
from app.pages.run.run_figures import FIGURES, alarms, machine_text, summaries
from app.pages.run.run_log import RunLog
from app.pages.run.run_overview import details, tiles
from app.session.followed_run import FollowedRun
from app.session.session import Session
from app.shared.charts.axes import Axis
from app.shared.charts.drawing import is_empty, write_empty
from app.shared.run_bar import ShownRun, run_bar
from app.shared.run_names import name_of_start
from app.verdict.judge import verdict
from engine.config.export_choice import ExportFrom
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, first_line
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.timeline_index import TimelineIndex
from engine.runs.summaries.about import read_about
from engine.text import counted
from engine.training.checkpoints.saved_on_disk import saved_steps

T = TypeVar("T")

REBUILD_SECONDS = 0.75
"""Least number of seconds from one build of a part to the next. Pages wait longer between requests,
so that each request finds new data, if there is any.
"""
NO_STEP = "No step was finished."
NO_SAMPLE = "No step was sampled."
"""Text in place of the empty figures of a run that is over."""
FORGET_AXIS_SECONDS = 30.0
"""Seconds without a request from any page after which figures on an axis are no longer built."""


class Watch:
    """Draws one run. Any number of requests on one event loop may await `answer`."""

    def __init__(self, run: FollowedRun):
        self.run = run
        self.folder = run.folder
        self.snapshot = run.snapshot
        self.timelines = TimelineIndex(run.folder.events_path)
        """Where a page may request the timeline of an earlier step."""
        self._log = RunLog(run.folder.events_path)
        # One request at a time rebuilds the parts; the waiting ones find them ready. The lock is
        # one of the event loop, so that waiting blocks no other request.
        self._lock = asyncio.Lock()
        self._read_at = -REBUILD_SECONDS
        self._head = b""
        self._parts: dict[tuple[str, Axis | None], _Part] = {}
        self._undrawn_of: dict[tuple[str, Axis | None], Hashable] = {}
        """Values from which these parts cannot be built."""
        self._undrawn: dict[str, str] = {}
        """What of this record cannot be shown, and why."""
        self._asked_at: dict[Axis, float] = {}
        self._changes = 0

    async def answer(self, since: int, axis: Axis) -> bytes:
        """Returns the members of a JSON object, without its braces. Raises RunError if the record
        cannot be read.
        """
        async with self._lock:
            now = time.monotonic()
            is_new = axis not in self._asked_at
            self._asked_at[axis] = now
            if is_new or self.run.has_news or now - self._read_at >= REBUILD_SECONDS:
                # This runs in a thread, since the first read of a long record takes seconds.
                await asyncio.to_thread(self._rebuild)
            changed = [
                part.body
                for (_, part_axis), part in self._parts.items()
                if part.seq > since and part_axis in (axis, None)
            ]
            return self._head + b',"parts":{' + b",".join(changed) + b"}"

    def log(self, after: int = 0) -> dict[str, Any]:
        """Returns the log of the run after its first entries. Any thread may call."""
        return self._log.entries(after, list(self.snapshot.log))

    # ------------------------------------------------------------------ rebuilding

    def _rebuild(self) -> None:
        # A run of this process may begin or end during the reading, which makes it no detached one.
        was_active = self.run.is_active()
        is_running = self.run.read()
        is_apart = is_running and not was_active and not self.run.is_active()
        config = self._config()
        pending = self.run.pending(is_running)
        is_over = self.snapshot.is_over or not is_running
        self._keep_figures(is_over)
        self._keep_timeline(is_over)
        self._keep_details()
        self._keep_prompts()
        self._keep_answers(is_over, config)
        # It comes last, since it says what could not be drawn.
        self._head = self._head_of(is_running, is_apart, pending, config)
        self._read_at = time.monotonic()

    def _head_of(
        self, is_running: bool, is_apart: bool, pending: str | None, config: TrainConfig | None
    ) -> bytes:
        """Returns the members that begin every answer. `is_apart` is whether another process than
        this one runs the run.
        """
        snapshot = self.snapshot
        about = read_about(self.folder.path)
        run = ShownRun(
            self.folder.id,
            about.name or self._name(),
            is_running,
            pending,
            None if config is None else config.train.learning_rate,
            saved_steps(self.folder.checkpoints_path, self.folder.best_path),
            config is None or config.output.checkpoint != "none",
            self.run.is_lost,
            is_constant=config is not None and config.train.schedule == "constant",
            is_starting=self.run.is_starting(),
        )
        judged = self._shown(
            "the verdict", lambda of: verdict(of, run.state(of.state), run.saved, config)
        )
        bar = self._shown("the line over the run", lambda of: run_bar(of, run, judged))
        if self.run.is_lost:  # there is nothing to continue from
            judged = replace(judged, main=replace(judged.main, advice=""))
        members = {
            "run_id": self.folder.id,
            "seq": snapshot.last_seq,
            "tiles": self._shown("the numbers", tiles),
            "machine": self._shown("the machine", machine_text),
            "ranks": self._shown("the ranks", rank_table),
            "head": self._shown(
                "the head",
                lambda of: head(of, bar["state"], run.saved, judged, _export_from(config)),
            ),
            "has_steps": bool(len(snapshot.steps)),
            "evaluates": config is None or _evaluates(config) or bool(len(snapshot.evals)),
            "diagnosis": judged.to_dict(),
        }
        bar |= {
            "note": about.note,
            "badges": self._badges(is_running, is_apart),
            "remarks": self._remarks(),
        }
        return _serialized(members | {"bar": bar})[1:-1]

    def _shown(self, what: str, build: Callable[[RunSnapshot], T]) -> T:
        """Returns what `build` makes of the record, or of an empty one where a fault in this
        program keeps it from being shown: the rest of the run is shown all the same.
        """
        try:
            made = build(self.snapshot)
            if isinstance(made, dict | list):
                _serialized(made)
            return made
        except Exception as error:  # noqa: BLE001  whatever the fault is
            self._note_undrawn(what, error)
            return build(RunSnapshot())

    def _note_undrawn(self, what: str, error: Exception) -> None:
        """Notes that something of this record cannot be shown. The terminal says where, once."""
        if what not in self._undrawn:
            traceback.print_exception(error)
        self._undrawn[what] = f"{type(error).__name__}: {first_line(error)}"

    def _badges(self, is_running: bool, is_apart: bool) -> list[dict[str, str]]:
        """Returns what is special about how this run goes on."""
        badges = []
        ranks = ranks_text(self.snapshot)
        if is_apart and not self.snapshot.is_over:
            title = "It goes on if Ramstream is closed."
            badges.append({"label": "Detached", "title": title})
            if ranks:
                title = f"{ranks} compute each step together."
                badges.append({"label": ranks, "title": title})
        if self.snapshot.resumed_step is not None and is_running:
            title = f"Resumed after step {self.snapshot.resumed_step:,}."
            badges.append({"label": "Resumed", "title": title})
        return badges

    def _remarks(self) -> list[str]:
        """Returns sentences on what is wrong with the record."""
        remarks = []
        if self.snapshot.damaged_lines:
            lines = counted(self.snapshot.damaged_lines, "line")
            remarks.append(
                f"{lines} of the record could not be read (see Log), so a curve may lack a point."
            )
        for what, error in self._undrawn.items():
            remarks.append(
                f"Something in the record cannot be shown in {what} ({error}), so that is missing."
            )
        return remarks

    def _keep_figures(self, is_over: bool) -> None:
        snapshot = self.snapshot
        captions = self._shown("the captions", summaries)
        alarmed = self._shown("the alarms", alarms)
        curves = (
            is_over,
            snapshot.sessions,
            snapshot.steps.count,
            snapshot.memory.count,
            snapshot.evals.count,
            len(snapshot.exact_matches),
            bool(snapshot.plan_choices),
            snapshot.prediction_check is None,
        )
        # A map of all units is larger than a curve, and changes only at sampled steps.
        norms = (is_over, snapshot.sessions, snapshot.norms.count)
        for axis in self._axes_in_use():
            for name in FIGURES:
                texts = {
                    "caption": captions.get(name, ""),
                    "tone": "warn" if name in alarmed else "",
                }
                build = functools.partial(_figure, name, snapshot, axis, _Extras(texts, is_over))
                self._keep(name, axis, norms if name == "norms" else curves, build)

    def _keep_timeline(self, is_over: bool) -> None:
        snapshot = self.snapshot
        step = snapshot.timeline.step if snapshot.timeline is not None else None
        self._keep(
            "timeline",
            None,
            (is_over, snapshot.sessions, step, bool(snapshot.simulated)),
            lambda: _timeline(snapshot, is_over),
        )

    def _keep_details(self) -> None:
        snapshot = self.snapshot
        prediction_check = snapshot.prediction_check
        made_of = (
            snapshot.sessions,
            snapshot.damaged_lines,
            len(snapshot.exact_matches),
            len(snapshot.checkpoints),
            len(snapshot.exports),
            snapshot.state,
            bool(snapshot.data),
            str(snapshot.plan_choices.get("gpu_resident_units")),
            len(snapshot.units),
            bool(snapshot.plan_choices),
            None if prediction_check is None else (prediction_check.step, prediction_check.moment),
        )
        self._keep("details", None, made_of, lambda: details(snapshot))

    def _keep_prompts(self) -> None:
        snapshot = self.snapshot
        answered = snapshot.prompt_answers
        latest = answered[-1].step if answered else None
        made_of = (snapshot.sessions, len(answered), latest, len(snapshot.exact_matches))
        self._keep("prompts", None, made_of, lambda: answers_by_step(snapshot))

    def _keep_answers(self, is_over: bool, config: TrainConfig | None) -> None:
        snapshot = self.snapshot
        is_preparing = not is_over and not len(snapshot.steps)
        is_awaited = is_preparing and config is not None and _asks(config)
        answered = snapshot.prompt_answers
        latest = answered[-1].step if answered else None
        matches, evals = len(snapshot.exact_matches), snapshot.evals.count
        made_of = (is_over, is_awaited, snapshot.sessions, matches, evals, len(answered), latest)
        began_with = name_of_start("" if config is None else config.model.start_from or "")
        self._keep(
            "answers",
            None,
            (*made_of, began_with),
            lambda: answers(snapshot, is_over, is_awaited, began_with),
        )

    def _keep(
        self, name: str, axis: Axis | None, made_of: Hashable, build: Callable[[], dict[str, Any]]
    ) -> None:
        """Builds and serializes a part, unless the values it is made from are unchanged."""
        part = self._parts.get((name, axis))
        if part is None or part.made_of != made_of:
            if self._undrawn_of.get((name, axis)) == made_of:
                return
            try:
                body = _serialized(name) + b":" + _serialized(build())
            except Exception as error:  # noqa: BLE001  whatever the fault is, the others are drawn
                self._undrawn_of[name, axis] = made_of
                self._note_undrawn(f"the figure {name}", error)
                return
            # Numbers start at 1, so that a page that has seen nothing (since 0) also gets the parts
            # of an empty record.
            self._parts[name, axis] = _Part(made_of, max(1, self.snapshot.last_seq), body)

    # ------------------------------------------------------------------ what a rebuild needs

    def _name(self) -> str:
        """Returns the run's own name. It is read from the configuration until the record contains
        it, which is the case once everything is prepared.
        """
        if self.snapshot.name:
            return self.snapshot.name
        try:
            return self.folder.config.name
        except RamstreamError:
            return self.folder.id

    def _config(self) -> TrainConfig | None:
        """Returns the settings, which a change of the run rewrites, or None if they do not load."""
        if self._changes != len(self.snapshot.changes):
            self._changes = len(self.snapshot.changes)
            self.folder.read_config_again()
        try:
            return self.folder.config
        except RamstreamError:
            return None

    def _axes_in_use(self) -> list[Axis]:
        """Returns the axes that pages show, and drops the figures on other axes. All figures are
        rebuilt together, since a page reports what it has seen with a single `seq`.
        """
        now = time.monotonic()
        for axis, asked_at in list(self._asked_at.items()):
            if now - asked_at > FORGET_AXIS_SECONDS:
                del self._asked_at[axis]
                self._parts = {key: part for key, part in self._parts.items() if key[1] != axis}
        return list(self._asked_at)


def watch_of(session: Session, run_id: str) -> Watch:
    """Returns the watch of a run; all pages that show the run share it. Raises RunError if there is
    no such run.
    """
    return session.follow(run_id).once(Watch)


@dataclass(frozen=True, slots=True)
class _Part:
    """One serialized member of the answer."""

    made_of: Hashable
    """Values from which the part was built. It is rebuilt when they change."""
    seq: int
    """Entry of the run's record up to which the part reflects it."""
    body: bytes


@dataclass(frozen=True, slots=True)
class _Extras:
    """Caption of a figure."""

    texts: dict[str, str]
    is_over: bool
    """Whether no further step will appear in the figure."""


def _export_from(config: TrainConfig | None) -> ExportFrom:
    return "last" if config is None else config.output.export_from


def _evaluates(config: TrainConfig) -> bool:
    """Returns whether validation rows are evaluated."""
    return bool(config.output.eval_every and config.data.eval_fraction)


def _asks(config: TrainConfig) -> bool:
    """Returns whether the model answers prompts, before training and later."""
    output = config.output
    return bool(output.sample_prompts or (output.exact_match_samples and config.data.eval_fraction))


def _figure(name: str, snapshot: RunSnapshot, axis: Axis, extras: _Extras) -> dict[str, Any]:
    """Returns a figure with its description."""
    drawn = FIGURES[name](snapshot, axis)
    if extras.is_over and is_empty(drawn) and not drawn.get("is_absent"):
        write_empty(drawn["layout"], NO_SAMPLE if name == "norms" else NO_STEP)
    return drawn | extras.texts


def _timeline(snapshot: RunSnapshot, is_over: bool) -> dict[str, Any]:
    part = timeline_part(snapshot.timeline, snapshot.simulated)
    if is_over and snapshot.timeline is None:
        write_empty(part["layout"], NO_SAMPLE)
    return part | {"steps": snapshot.timeline_steps}


def _serialized(value: Any) -> bytes:
    # numpy's numbers and arrays are written as Python's. A number that is not finite becomes null.
    return msgspec.json.encode(value, enc_hook=methodcaller("tolist"))
