"""`RunSnapshot`: what a run's records add up to, as plain data that the screens draw.

A pure fold: the same records give the same snapshot, whether they arrive live, from a file or from
another process's file as it grows. Each record is applied in constant time (amortised), so a run of
any length can be followed.

The thread that applies is the one that reads: a table cannot grow while an array made from one of
its columns is alive.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine.runs.event_tables import EvalTable, EventTable, MemoryTable, NormTable, StepTable
from engine.runs.events import (
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
    Record,
    RunEnded,
    RunStarted,
    SettingsChanged,
    StateChanged,
    StepFinished,
    StepTimeline,
    UnitNorms,
)
from engine.runs.step_order import StepOrder

OVER_STATES = ("finished", "stopped", "failed", "discarded")
"""The states that a run ends in."""

LOG_LINES = 500
DAMAGED_TOLD = 20
"""Damaged lines that the log names; of further ones there is only the number."""
PROMPT_ANSWERS = 200
"""Evaluations whose answers to the sample prompts are kept: the latest."""
RECENT_STEPS = 20


@dataclass(frozen=True)
class Job:
    """Long work that is going on: `started` and `time` are the Unix times of its first and latest
    record.
    """

    job: str
    done: float
    total: float
    message: str
    started: float
    time: float


@dataclass(frozen=True)
class LogEntry:
    time: float
    level: str
    text: str


@dataclass
class RunSnapshot:
    """Everything that a screen shows of one run. Times are Unix seconds."""

    run_id: str = ""
    name: str = ""
    device: str = ""
    device_name: str = ""
    total_steps: int = 0
    parameters: int = 0
    units: list[str] = field(default_factory=list)
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: float = 0.0
    """What large matrix products reach on this device; 0 where it was not measured."""
    resumed_step: int | None = None
    """The step that the latest session continued from; None when it began at the start."""
    sessions: int = 0
    """How often the run was started: 1, and one more for each resume."""
    is_started: bool = False
    """Whether the latest session has described itself by `RunStarted`, which it does once
    everything is prepared.
    """

    state: str = "preparing"
    reason: str = ""
    lacks_space_for: str = ""
    """What a paused run waits to write until there is space on the disk, as `StateChanged` calls
    it.
    """
    started_time: float | None = None
    session_time: float | None = None
    """When the latest session began: its change to `preparing`, or its `RunStarted` where that
    comes first.
    """
    last_time: float | None = None
    """Time of the latest record."""
    earlier_seconds: float = 0.0
    """Length of the sessions before the latest one."""
    last_seq: int = 0

    steps: StepTable = field(default_factory=StepTable)
    memory: MemoryTable = field(default_factory=MemoryTable)
    energy: float = 0.0
    """Watt hours that the card took so far."""
    norms: NormTable = field(default_factory=NormTable)
    evals: EvalTable = field(default_factory=EvalTable)
    exact_matches: list[ExactMatchMeasured] = field(default_factory=list)
    prompt_answers: list[PromptsAnswered] = field(default_factory=list)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    exports: list[ExportWritten] = field(default_factory=list)
    job: Job | None = None
    timeline: StepTimeline | None = None
    """The latest one."""
    timeline_steps: list[int] = field(default_factory=list)
    """The steps that have one in the record."""
    data: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    forecast: ForecastChecked | None = None
    """The latest one: a resume from an earlier step makes what was measured no less true."""
    plan_choices: dict[str, Any] = field(default_factory=dict)
    plan_grid: str = ""
    simulated: PlanSimulated | None = None
    """Of the latest session's plan; None where no rates were known."""
    lines: int = 0
    """Lines of the record so far, damaged ones included."""
    damaged_lines: int = 0
    """Of these, those that could not be read or whose step cannot be true."""
    order: StepOrder = field(default_factory=StepOrder)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    requests_taken: int = 0
    """What people asked of the run and it has taken up."""
    changes: list[SettingsChanged] = field(default_factory=list)

    # ------------------------------------------------------------------ what follows from it

    @property
    def is_over(self) -> bool:
        return self.state in OVER_STATES

    @property
    def step(self) -> int:
        """Steps that are applied."""
        resumed, steps = self.resumed_step or 0, self.steps.step
        return max(resumed, steps[-1]) if steps else resumed

    @property
    def loss(self) -> float | None:
        return self.steps.loss[-1] if self.steps.loss else None

    @property
    def progress(self) -> float:
        """0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 0.0

    @property
    def seconds(self) -> float:
        """Time that the run was at work, the time between sessions excluded."""
        if self.session_time is None or self.last_time is None:
            return self.earlier_seconds
        return self.earlier_seconds + max(0.0, self.last_time - self.session_time)

    @property
    def seconds_left(self) -> float | None:
        """From the median of the latest steps; None while that is unknown and once the run is over."""
        if self.is_over or not self.steps.seconds or not self.total_steps:
            return None
        return statistics.median(self.steps.seconds[-RECENT_STEPS:]) * max(
            0, self.total_steps - self.step
        )

    # ------------------------------------------------------------------ the fold

    def apply(self, record: Record) -> None:
        """Add the next record of the run. A kind that this version does not know changes only the
        envelope fields.
        """
        if self.started_time is None:
            self.started_time = record.time or None
        self.lines += 1
        fold = _FOLDS.get(type(record.event))
        if fold is not None:
            fold(self, record.time, record.event)
        self.run_id, self.last_seq, self.last_time = (
            record.run_id,
            record.seq,
            record.time or self.last_time,
        )

    def _begin_session(self, time: float) -> None:
        self.earlier_seconds = self.seconds
        self.session_time = time
        self.sessions += 1
        self.is_started = False

    def _run_started(self, time: float, event: RunStarted) -> None:
        if self.session_time is None or self.is_started or self.is_over:
            self._begin_session(time)
        self.is_started = True
        self.name, self.device, self.device_name = event.name, event.device, event.device_name
        self.total_steps, self.parameters, self.units = (
            event.total_steps,
            event.parameters,
            event.units,
        )
        self.program_version, self.flops_formula = event.program_version, event.flops_formula
        self.ceiling_tflops, self.resumed_step = event.ceiling_tflops, event.resumed_step
        self.state, self.reason, self.lacks_space_for, self.job = "preparing", "", "", None
        self._drop_after(event.resumed_step or 0)
        self.order.begin(event.resumed_step or 0, self.lines)

    def _drop_after(self, step: int) -> None:
        for table in (self.steps, self.memory, self.evals, self.norms):
            table.drop_after(step)
        for events in (self.exact_matches, self.prompt_answers, self.checkpoints, self.exports):
            events[:] = [event for event in events if event.step <= step]
        del self.timeline_steps[bisect.bisect_right(self.timeline_steps, step) :]
        if self.timeline is not None and self.timeline.step > step:
            self.timeline = None

    def _state_changed(self, time: float, event: StateChanged) -> None:
        if event.state == "preparing" and event.lacks_space_for != "found":
            self._begin_session(time)
        self.state, self.reason, self.job = event.state, event.reason, None
        self.lacks_space_for = event.lacks_space_for if event.lacks_space_for != "found" else ""

    def _job_progressed(self, time: float, event: JobProgressed) -> None:
        if event.total > 0 and event.done >= event.total:
            self.job = None
            return
        started = self.job.started if self.job is not None and self.job.job == event.job else time
        self.job = Job(event.job, event.done, event.total, event.message, started, time)

    def _end_job(self, job: str) -> None:
        """Its result is there, whether or not its progress reached the end."""
        if self.job is not None and self.job.job == job:
            self.job = None

    def _data_prepared(self, time: float, event: DataPrepared) -> None:
        self.data = event.summary
        self._end_job("tokenise")

    def _fit_reported(self, time: float, event: FitReported) -> None:
        self.fit = event.report

    def _forecast_checked(self, time: float, event: ForecastChecked) -> None:
        self.forecast = event

    def _plan_built(self, time: float, event: PlanBuilt) -> None:
        self.plan_choices, self.plan_grid, self.simulated = event.choices, event.grid, None

    def _plan_simulated(self, time: float, event: PlanSimulated) -> None:
        self.simulated = event

    def _step_finished(self, time: float, event: StepFinished) -> None:
        if not self.order.takes(event.step, self.lines):
            self._impossible(time, event)
            return
        if event.step <= self.step:
            self._drop_after(event.step - 1)
        self.steps.append(time, event)

    def _step_timeline(self, time: float, event: StepTimeline) -> None:
        if self.order.may_belong(event.step) and not (
            self.timeline_steps and event.step < self.timeline_steps[-1]
        ):
            self.timeline_steps.append(event.step)
            self.timeline = event
        else:
            self._impossible(time, event)

    def _memory_sampled(self, time: float, event: MemorySampled) -> None:
        if self._fits(self.memory, time, event):
            self.energy += self.memory.watt_hours(time, event, self.session_time)
            self.memory.append(time, event, self.energy)

    def _unit_norms(self, time: float, event: UnitNorms) -> None:
        if self._fits(self.norms, time, event):
            self.norms.append(time, event)

    def _eval_finished(self, time: float, event: EvalFinished) -> None:
        if self._fits(self.evals, time, event):
            self.evals.append(time, event)
        self._end_job("evaluate")

    def _exact_match_measured(self, time: float, event: ExactMatchMeasured) -> None:
        self.exact_matches.append(event)
        self._end_job("sample")

    def _prompts_answered(self, time: float, event: PromptsAnswered) -> None:
        self.prompt_answers.append(event)
        del self.prompt_answers[:-PROMPT_ANSWERS]
        self._end_job("prompts")

    def _checkpoint_written(self, time: float, event: CheckpointWritten) -> None:
        self.checkpoints.append(event)
        self._end_job("checkpoint")

    def _export_written(self, time: float, event: ExportWritten) -> None:
        self.exports.append(event)
        self._end_job("export")

    def _control_received(self, time: float, event: ControlReceived) -> None:
        self.requests_taken += 1

    def _settings_changed(self, time: float, event: SettingsChanged) -> None:
        self.total_steps = event.total_steps or self.total_steps
        self.changes.append(event)

    def _log_line(self, time: float, event: LogLine) -> None:
        self.log.append(LogEntry(time, event.level, event.text))

    def _line_damaged(self, time: float, event: LogLine) -> None:
        self.damaged_lines += 1
        if self.damaged_lines <= DAMAGED_TOLD:
            self._log_line(time, event)

    def _fits(self, table: EventTable, time: float, event: Event) -> bool:
        """Whether a row's step can be true; tables never go back."""
        fits = self.order.may_belong(event.step) and not (
            table.step and event.step < table.step[-1]
        )
        if not fits:
            self._impossible(time, event)
        return fits

    def _impossible(self, time: float, event: Event) -> None:
        text = (
            f"Line {self.lines} of the record names step {event.step}, which cannot be: it is not "
            "shown."
        )
        self._line_damaged(time, LogLine("warning", text))

    def _run_ended(self, time: float, event: RunEnded) -> None:
        self.state, self.reason, self.lacks_space_for, self.job = (
            event.state,
            event.reason,
            "",
            None,
        )


_FOLDS = {
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
    ExportWritten: RunSnapshot._export_written,
    ControlReceived: RunSnapshot._control_received,
    SettingsChanged: RunSnapshot._settings_changed,
    LogLine: RunSnapshot._log_line,
    LineDamaged: RunSnapshot._line_damaged,
    RunEnded: RunSnapshot._run_ended,
}
