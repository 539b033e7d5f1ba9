"""The current state of a run, computed from its records, as plain data for the screens to draw.

`RunSnapshot.apply` folds the records into the snapshot one after the other:

- Each kind of event has one method that changes the snapshot (`_FOLDS`). A record of an unknown
  kind only adds to the count of lines.
- The fold is pure: the same records give the same snapshot, whether they arrive live, from a file,
  or from another process's file as it grows.
- Each record is applied in amortized constant time, and the memory stays small: tables are thinned
  out (`engine.runs.record.event_tables`), and the log and the answers keep only their latest
  entries. So a run of any length can be followed.
- A session begins with the state `preparing` or, where that line is missing, with `RunStarted`. A
  resume from an earlier step removes the rows, answers and checkpoints of later steps.
- An implausible step number (`engine.runs.record.snapshot`) is not shown but logged.
Records must be applied by the thread that reads the snapshot: a table cannot grow while another
array shares the memory of one of its columns.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.runs.record.evaluations import RowLosses
from engine.runs.record.event_tables import (
    EvalTable,
    EventTable,
    MemoryTable,
    NormTable,
    StepEvent,
    StepTable,
)
from engine.runs.record.events import (
    BestBy,
    BestKept,
    CheckpointWritten,
    ControlReceived,
    DataPrepared,
    EvalFinished,
    Event,
    ExactMatchMeasured,
    ExportWritten,
    FitReported,
    ForecastChecked,
    JobProgressed,
    LineDamaged,
    LogLine,
    MemorySampled,
    PlanBuilt,
    PlanSimulated,
    PromptsAnswered,
    RankSample,
    Record,
    RunEnded,
    RunStarted,
    RunState,
    SettingsChanged,
    StateChanged,
    StepFinished,
    StepSkipped,
    StepTimeline,
    UnitNorms,
)
from engine.runs.record.validation import Best, ValidationScores

# ---------------------------------------------------------------------- step order

# A `StepOrder` judges which step numbers in a record are plausible.
#
# A damaged digit must not hide the rest of a curve.


AHEAD = 2
"""Number of steps by which the line of an event that belongs to a step may precede the step's own
line.
"""


@dataclass
class StepOrder:
    """Latest plausible step of a record.

    - Every step has its own line. So from one step's line to another's, the step number can grow by
      at most the number of lines between them, and it never decreases within a session.
    - A number that breaks this rule is ignored.
    - Two such numbers in a row that are consecutive are accepted: in that case, the line of a
      resume or many other lines are missing.
    """

    last: int = 0
    """Latest plausible step."""
    line: int = 0
    """Number of the line from which it was read."""
    odd: int | None = None
    """Previous step number, if it was not plausible."""

    def begin(self, step: int, line: int) -> None:
        """Begins a session at line `line`, which continues after `step`."""
        self.last = step
        self.line = line
        self.odd = None

    def takes(self, step: int, line: int) -> bool:
        """Returns whether `step` is accepted at `line`, which is counted from the record's
        start.
        """
        fits = self.last < step <= self.last + line - self.line
        if fits or (self.odd is not None and step == self.odd + 1):
            # `begin` is inlined here, since this runs for each step of a long record.
            self.last = step
            self.line = line
            self.odd = None
            return True
        self.odd = step
        return False

    def may_belong(self, step: int) -> bool:
        """Returns whether an event that belongs to a step, such as an evaluation, can belong to
        `step`.

        Before the first step, any number is accepted.
        """
        return step >= 0 and (not self.last or step <= self.last + AHEAD)


# ---------------------------------------------------------------------- snapshot


# ---------------------------------------------------------------------- parts

# These small parts of a snapshot are plain data.


@dataclass(frozen=True)
class Job:
    """Long work in progress; `started` and `time` are the times of its first and its
    latest record.
    """

    job: str
    done: float
    total: float
    message: str
    started: float
    time: float


@dataclass(frozen=True)
class LogEntry:
    """A line of the log: `text`, reported at the Unix time `time` of the wall clock."""

    time: float
    level: str
    text: str


# ---------------------------------------------------------------------- snapshot


# ---------------------------------------------------------------------- snapshot fields

# These are the fields of a `RunSnapshot`. `engine.runs.record.snapshot` folds the records into
# them.


LOG_LINES = 500


@dataclass
class SnapshotFields:
    """All that the records of a run contain about it.

    Times are Unix seconds of a clock that ran on evenly since the first record (`Record.elapsed`).
    Only the log has the times of the wall clock.
    """

    run_id: str = ""
    name: str = ""
    device: str = ""
    device_name: str = ""
    total_steps: int = 0
    parameters: int = 0
    trained_parameters: int | None = None
    """Number of parameters that are trained; None where all are."""
    units: list[str] = field(default_factory=list)
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: float = 0.0
    """Rate of large matrix products on the device, in TFLOP/s; 0 if nothing was measured."""
    resumed_step: int | None = None
    """Step from which the latest session continued; None if the session began at the start."""
    sessions: int = 0
    """Number of sessions: one, plus one for each resume."""
    is_started: bool = False
    """True once the latest session has recorded `RunStarted`: everything is prepared."""

    state: RunState = "preparing"
    reason: str = ""
    export_failed: str = ""
    """Reason why the run has finished without an export."""
    lacks_space_for: str = ""
    """What a paused run waits to write until there is disk space; the values are those of
    `StateChanged`.
    """
    started_time: float | None = None
    session_time: float | None = None
    """Time at which the latest session began: that of its change to `preparing`, or of its
    `RunStarted` if that comes first.
    """
    last_time: float | None = None
    """Time of the latest record."""
    clock_set_by: float = 0.0
    """Seconds by which the wall clock is ahead of these times, since somebody has set it."""
    earlier_seconds: float = 0.0
    """Seconds that the sessions before the latest one took in total, without their pauses."""
    paused_time: float | None = None
    """Time at which the run paused; None unless it is paused."""
    paused_before: float = 0.0
    """Seconds that the earlier pauses of the latest session took in total."""
    earlier_paused: float = 0.0
    """Seconds that the sessions before the latest one paused in total."""
    last_seq: int = 0

    steps: StepTable = field(default_factory=StepTable)
    memory: MemoryTable = field(default_factory=MemoryTable)
    energy: float = 0.0
    """Watt hours that the cards of the run have used so far."""
    ranks: list[RankSample] = field(default_factory=list)
    """Figures of each rank in the latest sample of memory; empty for one rank."""
    norms: NormTable = field(default_factory=NormTable)
    evals: EvalTable = field(default_factory=EvalTable)
    validation: ValidationScores = field(default_factory=ValidationScores)
    exact_matches: list[ExactMatchMeasured] = field(default_factory=list)
    prompt_answers: list[PromptsAnswered] = field(default_factory=list)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    exports: list[ExportWritten] = field(default_factory=list)
    job: Job | None = None
    timeline: StepTimeline | None = None
    """Latest timeline of the record, for display."""
    timeline_steps: list[int] = field(default_factory=list)
    """Steps that have a timeline in the record."""
    data: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    prediction_check: ForecastChecked | None = None
    """Latest comparison of predictions and measurements. A resume from an earlier step does not
    remove it, since the measurements remain valid.
    """
    plan_choices: dict[str, Any] = field(default_factory=dict)
    plan_grid: str = ""
    simulated: PlanSimulated | None = None
    """Simulation of the latest session's plan; None if no rates were known."""
    lines: int = 0
    """Number of lines of the record so far, including damaged ones."""
    damaged_lines: int = 0
    """Number of lines that could not be read or have an implausible step number."""
    order: StepOrder = field(default_factory=StepOrder)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    requests_taken: int = 0
    """Number of requests that the run has taken."""
    changes: list[SettingsChanged] = field(default_factory=list)
    skipped: list[StepSkipped] = field(default_factory=list)


# ---------------------------------------------------------------------- snapshot


OVER_STATES = ("finished", "stopped", "failed", "discarded")
"""States in which a run ends."""

DAMAGED_SHOWN = 20
"""Number of damaged lines that the log names, at most; further ones are only counted."""
PROMPT_ANSWERS = 200
"""Number of evaluations, the latest ones, for which the answers to the sample prompts are kept."""
RECENT_STEPS = 20
"""Number of the latest steps of which the speed is shown."""
PACE_SECONDS = 120
MOST_PACE_STEPS = 1000
"""Length of time, and most steps in it, whose median step gives the remaining time. With those of a
few seconds it would swing.
"""

E = TypeVar("E", ExactMatchMeasured, PromptsAnswered, CheckpointWritten, ExportWritten, StepSkipped)


@dataclass
class RunSnapshot(SnapshotFields):
    """Everything that a screen shows about one run."""

    # ------------------------------------------------------------------ values that follow

    @property
    def is_over(self) -> bool:
        return self.state in OVER_STATES

    @property
    def step(self) -> int:
        """Number of steps that are over, applied or skipped."""
        skipped = self.skipped[-1].step if self.skipped else 0
        applied = self.steps.step[-1] if self.steps.step else 0
        return max(self.resumed_step or 0, applied, skipped)

    @property
    def peak_tflops(self) -> float:
        """The measured rate of large matrix products, in TFLOP/s; 0 if nothing was measured, or if
        steps are faster: other programs then had the device while it was measured.
        """
        recent = self.steps.tflops[-RECENT_STEPS:]
        is_exceeded = bool(len(recent)) and statistics.median(recent) > self.ceiling_tflops
        return 0.0 if is_exceeded else self.ceiling_tflops

    @property
    def rank_count(self) -> int:
        """Number of ranks that compute the run by its latest plan."""
        ranks = self.plan_choices.get("ranks")
        return ranks if isinstance(ranks, int) and ranks > 0 else 1

    @property
    def loss(self) -> float | None:
        return self.steps.loss[-1] if self.steps.loss else None

    @property
    def best(self) -> Best | None:
        """Best evaluation after a step, if any was better than that before the first one, by what
        the run chooses by (`validation.by`).
        """
        return self.validation.best

    @property
    def eval_rows(self) -> dict[int, RowLosses]:
        """Losses of validation rows by step, of the newest evaluations, the best, and the one
        before the first step.
        """
        return self.validation.rows

    @property
    def exported_step(self) -> int | None:
        """Step whose weights the run exported last; None if it has exported none."""
        return self.exports[-1].step if self.exports else None

    @property
    def progress(self) -> float:
        """Fraction of the steps that have been applied, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds from the run's first record to its latest one."""
        return max(0.0, (self.last_time or 0.0) - (self.started_time or 0.0))

    @property
    def seconds(self) -> float:
        """Working time of the run in seconds, without pauses and the time between sessions."""
        if self.session_time is None or self.last_time is None:
            return self.earlier_seconds
        worked = self.last_time - self.session_time - self.session_paused(self.last_time)
        return self.earlier_seconds + max(0.0, worked)

    @property
    def paused_seconds(self) -> float:
        """Seconds that the run has paused, in all of its sessions."""
        return self.earlier_paused + self.session_paused(self.last_time or 0.0)

    def session_paused(self, until: float) -> float:
        """Returns for how many seconds the latest session has paused up to the time `until`."""
        if self.paused_time is None:
            return self.paused_before
        return self.paused_before + max(0.0, until - self.paused_time)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the remaining steps will take at the median pace of the steps of the latest
        `PACE_SECONDS`, or of the latest `RECENT_STEPS` if these took longer.

        None before the first step and once the run is over.
        """
        if self.is_over or not self.steps.seconds or not self.total_steps:
            return None
        left = max(0, self.total_steps - self.step)
        recent = statistics.median(self.steps.seconds[-RECENT_STEPS:])
        if recent * MOST_PACE_STEPS > PACE_SECONDS:
            steady = max(RECENT_STEPS, int(PACE_SECONDS / recent))
        else:
            steady = MOST_PACE_STEPS
        return statistics.median(self.steps.seconds[-steady:]) * left

    # ------------------------------------------------------------------ the fold

    def apply(self, record: Record) -> None:
        """Adds the next record of the run."""
        if self.started_time is None:
            self.started_time = record.time or None
        self.lines += 1
        time = record.time
        # A person or a time server may set the wall clock at any moment, so differences of recorded
        # times mean nothing; `elapsed` is counted on a clock that nobody sets.
        if time and self.started_time is not None and record.elapsed is not None:
            time = self.started_time + record.elapsed
        fold = _FOLDS.get(type(record.event))
        if fold is not None:
            is_log = isinstance(record.event, LogLine)
            fold(self, record.time if is_log else time, record.event)
        # These are set last, since a fold may still need the time of the previous record.
        self.run_id = record.run_id
        self.last_seq = record.seq
        if record.time:
            self.last_time = time
            self.clock_set_by = record.time - time

    def take_later_export(self) -> None:
        """Adds an export that a person made where the run's own export had failed."""
        self.export_failed = ""

    def _begin_session(self, time: float) -> None:
        self.earlier_seconds, self.earlier_paused = self.seconds, self.paused_seconds
        self.paused_time, self.paused_before = None, 0.0
        self.session_time = time
        self.sessions += 1
        self.is_started = False

    def _run_started(self, time: float, event: RunStarted) -> None:
        if self.session_time is None or self.is_started or self.is_over:
            self._begin_session(time)
        self.is_started = True
        self.name = event.name
        self.device = event.device
        self.device_name = event.device_name
        self.total_steps = event.total_steps
        self.parameters = event.parameters
        self.trained_parameters = event.trained_parameters
        self.units = event.units
        self.program_version = event.program_version
        self.flops_formula = event.flops_formula
        self.ceiling_tflops = event.ceiling_tflops
        self.resumed_step = event.resumed_step
        self.state = "preparing"
        self.reason = ""
        self.export_failed = ""
        self.lacks_space_for = ""
        self.job = None
        # A session that begins at the start measures anew what is measured before the first step.
        self._drop_after(-1 if event.resumed_step is None else event.resumed_step, event.best_by)
        self.order.begin(event.resumed_step or 0, self.lines)

    def _drop_after(self, step: int, best_by: BestBy | None = None) -> None:
        """Removes what belongs to steps after `step`. From now on, weights are compared `best_by`
        this, or by what they were if it is None.
        """
        tables: tuple[EventTable, ...] = (self.steps, self.memory, self.evals, self.norms)
        for table in tables:
            table.drop_after(step)
        self.exact_matches = _up_to(step, self.exact_matches)
        self.validation.begin(best_by or self.validation.by, step, self.evals, self.exact_matches)
        self.prompt_answers = _up_to(step, self.prompt_answers)
        self.checkpoints = _up_to(step, self.checkpoints)
        self.exports = _up_to(step, self.exports)
        self.skipped = _up_to(step, self.skipped)
        del self.timeline_steps[bisect.bisect_right(self.timeline_steps, step) :]
        if self.timeline is not None and self.timeline.step > step:
            self.timeline = None

    def _state_changed(self, time: float, event: StateChanged) -> None:
        if event.state == "preparing" and event.lacks_space_for != "found":
            self._begin_session(time)
        self._enter(event.state, time)
        self.reason = event.reason
        self.job = None
        self.lacks_space_for = "" if event.lacks_space_for == "found" else event.lacks_space_for

    def _enter(self, state: RunState, time: float) -> None:
        if self.paused_time is not None and state != "paused":
            self.paused_before = self.session_paused(time)
            self.paused_time = None
        elif self.paused_time is None and state == "paused":
            self.paused_time = time
        self.state = state

    def _job_progressed(self, time: float, event: JobProgressed) -> None:
        if event.total > 0 and event.done >= event.total:
            self.job = None
            return
        continues = self.job is not None and self.job.job == event.job
        started = self.job.started if self.job is not None and continues else time
        self.job = Job(event.job, event.done, event.total, event.message, started, time)

    def _end_job(self, job: str) -> None:
        """Ends a job whose result has been recorded, whether or not its progress reached the
        end.
        """
        if self.job is not None and self.job.job == job:
            self.job = None

    def _data_prepared(self, _: float, event: DataPrepared) -> None:
        self.data = event.summary
        self._end_job("tokenize")

    def _fit_reported(self, _: float, event: FitReported) -> None:
        self.fit = event.report

    def _forecast_checked(self, _: float, event: ForecastChecked) -> None:
        self.prediction_check = event

    def _plan_built(self, _: float, event: PlanBuilt) -> None:
        self.plan_choices = event.choices
        self.plan_grid = event.grid
        self.simulated = None
        self.ranks = []

    def _plan_simulated(self, _: float, event: PlanSimulated) -> None:
        self.simulated = event

    def _step_finished(self, time: float, event: StepFinished) -> None:
        if not self.order.takes(event.step, self.lines):
            self._impossible(time, event)
            return
        # A repeated step number comes from a resume whose first line is missing.
        if event.step <= self.step:
            self._drop_after(event.step - 1)
        self.steps.append(time, event)

    def _step_timeline(self, time: float, event: StepTimeline) -> None:
        goes_back = self.timeline_steps and event.step < self.timeline_steps[-1]
        if goes_back or not self.order.may_belong(event.step):
            self._impossible(time, event)
            return
        self.timeline_steps.append(event.step)
        self.timeline = event

    def _memory_sampled(self, time: float, event: MemorySampled) -> None:
        if self._fits(self.memory, time, event):
            self.energy += self.memory.watt_hours(time, event, self.session_time)
            self.memory.append(time, event, self.energy)
            self.ranks = event.ranks

    def _unit_norms(self, time: float, event: UnitNorms) -> None:
        if self._fits(self.norms, time, event):
            self.norms.append(time, event)

    def _eval_finished(self, time: float, event: EvalFinished) -> None:
        if self._fits(self.evals, time, event):
            self.evals.append(time, event)
            self.validation.evaluated(event)
        self._end_job("evaluate")

    def _exact_match_measured(self, _: float, event: ExactMatchMeasured) -> None:
        self.exact_matches.append(event)
        self.validation.answered(event, self.evals)
        self._end_job("sample")

    def _prompts_answered(self, _: float, event: PromptsAnswered) -> None:
        self.prompt_answers.append(event)
        del self.prompt_answers[:-PROMPT_ANSWERS]
        self._end_job("prompts")

    def _checkpoint_written(self, _: float, event: CheckpointWritten) -> None:
        self.checkpoints.append(event)
        self._end_job("checkpoint")

    def _best_kept(self, _: float, event: BestKept) -> None:
        self.validation.written(event)

    def _export_written(self, _: float, event: ExportWritten) -> None:
        self.exports.append(event)
        self._end_job("export")

    def _control_received(self, _: float, __: ControlReceived) -> None:
        self.requests_taken += 1

    def _settings_changed(self, _: float, event: SettingsChanged) -> None:
        self.total_steps = event.total_steps or self.total_steps
        self.changes.append(event)

    def _step_skipped(self, _: float, event: StepSkipped) -> None:
        self.order.takes(event.step, self.lines)
        self.skipped.append(event)

    def _log_line(self, time: float, event: LogLine) -> None:
        self.log.append(LogEntry(time, event.level, event.text))

    def _line_damaged(self, time: float, event: LogLine) -> None:
        """Counts a damaged line and logs the first few."""
        self.damaged_lines += 1
        if self.damaged_lines <= DAMAGED_SHOWN:
            self._log_line(time, event)

    def _fits(self, table: EventTable, time: float, event: StepEvent) -> bool:
        """Returns whether a row's step is plausible and not before that of the last row."""
        goes_back = table.step and event.step < table.step[-1]
        if goes_back or not self.order.may_belong(event.step):
            self._impossible(time, event)
            return False
        return True

    def _impossible(self, time: float, event: StepEvent | StepTimeline) -> None:
        """Counts a line with an implausible step as damaged."""
        text = (
            f"Line {self.lines} of the record names step {event.step}, which cannot be: it is not "
            "shown."
        )
        self._line_damaged(time + self.clock_set_by, LogLine("warning", text))

    def _run_ended(self, time: float, event: RunEnded) -> None:
        self._enter(event.state, time)
        self.reason = event.reason
        self.export_failed = event.export_failed
        self.lacks_space_for = ""
        self.job = None


def _up_to(step: int, events: list[E]) -> list[E]:
    """Returns the events whose step is at most `step`."""
    return [event for event in events if event.step <= step]


_FOLDS: dict[type[Event], Callable[[RunSnapshot, float, Any], None]] = {
    RunStarted: RunSnapshot._run_started,
    StateChanged: RunSnapshot._state_changed,
    JobProgressed: RunSnapshot._job_progressed,
    DataPrepared: RunSnapshot._data_prepared,
    FitReported: RunSnapshot._fit_reported,
    ForecastChecked: RunSnapshot._forecast_checked,
    PlanBuilt: RunSnapshot._plan_built,
    PlanSimulated: RunSnapshot._plan_simulated,
    StepFinished: RunSnapshot._step_finished,
    StepTimeline: RunSnapshot._step_timeline,
    UnitNorms: RunSnapshot._unit_norms,
    MemorySampled: RunSnapshot._memory_sampled,
    EvalFinished: RunSnapshot._eval_finished,
    ExactMatchMeasured: RunSnapshot._exact_match_measured,
    PromptsAnswered: RunSnapshot._prompts_answered,
    CheckpointWritten: RunSnapshot._checkpoint_written,
    BestKept: RunSnapshot._best_kept,
    ExportWritten: RunSnapshot._export_written,
    ControlReceived: RunSnapshot._control_received,
    SettingsChanged: RunSnapshot._settings_changed,
    StepSkipped: RunSnapshot._step_skipped,
    LogLine: RunSnapshot._log_line,
    LineDamaged: RunSnapshot._line_damaged,
    RunEnded: RunSnapshot._run_ended,
}
"""The method that folds each kind of event, which takes the record's time and the event."""
