"""The record of a run, ``runs/<id>/events.jsonl``, consists of the events that are defined here.

- Each event is one JSON line and never changes.
- A line carries `kind`, `run_id`, `seq` (which counts on across resumes) and `time` (Unix seconds).
  The rest are the event's own fields.
- A reader checks each line against the types of the fields, since the values are computed with and
  drawn without anybody looking at them first.
- A field that an older file lacks takes its default. A kind that this version does not know is kept
  as `Unknown`, so that a newer file still opens.

When a line is written, and what a torn line means, stands in `engine.runs.recorder`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, ValidationError, convert, field

from engine.runs.field_types import (
    LARGEST,
    LARGEST_WHOLE,
    Answer,
    Comparison,
    Number,
    Span,
    Wait,
    Whole,
)

# ---------------------------------------------------------------------- the events


def _kind_of(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(Struct, frozen=True, gc=False, tag=_kind_of, tag_field="kind"):
    """An event is one thing that happened in a run; this is the base class of all kinds.

    `kind` is the class name in snake case. `gc=False` keeps events from Python's garbage collector,
    which would go through all of them again and again: a long record has hundreds of thousands. It
    is safe, since an event holds JSON values, which form no reference cycle.
    """

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.kind = _kind_of(cls.__name__)

    def fields(self) -> dict[str, Any]:
        """Returns the values by the names under which they are recorded."""
        return {
            recorded: getattr(self, name)
            for name, recorded in zip(self.__struct_fields__, self.__struct_encode_fields__)
        }


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
"""A run is in one of these states. `interrupted` is not recorded: a reader concludes it when the
process that wrote an unfinished run is gone.
"""


class RunStarted(Event, frozen=True):
    """Everything is prepared and the first step is next. Each resume writes this event again."""

    name: str = ""
    pid: Whole = 0
    device: str = "cpu"
    device_name: str = ""
    total_steps: Whole = 0
    parameters: Whole = 0
    units: list[str] = []
    resumed_step: Whole | None = None
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: Number = 0.0
    """Large matrix products reach this rate on the device, as measured before the run. It is 0
    where nothing was measured.
    """


class StateChanged(Event, frozen=True):
    """The run entered `state`; `reason` is a sentence for the person, or empty."""

    state: RunState = "preparing"
    reason: str = ""
    lacks_space_for: str = field(name="room", default="")
    """A paused run waits for disk space to write this: its `record`, a `checkpoint`, or the
    checkpoint with which it is to `stop`. The run goes on by itself once there is space; the event
    that brings back the state from before then says `found`. The record calls the field `room`.
    """


class JobProgressed(Event, frozen=True):
    """Long work other than steps got on. `job` is download, load_model, tokenise, allocate,
    dry_run, checkpoint, export, evaluate, sample or prompts.
    """

    job: str = ""
    done: Number = 0
    total: Number = 0
    message: str = ""


class DataPrepared(Event, frozen=True):
    """The data set is ready. `summary` says what `engine.data` found: format, columns, rows,
    tokens, trained tokens, cut and skipped rows.
    """

    summary: dict[str, Any] = {}


class FitReported(Event, frozen=True):
    """The fit of the run was judged; `report` is `FitReport.to_dict()`."""

    report: dict[str, Any] = {}


class PlanBuilt(Event, frozen=True):
    """The plan of a step was built.

    `choices` holds micro-batches, rounds, slots, residency, save level and where gradients are
    summed. `grid` is the plan as text.
    """

    choices: dict[str, Any] = {}
    grid: str = ""

    def __post_init__(self) -> None:
        # This choice is drawn, so it must be a number. The others are shown as they are.
        seconds = self.choices.get("predicted_seconds")
        if seconds is None:
            return
        if type(seconds) not in (int, float) or not -LARGEST <= seconds <= LARGEST:
            raise TypeError("choices.predicted_seconds is no number")


class PlanSimulated(Event, frozen=True):
    """A step of this session's plan was simulated in its steady state, with the rates of this
    machine.

    There is a span for each op, in the order and the form of a `StepTimeline`. The event is not
    recorded where no rates are known.
    """

    seconds: Number = 0.0
    """A step takes this long, from the moment the step before it is applied to the moment that it
    is applied itself.
    """
    spans: list[Span] = []


class ForecastChecked(Event, frozen=True):
    """The predictions of the fit report were compared with what was measured in this session.

    `moment` is dry_run (before the first step; the seconds are those of a step without updates),
    running (once real steps are known) or end. `quantities` holds the comparisons by name, as
    `engine.train.forecast` names and compares them.
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
    """The step read this many tokens, padding not counted."""
    loss_tokens: Whole = 0
    """This many of the tokens carry loss."""
    seconds: Number = 0.0
    tokens_per_second: Number = 0.0
    tflops: Number = 0.0
    """The rate is model FLOPs (6 x parameters used per token x tokens) / seconds / 1e12. Recompute
    and padding are not counted.
    """
    exposed: dict[str, Number] = {}
    """The COMPUTE lane waited this many seconds for each cause: h2d, d2h, optimizer, other."""
    data_seconds: Number = 0.0
    """In so many seconds of the cause `other`, the step's rows were put together."""


class StepTimeline(Event, frozen=True):
    """The ops of a step took these times. Only some steps record them."""

    step: Whole = 0
    spans: list[Span] = []
    waits: list[Wait] = []
    """The list is empty in older records."""


class UnitNorms(Event, frozen=True):
    """The gradients of the units had these norms in one step, before clipping.

    They stand in the order of `RunStarted.units`.
    """

    step: Whole = 0
    norms: list[Number] = []


class MemorySampled(Event, frozen=True):
    """Memory was looked at after `step`; the figures are in bytes.

    `gpu_driver` is what the driver reports for the whole card. `host_total` is what all processes
    of this session may use together. `power` is the card's, in watts, 0 where it is not known.
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


class EvalFinished(Event, frozen=True):
    """The held-out rows were evaluated after `step`; `loss` is their mean per token with loss."""

    step: Whole = 0
    loss: Number = 0.0
    loss_tokens: Whole = 0
    seconds: Number = 0.0


class ExactMatchMeasured(Event, frozen=True):
    """Greedy answers to held-out prompts were compared with the expected ones, before or after
    training (`moment`).
    """

    step: Whole = 0
    moment: str = "after"
    correct: Whole = 0
    total: Whole = 0
    samples: list[dict[str, str]] = []
    """The first few answers are kept, each as ``{prompt, expected, answer}``."""


class PromptsAnswered(Event, frozen=True):
    """The prompts of `output.sample_prompts` were answered greedily after `step` steps; 0 is before
    the first.
    """

    step: Whole = 0
    answers: list[Answer] = []
    """The answers stand in the order of the setting."""


class CheckpointWritten(Event, frozen=True):
    """A checkpoint of `step` is on the disk, in `path` within the run folder."""

    step: Whole = 0
    path: str = ""
    bytes: Whole = 0
    seconds: Number = 0.0


class ExportWritten(Event, frozen=True):
    """The model after `step` was written as a Hugging Face folder, `path` within the run folder."""

    step: Whole = 0
    path: str = ""
    bytes: Whole = 0


class ControlReceived(Event, frozen=True):
    """A person asked for stop, discard, pause, resume, save or change; `values` are those of a
    change, by dotted name.
    """

    command: str = ""
    values: dict[str, Any] = {}


class SettingsChanged(Event, frozen=True):
    """A person's change holds from optimizer step `step` on. `values` are given by dotted name; the
    run now has `total_steps`.
    """

    step: Whole = 0
    values: dict[str, Any] = {}
    total_steps: Whole = 0


class LogLine(Event, frozen=True):
    """The run says something to the person; `level` is info, warning or error."""

    level: str = "info"
    text: str = ""


class LineDamaged(LogLine, frozen=True):
    """A reader puts this event in the place of a line that is no record."""


class RunEnded(Event, frozen=True):
    """The run is over; no line follows but those of a resume.

    `state` is finished, stopped, failed or discarded; `reason` is one sentence.
    """

    state: RunState = "finished"
    reason: str = ""
    error_type: str = ""


class Unknown(Event, frozen=True):
    """A line has a kind that this version does not know."""

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
        ExportWritten,
        ControlReceived,
        SettingsChanged,
        LogLine,
        RunEnded,
    )
}
"""A line is one of these events, by its kind."""


# ---------------------------------------------------------------------- an event as a line

_LATEST = 10**11
"""Unix seconds must be below this, some thousand years from now: a time that no calendar shows is a
damaged number.
"""


class Envelope(Struct, frozen=True, gc=False):
    """Every line begins with these values."""

    kind: str
    run_id: str
    seq: Annotated[int, Meta(ge=0, le=LARGEST_WHOLE)]
    time: Annotated[int, Meta(ge=0, lt=_LATEST)] | Annotated[float, Meta(ge=0, lt=_LATEST)]


class Record(Struct, frozen=True, gc=False):
    """A record is an event with its envelope: one line of the file."""

    run_id: str
    seq: int
    time: float
    event: Event

    def to_json(self) -> dict[str, Any]:
        """Returns the dictionary that becomes one line."""
        if isinstance(self.event, Unknown):
            kind, values = self.event.original_kind, self.event.values
        else:
            kind, values = self.event.kind, self.event.fields()
        return {"kind": kind, "run_id": self.run_id, "seq": self.seq, "time": self.time, **values}

    @classmethod
    def from_json(cls, line: Any) -> Record:
        """Returns the record of a line's JSON values.

        Raises TypeError where the envelope or a field is not what it must be.
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
        return cls(envelope.run_id, envelope.seq, envelope.time, event)
