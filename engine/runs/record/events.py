"""The events of a run's record, ``runs/<id>/events.jsonl``.

- Each event is one JSON line and never changes.
- A line contains `kind`, `run_id`, `seq` (which continues across resumes), `time` (Unix seconds,
  for display) and `elapsed`, followed by the event's own fields. Durations are differences of
  `elapsed`, which counts the seconds since the run began on a clock that nobody sets.
- A reader checks each line against the types of the fields, since the values are used in
  calculations and drawings without further checks.
- A field that a line lacks takes its default. A kind that this version does not know is kept as
  `Unknown`, so that a file of a newer version of the same format still opens.
`engine.runs.record.recorder` explains when a line is written and what a torn line means.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct, ValidationError, convert, field

# ---------------------------------------------------------------------- field types

# Fields of events may have the types that are defined in this module.
#
# A reader checks each line of a record against them.


LARGEST_WHOLE = 1 << 53
"""Largest integer, since JavaScript represents integers exactly up to this limit, and sums of many
of them fit into 64 bits.
"""
LARGEST = sys.float_info.max
"""Largest float, so that it is finite."""

Whole = Annotated[int, Meta(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
# The bounds of a float reject NaN and the infinities, which Python's JSON parser accepts.
Number = (
    Annotated[int, Meta(ge=-1 << 63, le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
)
"""A number in a record. An integer stays one, so that a line does not change when it is read and
written again.
"""


_LONGEST = 10**11
Moment = (
    Annotated[int, Meta(ge=-_LONGEST, le=_LONGEST)]
    | Annotated[float, Meta(ge=-_LONGEST, le=_LONGEST)]
)
"""Seconds from the first op of a step, which drawings multiply."""

BestBy = Literal["loss", "exact_match"]
"""Measure by which the weights of a run are compared: their validation loss, or the fraction of
validation prompts that they answer exactly.
"""


class Span(TypedDict):
    """One op of a step, from `start` to `end`, in seconds from the step's first op."""

    unit: str
    op: str
    lane: str
    micro_batch: NotRequired[Whole | None]
    start: Moment
    end: Moment
    rank: NotRequired[Whole]
    """Rank that ran the op; left out for rank 0, the only one of a single GPU."""


class Wait(TypedDict):
    """A wait of the COMPUTE lane from `start` to `end`, for h2d, d2h, optimizer, disk, exchange
    (with other ranks) or other.
    """

    start: Moment
    end: Moment
    cause: NotRequired[str]
    rank: NotRequired[Whole]
    """Rank whose lane it was; left out for rank 0."""


class Answer(TypedDict):
    """A run's answer to one of the fixed prompts."""

    prompt: str
    answer: str


class Comparison(TypedDict, total=False):
    """The predicted and the measured value of one figure; an unknown value is None.

    `error` is measured / predicted - 1.
    """

    predicted: Number | None
    measured: Number | None
    error: Number | None


# ---------------------------------------------------------------------- events


# ---------------------------------------------------------------------- event base

# Every event of a record has this base class. `engine.runs.record.events` has the list of all
# events.


def _kind_of(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(Struct, frozen=True, gc=False, tag=_kind_of, tag_field="kind"):
    """Something that happened in a run; the base class of all kinds of events.

    `kind` is the class name in snake case. `gc=False` excludes events from Python's garbage
    collector, which would otherwise traverse the hundreds of thousands of events of a long record
    again and again. This is safe because an event holds JSON values, which form no reference
    cycles.
    """

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.kind = _kind_of(cls.__name__)

    def fields(self) -> dict[str, Any]:
        """Returns the field values by the names that they have in the record."""
        return {
            recorded: getattr(self, name)
            for name, recorded in zip(self.__struct_fields__, self.__struct_encode_fields__)
        }


# ---------------------------------------------------------------------- events


# ---------------------------------------------------------------------- memory events

# One event has the memory that a run takes. `engine.runs.record.events` has the list of all events.


class RankSample(TypedDict):
    """Memory of a rank, in bytes. `power` is that of its card in watts, 0 if unknown."""

    rank: Whole
    host: Whole
    """Memory that the process has for itself, without what all ranks share."""
    gpu_allocated: Whole
    gpu_reserved: Whole
    gpu_peak: Whole
    gpu_driver: Whole
    gpu_total: Whole
    power: Number


class MemorySampled(Event, frozen=True):
    """A measurement of memory after `step`; the figures are in bytes.

    `gpu_driver` is the memory in use on the whole card, as the driver reports it. `host_total` is
    what all processes of this session together may use. `power` is the card's power in watts, or 0
    if unknown.

    Where several ranks compute, `host_rss` counts the memory of all their processes, with what they
    share once, and `power` is that of all cards; the other figures are those of rank 0.

    `cpu_others` is the share of the cores' time that other programs used since the sample before;
    it is negative where that is not known, as with several ranks and in older records.
    """

    step: Whole = 0
    host_rss: Whole = 0
    host_pinned: Whole = 0
    gpu_allocated: Whole = 0
    gpu_reserved: Whole = 0
    gpu_peak: Whole = 0
    gpu_driver: Whole = 0
    gpu_total: Whole = 0
    host_total: Whole = 0
    power: Number = 0.0
    cpu_others: Number = -1.0
    ranks: list[RankSample] = []
    """Figures of each rank; a record of one rank does not have them."""

    def fields(self) -> dict[str, Any]:
        values = super().fields()
        if not self.ranks:
            del values["ranks"]
        return values


# ---------------------------------------------------------------------- events


# ---------------------------------------------------------------------- kept events

# These events record which weights of a run are kept beside its checkpoints.


class BestKept(Event, frozen=True):
    """The weights after `step` were written to the disk, to `path` within the run folder, since no
    other weights that are kept there were better in an evaluation.

    They take the place of those that were kept before (`output.keep_best`).
    """

    step: Whole = 0
    loss: Number = 0.0
    """Loss of the validation rows after `step`."""
    path: str = ""
    bytes: Whole = 0
    seconds: Number = 0.0
    """Seconds from the beginning of their writing until they were complete."""
    waited_seconds: Number = 0.0
    """Seconds at most that training waited for them, as with a checkpoint."""
    copied_bytes: Whole = 0
    """Bytes that were copied in RAM first, so that updates could continue."""
    correct: Whole = 0
    total: Whole = 0
    """Number of the `total` validation prompts that were answered exactly, where the run chooses by
    that; if not, both are 0.
    """


# ---------------------------------------------------------------------- events


# ---------------------------------------------------------------------- fault events

# These events record a fault that a run has got over by itself.


class StepSkipped(Event, frozen=True):
    """Step `step` is over without an update, since its loss or its gradient norm was not finite.

    The weights and the moments are those of the step before it.
    """

    step: Whole = 0
    what: str = ""
    """Number that was not finite: the loss or the gradient norm."""
    rows: list[Whole] = []
    """Training rows that the step read, counted from 0 in the order of the data."""


class PlannedAnew(Event, frozen=True):
    """The GPU ran out of memory before the updates of `step`, so the step was planned with less.

    It may also run out in an evaluation, which is then repeated. The new plan follows as a
    `PlanBuilt`.
    """

    step: Whole = 0
    """Step that was planned anew; 0 if the dry run ran out of memory."""
    attempt: Whole = 0
    """Number of times that the step, or what `during` names, ran out of memory."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    """Choices that differ, by name, as `before` has them."""
    changes_rounding: bool = False
    """The order of sums differs from here on, or where an optimizer runs."""
    during: str = ""
    """Empty for a step. After `step`, or before training if that is 0, it is `evaluation`,
    `prompts` (the sample prompts) or `exact_match` (the validation prompts).
    """


# ---------------------------------------------------------------------- events


EXPORT_FAILED = "export failed"
"""Text that follows the state of a run that has finished, where its model could not be written."""


def state_text(state: str, export_failed: str) -> str:
    """Returns a run's state, or that of a run whose export failed, for other programs."""
    return f"{state}, {EXPORT_FAILED}" if export_failed else state


# ---------------------------------------------------------------------- the events


RunState = Literal[
    "preparing",
    "running",
    "pausing",
    "paused",
    "stopping",
    "saving",
    "finished",
    "stopped",
    "failed",
    "discarded",
]
"""State of a run. `interrupted` is never recorded: a reader infers it when the process that wrote
an unfinished run is gone.
"""


class RunStarted(Event, frozen=True):
    """The run is prepared, and its first step comes next. Each resume writes this event again."""

    name: str = ""
    pid: Whole = 0
    device: str = "cpu"
    device_name: str = ""
    total_steps: Whole = 0
    parameters: Whole = 0
    trained_parameters: Whole | None = None
    """Number of parameters that are trained; None where all are."""
    units: list[str] = []
    resumed_step: Whole | None = None
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: Number = 0.0
    """Rate of large matrix products on the device, or on all devices of the run together, in
    TFLOP/s, as measured before the run. It is 0 if nothing was measured.
    """
    best_by: BestBy = "loss"
    """Measure by which the best weights are chosen in the session (`output.keep_best`)."""


class StateChanged(Event, frozen=True):
    """The run entered `state`; `reason` is a sentence for the user, or empty."""

    state: RunState = "preparing"
    reason: str = ""
    lacks_space_for: str = field(name="room", default="")
    """What a paused run waits to write until there is disk space: its `record`, a `checkpoint`, or
    the checkpoint that it writes before it stops (`stop`). The run continues without a request once
    there is space; the event that restores the earlier state then contains `found`. In the record,
    this field is called `room`.
    """
    paused_seconds: Number = 0
    """Seconds that the session has paused so far. The recorder fills it in."""


class JobProgressed(Event, frozen=True):
    """A long job that is not a training step made progress. `job` is download, load_model,
    tokenize, allocate, dry_run, reference, checkpoint, export, evaluate, sample or prompts.
    """

    job: str = ""
    done: Number = 0
    total: Number = 0
    message: str = ""


class DataPrepared(Event, frozen=True):
    """The data set is ready. `summary` has what `engine.data` found: format, columns, rows, tokens,
    trained tokens, cut and skipped rows.
    """

    summary: dict[str, Any] = {}


class FitReported(Event, frozen=True):
    """The fit report of the run was made; `report` is `FitReport.to_dict()`."""

    report: dict[str, Any] = {}


class PlanBuilt(Event, frozen=True):
    """The plan of a step was built.

    `choices` holds micro-batches, rounds, slots, blocks kept in slots, activation checkpointing and
    where gradients are summed. `grid` is the plan as text.
    """

    choices: dict[str, Any] = {}
    grid: str = ""

    def __post_init__(self) -> None:
        # This choice is drawn, so it must be a number. The others are shown unchanged.
        seconds = self.choices.get("predicted_seconds")
        if seconds is None:
            return
        if type(seconds) not in (int, float) or not -LARGEST <= seconds <= LARGEST:
            raise TypeError("choices.predicted_seconds is no number")


class PlanSimulated(Event, frozen=True):
    """A step of this session's plan was simulated in its steady state, with the rates of this
    machine.

    There is a span for each op, in the order and the form of a `StepTimeline`. If no rates are
    known, this event is not recorded.
    """

    seconds: Number = 0.0
    """Seconds of a step, from the moment when the previous step is applied to the moment when it is
    applied itself.
    """
    spans: list[Span] = []


class ForecastChecked(Event, frozen=True):
    """The predictions of the fit report were compared with the measurements of this session.

    `moment` is dry_run (before the first step; the seconds are those of a step without updates),
    running (once real steps are known) or end. `quantities` holds the comparisons by name;
    `engine.training.loop.prediction_check` defines the names.
    """

    step: Whole = 0
    moment: str = "running"
    quantities: dict[str, Comparison] = {}


class StepFinished(Event, frozen=True):
    """An optimizer step was applied: its last update is on the host."""

    step: Whole = 0
    loss: Number = 0.0
    grad_norm: Number = 0.0
    learning_rate: Number = 0.0
    tokens: Whole = 0
    """Number of tokens that the step read, without padding."""
    loss_tokens: Whole = 0
    """Number of tokens that contribute to the loss."""
    seconds: Number = 0.0
    tokens_per_second: Number = 0.0
    tflops: Number = 0.0
    """Model FLOPs (6 x parameters used per token x tokens, or less where only parts of the model
    are trained: `RunStarted.flops_formula`) / seconds / 1e12. Recompute and padding are not
    counted.
    """
    exposed: dict[str, Number] = {}
    """Seconds that the COMPUTE lane waited for each cause: h2d, d2h, optimizer, other and, where
    they occur, disk (moments are there) and exchange (with other ranks; the lane is that of rank
    0).
    """
    data_seconds: Number = 0.0
    """Seconds with cause `other` that were spent assembling the step's rows."""
    preference: dict[str, Number] = {}
    """Figures of a step of pairs, under the names of `engine.runtime.step.preference_metrics`."""


class StepTimeline(Event, frozen=True):
    """Times of the ops of a step. They are recorded for some steps only. Where several ranks
    computed it, those of rank 0 come first, and its first op begins at 0.
    """

    step: Whole = 0
    spans: list[Span] = []
    waits: list[Wait] = []


class UnitNorms(Event, frozen=True):
    """Norms of the units' gradients in one step, before clipping.

    They are in the order of `RunStarted.units`.
    """

    step: Whole = 0
    norms: list[Number] = []


class EvalFinished(Event, frozen=True):
    """The validation rows were evaluated after `step`, or before the first step if that is 0;
    `loss` is the mean over the tokens that have a loss.

    `row_losses` and `row_tokens` have an entry for each validation row with a loss, in an order
    that is the same in all evaluations of a run; where rows are packed, each document in them is
    one. Of more than 512, consecutive ones are one entry, so that there are 512: row r of n is in
    entry 512 r // n.
    """

    step: Whole = 0
    loss: Number = 0.0
    loss_tokens: Whole = 0
    seconds: Number = 0.0
    row_losses: list[Number] = []
    """Mean loss over each row's tokens that have a loss, in six digits; 0 without any."""
    row_tokens: list[Whole] = []
    """Number of tokens of the row that have a loss."""
    preference: dict[str, Number] = {}
    """Figures of validation pairs, as in a step of pairs; `loss` is theirs."""


class ExactMatchMeasured(Event, frozen=True):
    """Greedy answers to validation prompts were compared with the expected ones, before, during
    or after training (`moment`).
    """

    step: Whole = 0
    moment: str = "after"
    correct: Whole = 0
    total: Whole = 0
    samples: list[dict[str, str]] = []
    """The first few answers, each as ``{prompt, expected, answer}``. Where the expected answer is
    the chosen one of a pair, ``rejected`` is the other one.
    """


class PromptsAnswered(Event, frozen=True):
    """The prompts of `output.sample_prompts` were answered greedily after `step` steps, where 0
    means before the first step; or, without such prompts, the first few validation prompts at an
    evaluation during training.
    """

    step: Whole = 0
    answers: list[Answer] = []
    """Answers in the order of the prompts."""


class CheckpointWritten(Event, frozen=True):
    """A checkpoint of `step` was written to the disk, to `path` within the run folder."""

    step: Whole = 0
    path: str = ""
    bytes: Whole = 0
    seconds: Number = 0.0
    """Seconds from the beginning of its writing until it was complete."""
    waited_seconds: Number = 0.0
    """Seconds at most that training waited for it: updates were held back, or everything stood
    still. While updates are held back, the device may compute.
    """
    copied_bytes: Whole = 0
    """Bytes of it that were copied in RAM first, so that updates could continue."""
    due_step: Whole = 0
    """Step after which it fell due, if it was postponed while another was written; 0 if it was
    not.
    """
    holds: str = "full"
    """`weights` for a checkpoint of weights alone, from which a run is not resumed."""


class ExportWritten(Event, frozen=True):
    """The model after `step` was written as a Hugging Face folder, `path` within the run folder. If
    the best weights were exported, `step` is theirs, not that of the last step.
    """

    step: Whole = 0
    path: str = ""
    bytes: Whole = 0


class ControlReceived(Event, frozen=True):
    """A person sent a request: stop, discard, pause, resume, save or change. For a change, `values`
    holds the new settings by dotted name.
    """

    command: str = ""
    values: dict[str, Any] = {}


class SettingsChanged(Event, frozen=True):
    """A person's change takes effect from optimizer step `step` on. `values` holds the new settings
    by dotted name; the run now has `total_steps`.
    """

    step: Whole = 0
    values: dict[str, Any] = {}
    total_steps: Whole = 0


class LogLine(Event, frozen=True):
    """A message of the run; `level` is info, warning or error."""

    level: str = "info"
    text: str = ""


class LineDamaged(LogLine, frozen=True):
    """Stands in place of a line that is not a valid record."""


class RunEnded(Event, frozen=True):
    """The run is over; only a resume adds further lines.

    `state` is finished, stopped, failed or discarded; `reason` is one sentence.
    """

    state: RunState = "finished"
    reason: str = ""
    error_type: str = ""
    """Name of the error that ended the run, or its export."""
    export_failed: str = ""
    """Reason, one sentence, why the model of a run that has finished could not be written."""
    paused_seconds: Number = 0
    """As in `StateChanged`."""

    @property
    def state_text(self) -> str:
        """The state as `state_text` returns it."""
        return state_text(self.state, self.export_failed)


class Unknown(Event, frozen=True):
    """An event of a kind that this version does not know."""

    original_kind: str = ""
    values: dict[str, Any] = {}


EVENT_TYPES: dict[str, type[Event]] = {
    event_type.kind: event_type
    for event_type in (
        RunStarted,
        StateChanged,
        JobProgressed,
        DataPrepared,
        FitReported,
        PlanBuilt,
        PlanSimulated,
        ForecastChecked,
        StepFinished,
        StepTimeline,
        UnitNorms,
        MemorySampled,
        EvalFinished,
        ExactMatchMeasured,
        PromptsAnswered,
        CheckpointWritten,
        BestKept,
        ExportWritten,
        ControlReceived,
        SettingsChanged,
        StepSkipped,
        PlannedAnew,
        LogLine,
        RunEnded,
    )
}
"""The type of event for each `kind` of line."""


# ---------------------------------------------------------------------- an event as a line

_LATEST = 10**11
"""Limit of a Unix time, a few thousand years from now; a later one is a damaged number."""


class Envelope(Struct, frozen=True, gc=False):
    """Values with which every line begins."""

    kind: str
    run_id: str
    seq: Annotated[int, Meta(ge=0, le=LARGEST_WHOLE)]
    time: Annotated[int, Meta(ge=0, lt=_LATEST)] | Annotated[float, Meta(ge=0, lt=_LATEST)]
    elapsed: (
        Annotated[int, Meta(ge=0, lt=_LATEST)] | Annotated[float, Meta(ge=0, lt=_LATEST)] | None
    ) = None


class Record(Struct, frozen=True, gc=False):
    """An event with its envelope: one line of the file."""

    run_id: str
    seq: int
    time: float
    event: Event
    elapsed: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the record as a dictionary, to be encoded as one line."""
        if isinstance(self.event, Unknown):
            kind, values = self.event.original_kind, self.event.values
        else:
            kind, values = self.event.kind, self.event.fields()
        envelope = {"kind": kind, "run_id": self.run_id, "seq": self.seq, "time": self.time}
        if self.elapsed is not None:
            envelope["elapsed"] = self.elapsed
        return envelope | values

    @classmethod
    def from_json(cls, line: Any) -> Record:
        """Returns the record that a line's JSON values describe.

        Raises TypeError if the envelope or a field has the wrong type.
        """
        try:
            envelope = convert(line, Envelope)
            event_type = EVENT_TYPES.get(envelope.kind)
            if event_type is None:
                values = {
                    name: value
                    for name, value in line.items()
                    if name not in Envelope.__struct_fields__
                }
                event: Event = Unknown(envelope.kind, values)
            else:
                event = convert(line, event_type)
        except ValidationError as error:
            raise TypeError(str(error)) from None
        return cls(envelope.run_id, envelope.seq, envelope.time, event, envelope.elapsed)
