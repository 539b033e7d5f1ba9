"""Everything a run records, as immutable events; one JSON line each in ``runs/<id>/events.jsonl``.

Every line carries `kind`, `run_id`, `seq` (counts on across resumes) and `time` (Unix seconds); the
rest are the event's own fields. The types of the fields are what a reader checks a line by, since
what is read is computed with and drawn unseen. A field that an older file lacks takes its default;
a kind that this version does not know is kept as `Unknown`, so that a newer file still opens.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from msgspec import Meta, Struct, ValidationError, convert, field

# ---------------------------------------------------------------------- what a field may hold

_LARGEST_WHOLE = 1 << 53
"""What a page still holds exactly, and sums of which fit into 64 bits."""
_LARGEST = sys.float_info.max

Whole = Annotated[int, Meta(ge=-_LARGEST_WHOLE, le=_LARGEST_WHOLE)]
# The bounds of a float refuse NaN and the infinities, which Python's parser of JSON takes.
Number = (
    Annotated[int, Meta(ge=-1 << 63, le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
)
"""A whole number stays one, so that a line that is written again reads as before."""


class Span(TypedDict):
    """One op of a step, in seconds from the step's first op."""

    unit: str
    op: str
    lane: str
    micro_batch: NotRequired[Any]
    start: Number
    end: Number


class Wait(TypedDict):
    """A part of a step in which COMPUTE waited, and for what: h2d, d2h, optimizer or other."""

    start: Number
    end: Number
    cause: NotRequired[str]


class Answer(TypedDict):
    prompt: str
    answer: str


class Comparison(TypedDict, total=False):
    """None for what is not known."""

    predicted: Number | None
    measured: Number | None
    error: Number | None


# ---------------------------------------------------------------------- the events


def _kind_of(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(Struct, frozen=True, gc=False, tag=_kind_of, tag_field="kind"):
    """Base: `kind` is the class name in snake case. An event holds JSON values, which form no
    circle, so it is kept from the collector of circles: a long record has hundreds of thousands.
    """

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls) -> None:
        cls.kind = _kind_of(cls.__name__)

    def fields(self) -> dict[str, Any]:
        """By the name under which each is recorded."""
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
"""`interrupted` is not recorded: it is what a reader concludes when the process that wrote an
unfinished run is gone.
"""


class RunStarted(Event):
    """Everything is prepared and the first step is next; again in each resume."""

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
    """What large matrix products reach on this device, as it was measured before the run; 0 where
    it was not.
    """


class StateChanged(Event):
    state: RunState = "preparing"
    reason: str = ""
    lacks_space_for: str = field(name="room", default="")
    """What a paused run cannot write before there is space on the disk: its `record`, a
    `checkpoint`, or the checkpoint with which it would `stop`. Then it goes on by itself; `found`
    where it does so, back in the state from before.
    """


class JobProgressed(Event):
    """Long work other than steps: `job` is download, load_model, tokenise, allocate, dry_run,
    checkpoint, export, evaluate, sample or prompts.
    """

    job: str = ""
    done: Number = 0
    total: Number = 0
    message: str = ""


class DataPrepared(Event):
    """`summary` is what `engine.data` found: format, columns, rows, tokens, trained tokens, cut and
    skipped rows.
    """

    summary: dict[str, Any] = {}


class FitReported(Event):
    report: dict[str, Any] = {}


class PlanBuilt(Event):
    """`choices`: micro-batches, rounds, slots, residency, save level, where gradients are summed;
    `grid`: the plan.
    """

    choices: dict[str, Any] = {}
    grid: str = ""

    def __post_init__(self) -> None:
        seconds = self.choices.get(
            "predicted_seconds"
        )  # which is drawn; of the others, each is shown as it is
        if seconds is not None and not (
            type(seconds) in (int, float) and -_LARGEST <= seconds <= _LARGEST
        ):
            raise TypeError("choices.predicted_seconds is no number")


class PlanSimulated(Event):
    """How a step of this session's plan should go by the rates of this machine, once it is in its
    stride: a span for each op, in the order and the form of a `StepTimeline`. Not recorded where no
    rates are known.
    """

    seconds: Number = 0.0
    """From the moment a step is applied to the moment the next one is."""
    spans: list[Span] = []


class ForecastChecked(Event):
    """What the fit report predicted beside what was measured, for the session under way.

    `moment`: dry_run (before the first step, whose seconds are then those of a step without
    updates), running (first known of real steps) or end. `quantities`: by name, as
    `engine.train.forecast` names and compares them.
    """

    step: Whole = 0
    moment: str = "running"
    quantities: dict[str, Comparison] = {}


class StepFinished(Event):
    """One optimizer step, emitted when the step is applied: its last update is on the host."""

    step: Whole = 0
    loss: Number = 0.0
    grad_norm: Number = 0.0
    learning_rate: Number = 0.0
    tokens: Whole = 0
    """Tokens of the step, padding not counted."""
    loss_tokens: Whole = 0
    """Of these, the tokens that carry loss."""
    seconds: Number = 0.0
    tokens_per_second: Number = 0.0
    tflops: Number = 0.0
    """Model FLOPs (6 x parameters used per token x tokens) / seconds / 1e12; recompute and padding
    not counted.
    """
    exposed: dict[str, Number] = {}
    """Seconds that the COMPUTE lane waited, by cause: h2d, d2h, optimizer, other."""
    data_seconds: Number = 0.0
    """Of these (other), the seconds in which the step's rows were put together."""


class StepTimeline(Event):
    """What each op of one step took, for the steps of which that is recorded."""

    step: Whole = 0
    spans: list[Span] = []
    waits: list[Wait] = []
    """Empty in older records."""


class UnitNorms(Event):
    """Gradient norm of each unit in one step, before clipping, in the order of `RunStarted.units`."""

    step: Whole = 0
    norms: list[Number] = []


class MemorySampled(Event):
    """Bytes. `gpu_driver` is what the driver reports for the whole card, `host_total` what all
    processes of this session may use together, `power` the card's in watts; 0 where it is not
    known.
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


class EvalFinished(Event):
    step: Whole = 0
    loss: Number = 0.0
    loss_tokens: Whole = 0
    seconds: Number = 0.0


class ExactMatchMeasured(Event):
    """Greedy answers to held-out prompts against the expected ones; `moment` is before or after
    training.
    """

    step: Whole = 0
    moment: str = "after"
    correct: Whole = 0
    total: Whole = 0
    samples: list[dict[str, str]] = []
    """The first few, ``{prompt, expected, answer}``."""


class PromptsAnswered(Event):
    """Greedy answers to the prompts of `output.sample_prompts`, after `step` steps; 0 is before the
    first.
    """

    step: Whole = 0
    answers: list[Answer] = []
    """In the order of the setting."""


class CheckpointWritten(Event):
    step: Whole = 0
    path: str = ""
    bytes: Whole = 0
    seconds: Number = 0.0


class ExportWritten(Event):
    step: Whole = 0
    path: str = ""
    bytes: Whole = 0


class ControlReceived(Event):
    """A request from a person: stop, discard, pause, resume, save or change; `values` of a change,
    by dotted name.
    """

    command: str = ""
    values: dict[str, Any] = {}


class SettingsChanged(Event):
    """A person's change holds from optimizer step `step` on; `values` by dotted name, `total_steps`
    of the run now.
    """

    step: Whole = 0
    values: dict[str, Any] = {}
    total_steps: Whole = 0


class LogLine(Event):
    level: str = "info"
    text: str = ""


class LineDamaged(LogLine):
    """What a reader puts in the place of a line that is no record."""


class RunEnded(Event):
    """Last line of a run: `state` is finished, stopped, failed or discarded; `reason` is one
    sentence.
    """

    state: RunState = "finished"
    reason: str = ""
    error_type: str = ""


class Unknown(Event):
    """A line of a kind that this version does not know."""

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
"""What a line can be, by its kind."""


# ---------------------------------------------------------------------- an event as a line

_LATEST = 10**11
"""Unix seconds, some thousand years from now: what no calendar shows is a damaged number."""


class Envelope(Struct, frozen=True, gc=False):
    """What every line begins with."""

    kind: str
    run_id: str
    seq: Annotated[int, Meta(ge=0, le=_LARGEST_WHOLE)]
    time: Annotated[int, Meta(ge=0, lt=_LATEST)] | Annotated[float, Meta(ge=0, lt=_LATEST)]


class Record(Struct, frozen=True, gc=False):
    """An event with its envelope."""

    run_id: str
    seq: int
    time: float
    event: Event

    def to_json(self) -> dict[str, Any]:
        """The dictionary that becomes one line."""
        kind, values = self.event.kind, self.event.fields()
        if isinstance(self.event, Unknown):
            kind, values = self.event.original_kind, self.event.values
        return {"kind": kind, "run_id": self.run_id, "seq": self.seq, "time": self.time, **values}

    @classmethod
    def from_json(cls, line: Any) -> Record:
        """Raises TypeError where the envelope or a field is not what it must be."""
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
