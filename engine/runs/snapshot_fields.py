"""These are the fields of a `RunSnapshot`. `engine.runs.snapshot` folds the records into them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine.runs.event_tables import EvalTable, MemoryTable, NormTable, StepTable
from engine.runs.events import (
    CheckpointWritten,
    ExactMatchMeasured,
    ExportWritten,
    ForecastChecked,
    PlanSimulated,
    PromptsAnswered,
    RunState,
    SettingsChanged,
    StepTimeline,
)
from engine.runs.fault_events import StepSkipped
from engine.runs.held_out import HeldOut
from engine.runs.memory_events import RankSample
from engine.runs.parts import Job, LogEntry
from engine.runs.step_order import StepOrder

LOG_LINES = 500


@dataclass
class SnapshotFields:
    """The `SnapshotFields` are everything that the records of a run tell about it.

    Times are Unix seconds of a clock that ran on evenly since the first record
    (`engine.runs.steady_time`). Only the log has the times that the wall clock told.
    """

    run_id: str = ""
    name: str = ""
    device: str = ""
    device_name: str = ""
    total_steps: int = 0
    parameters: int = 0
    trained_parameters: int | None = None
    """So many of them are trained; None where all are."""
    units: list[str] = field(default_factory=list)
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: float = 0.0
    """Large matrix products reach this rate on the device (TFLOP/s); it is 0 if nothing was
    measured.
    """
    resumed_step: int | None = None
    """The latest session continued from this step; it is None if the session began at the start."""
    sessions: int = 0
    """The run was started this many times: once, plus once for each resume."""
    is_started: bool = False
    """This is True once the latest session has recorded `RunStarted`: everything is prepared."""

    state: RunState = "preparing"
    reason: str = ""
    export_failed: str = ""
    """The run has finished without an export, for this reason."""
    lacks_space_for: str = ""
    """A paused run waits for disk space to write this; the values are those of `StateChanged`."""
    started_time: float | None = None
    session_time: float | None = None
    """The latest session began at this time: with its change to `preparing`, or with its
    `RunStarted` if that comes first.
    """
    last_time: float | None = None
    """The latest record has this time."""
    clock_set_by: float = 0.0
    """The wall clock is ahead of these times by so many seconds, since somebody has set it."""
    earlier_seconds: float = 0.0
    """The sessions before the latest one took this many seconds in total."""
    last_seq: int = 0

    steps: StepTable = field(default_factory=StepTable)
    memory: MemoryTable = field(default_factory=MemoryTable)
    energy: float = 0.0
    """The cards of the run have used this many watt hours so far."""
    ranks: list[RankSample] = field(default_factory=list)
    """The latest sample of memory has these figures of each rank; it is empty for one rank."""
    norms: NormTable = field(default_factory=NormTable)
    evals: EvalTable = field(default_factory=EvalTable)
    held_out: HeldOut = field(default_factory=HeldOut)
    exact_matches: list[ExactMatchMeasured] = field(default_factory=list)
    prompt_answers: list[PromptsAnswered] = field(default_factory=list)
    checkpoints: list[CheckpointWritten] = field(default_factory=list)
    exports: list[ExportWritten] = field(default_factory=list)
    job: Job | None = None
    timeline: StepTimeline | None = None
    """The latest timeline of the record is kept here for display."""
    timeline_steps: list[int] = field(default_factory=list)
    """These are the steps that have a timeline in the record."""
    data: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    forecast: ForecastChecked | None = None
    """The latest comparison of predictions and measurements is kept. A resume from an earlier step
    does not remove it, since the measurements remain valid.
    """
    plan_choices: dict[str, Any] = field(default_factory=dict)
    plan_grid: str = ""
    simulated: PlanSimulated | None = None
    """The simulation of the latest session's plan is kept; it is None if no rates were known."""
    lines: int = 0
    """The record has this many lines so far, including damaged ones."""
    damaged_lines: int = 0
    """This many of the lines could not be read or have an implausible step number."""
    order: StepOrder = field(default_factory=StepOrder)
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    requests_taken: int = 0
    """The run has taken up this many requests from people."""
    changes: list[SettingsChanged] = field(default_factory=list)
    skipped: list[StepSkipped] = field(default_factory=list)
