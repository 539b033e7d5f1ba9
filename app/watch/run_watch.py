"""A `Watch` follows one run and prepares the data for the pages that show it: the record is read
once, and each part is serialised once, however many tabs request it.

- A part is a figure, the details, or the timeline. A page reports with `since` what it has seen,
  and gets the parts that changed after that.
- The run bar and the latest numbers are always included.
- All runs are read from their files, including those of this process, so that the same code serves
  live, finished and crashed runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from app.verdict.judge import verdict
from app.view.axes import Axis
from app.view.drawing import is_empty, say_empty
from app.view.rank_figure import timeline_part
from app.view.run_bar import ShownRun, run_bar
from app.view.run_figures import FIGURES, alarms, summaries
from app.watch.meters import meters
from app.watch.ranks import rank_table, ranks_in_words
from app.watch.result import result
from app.watch.run_log import RunLog
from app.watch.run_words import details, prompt_answers, tiles
from app.watch.stage import stage
from engine import safe_files
from engine.checkpoints.saved_steps import saved_steps
from engine.config.export_choice import ExportFrom
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError, first_line
from engine.runs.events import Record, RunEnded
from engine.runs.folder import RunFolder
from engine.runs.following import Follower, catch_up
from engine.runs.lost_folder import lost_in_words
from engine.runs.snapshot import RunSnapshot
from engine.runs.timeline_index import TimelineIndex
from engine.summaries.about import read_about
from engine.words import counted

T = TypeVar("T")

REBUILD_SECONDS = 0.75
"""The parts are rebuilt at most once in this many seconds. Pages wait longer between requests, so
that each request finds new data, if there is any.
"""
NO_STEP = "No step was finished."
NO_SAMPLE = "No step was sampled."
"""These sentences stand in place of the empty figures of a run that is over."""
ENDING = ("stop", "discard")
"""These commands end a run."""
FORGET_AXIS_SECONDS = 30.0
"""Figures on an axis that no page has requested for this many seconds are no longer built."""


class Watch:
    """A `Watch` follows one run. Any number of requests on one event loop may await `answer`;
    `note_request` may be called from any thread.
    """

    def __init__(
        self,
        folder: RunFolder,
        is_active: Callable[[], bool],
        is_starting: Callable[[], bool] = lambda: False,
    ):
        """`is_active` returns whether this process is running the run, which becomes true shortly
        before the run takes its lock. `is_starting` returns whether a process of the run's own is
        starting, which has written nothing yet.
        """
        self.folder = folder
        self._is_active = is_active
        self._is_starting = is_starting
        self.snapshot = RunSnapshot()
        self._follower = Follower(folder.events_path)
        self.timelines = TimelineIndex(folder.events_path)
        """A page may request the timeline of an earlier step here."""
        self._log = RunLog(folder.events_path)
        # One request at a time rebuilds the parts; the waiting ones find them ready. The lock is
        # one of the event loop, so that waiting blocks no other request.
        self._lock = asyncio.Lock()
        self._read_at = -REBUILD_SECONDS
        self._head = b""
        self._parts: dict[tuple[str, Axis | None], _Part] = {}
        self._undrawn_of: dict[tuple[str, Axis | None], Hashable] = {}
        """These parts cannot be built from these values."""
        self._undrawn: dict[str, str] = {}
        """What of this record cannot be shown, and why."""
        self._asked_at: dict[Axis, float] = {}
        self._was_running = False
        """The run had a process when the record was last read."""
        self.is_lost = False
        """The run's folder vanished while the run was under way."""
        self._request: tuple[str, int] | None = None
        """The pending command, and how many commands the run had taken when it was sent."""
        self._changes = 0

    @property
    def is_outdated(self) -> bool:
        """Returns whether the folder was deleted, or put back, so that this watch shows what is no
        longer there. Of a run whose folder vanished while it was under way, it goes on telling so.
        """
        if self.is_lost:
            return self._has_record()
        return not self._was_running and not safe_files.is_folder(
            self.folder.path, self.folder.root
        )

    def note_begin(self) -> None:
        """Says that the run begins, whether or not a page asks for it."""
        self._was_running = True
        self._read_at = -REBUILD_SECONDS  # makes the next answer show it

    def note_end(self) -> None:
        """Says that the run has ended in this process."""
        self._was_running = not self._has_record()

    def _has_record(self) -> bool:
        return safe_files.is_file(self.folder.events_path, self.folder.root)

    async def answer(self, since: int, axis: Axis) -> bytes:
        """Returns the members of a JSON object, without its braces. Raises RunError if the record
        cannot be read.
        """
        async with self._lock:
            now = time.monotonic()
            is_new = axis not in self._asked_at
            self._asked_at[axis] = now
            if is_new or now - self._read_at >= REBUILD_SECONDS:
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

    def note_request(self, command: str, taken: int) -> None:
        """Records a command that was sent to the run; it is shown until the run reports that it has
        taken it. `taken` is the number of commands that the run had taken, according to the
        snapshot, before this one was sent.

        A command that ends the run stays shown if somebody else requests something at the same
        time, since the run will end in any case.
        """
        before = self._request  # a copy, since another thread may set the field to None meanwhile
        if before is None or before[0] not in ENDING or command in ENDING:
            self._request = command, taken
        self._read_at = -REBUILD_SECONDS  # makes the next answer show it

    # ------------------------------------------------------------------ rebuilding

    def _rebuild(self) -> None:
        # This is checked before the record is read, so that a run that ends in between is not taken
        # for an interrupted one.
        is_running = self._is_active() or self.folder.is_running()
        catch_up(self.snapshot, self._follower)
        if self.snapshot.export_failed and self.folder.has_export:
            self.snapshot.take_later_export()
        self._notice_loss(is_running)
        config = self._config()
        pending = self._pending(is_running)
        is_over = self.snapshot.is_over or not is_running
        self._keep_figures(is_over)
        self._keep_timeline(is_over)
        self._keep_details()
        self._keep_prompts()
        # It comes last, since it says what could not be drawn.
        self._head = self._head_of(is_running, pending, config)
        self._read_at = time.monotonic()

    def _notice_loss(self, is_running: bool) -> None:
        """Ends the run in the snapshot if its folder vanished while it was under way: nobody can
        read what its process recorded then.
        """
        vanished = self._was_running and not self._has_record()
        self._was_running = is_running
        if is_running or not vanished or self.snapshot.is_over:
            return
        self.is_lost = True
        ended = RunEnded("failed", lost_in_words(self.folder.path), RunError.__name__)
        snapshot = self.snapshot
        snapshot.apply(
            Record(self.folder.id, snapshot.last_seq + 1, snapshot.last_time or 0.0, ended)
        )

    def _pending(self, is_running: bool) -> str | None:
        """Returns the command that the run has not taken yet. A command that it has taken, or never
        will take, is dropped.
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
        """Returns the members that begin every answer."""
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
            self.is_lost,
            self._is_starting(),
        )
        said = self._shown(
            "the verdict", lambda of: verdict(of, run.state(of.state), run.saved, config)
        )
        bar = self._shown("the line over the run", lambda of: run_bar(of, run, said))
        if self.is_lost:  # there is nothing to go on from
            said = replace(said, headline=replace(said.headline, advice=""))
        head = {
            "run_id": self.folder.id,
            "seq": snapshot.last_seq,
            "tiles": self._shown("the numbers", tiles),
            "meters": self._shown("the memory", meters) if is_running else [],
            "ranks": self._shown("the ranks", rank_table),
            "stage": self._shown("the stage", lambda of: stage(of, bar["state"], run.saved)),
            "result": self._shown(
                "the result",
                lambda of: result(of, bar["state"], run.saved, _export_from(config)),
            ),
            "evaluates": config is None or _evaluates(config) or bool(len(snapshot.evals)),
            "diagnosis": said.to_dict(),
        }
        remarks = self._remarks(is_running)
        return _serialised(head | {"bar": bar | {"note": about.note, "remarks": remarks}})[1:-1]

    def _shown(self, what: str, build: Callable[[RunSnapshot], T]) -> T:
        """Returns what `build` makes of the record, or of an empty one where a fault in this
        program keeps it from being shown: the rest of the run is shown all the same.
        """
        try:
            made = build(self.snapshot)
            if isinstance(made, dict | list):
                _serialised(made)
            return made
        except Exception as error:  # noqa: BLE001  whatever the fault is
            self._note_undrawn(what, error)
            return build(RunSnapshot())

    def _note_undrawn(self, what: str, error: Exception) -> None:
        """Notes that something of this record cannot be shown. The terminal says where, once."""
        if what not in self._undrawn:
            traceback.print_exception(error)
        self._undrawn[what] = f"{type(error).__name__}: {first_line(error)}"

    def _remarks(self, is_running: bool) -> list[str]:
        """Returns sentences on what is special about this run or its record."""
        remarks = []
        ranks = ranks_in_words(self.snapshot)
        if is_running and not self._is_active():
            it = f"{ranks} compute it together; it" if ranks else "It"
            remarks.append(
                f"{it} runs in a process of its own, which goes on without this program."
            )
        if self.snapshot.resumed_step is not None and is_running:
            remarks.append(f"Resumed after step {self.snapshot.resumed_step:,}.")
        if self.snapshot.damaged_lines:
            lines = counted(self.snapshot.damaged_lines, "line")
            remarks.append(
                f"{lines} of the record could not be read, so a point of a curve may be missing; "
                "Log says which."
            )
        for what, error in self._undrawn.items():
            remarks.append(
                f"Something in the record cannot be shown in {what} ({error}), so that is missing."
            )
        return remarks

    def _keep_figures(self, is_over: bool) -> None:
        snapshot = self.snapshot
        said = self._shown("the captions", summaries)
        alarmed = self._shown("the alarms", alarms)
        curves = (
            is_over,
            snapshot.sessions,
            snapshot.steps.count,
            snapshot.memory.count,
            snapshot.evals.count,
            len(snapshot.exact_matches),
        )
        # A map of all units is larger than a curve, and changes only at sampled steps.
        norms = (is_over, snapshot.sessions, snapshot.norms.count)
        for axis in self._axes_in_use():
            for name in FIGURES:
                words = {
                    "said": said.get(name, ""),
                    "tone": "warn" if name in alarmed else "",
                }
                build = functools.partial(_figure, name, snapshot, axis, _Told(words, is_over))
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
        forecast = snapshot.forecast
        made_of = (
            snapshot.sessions,
            snapshot.damaged_lines,
            len(snapshot.exact_matches),
            len(snapshot.checkpoints),
            len(snapshot.exports),
            snapshot.state,
            bool(snapshot.data),
            str(snapshot.plan_choices.get("settled_units")),
            len(snapshot.units),
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
        """Builds and serialises a part, unless the values it is made from are unchanged."""
        part = self._parts.get((name, axis))
        if part is None or part.made_of != made_of:
            if self._undrawn_of.get((name, axis)) == made_of:
                return
            try:
                body = json.dumps(name).encode() + b":" + _serialised(build())
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


@dataclass(frozen=True, slots=True)
class _Part:
    """A `_Part` is one serialised member of the answer."""

    made_of: Hashable
    """The part was built from these values. It is rebuilt when they change."""
    seq: int
    """The part reflects the run's record up to this entry."""
    body: bytes


@dataclass(frozen=True, slots=True)
class _Told:
    """`_Told` is what a figure's caption says."""

    words: dict[str, str]
    is_over: bool
    """No further step will appear in the figure."""


def _export_from(config: TrainConfig | None) -> ExportFrom:
    return "last" if config is None else config.output.export_from


def _evaluates(config: TrainConfig) -> bool:
    """Returns whether held-out rows are evaluated."""
    return bool(config.output.eval_every and config.data.eval_fraction)


def _figure(name: str, snapshot: RunSnapshot, axis: Axis, told: _Told) -> dict[str, Any]:
    """Returns a figure with its description."""
    drawn = FIGURES[name](snapshot, axis)
    if told.is_over and is_empty(drawn) and not drawn.get("is_absent"):
        say_empty(drawn["layout"], NO_SAMPLE if name == "norms" else NO_STEP)
    return drawn | told.words


def _timeline(snapshot: RunSnapshot, is_over: bool) -> dict[str, Any]:
    part = timeline_part(snapshot.timeline, snapshot.simulated)
    if is_over and snapshot.timeline is None:
        say_empty(part["layout"], NO_SAMPLE)
    return part | {"steps": snapshot.timeline_steps}


def _serialised(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
