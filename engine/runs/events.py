"""Everything a run records, as immutable events; one JSON line each in ``runs/<id>/events.jsonl``.

Every line carries `kind`, `run_id`, `seq` (counts on across resumes) and `time` (Unix seconds); the rest are the
event's own fields. A field that an older file lacks takes its default; a kind that this version does not know is
kept as `Unknown`, so that a newer file still opens.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.runs.values import LARGEST_WHOLE, Check, PlainForm, Rule, field_rules

ENVELOPE = ("kind", "run_id", "seq", "time")
"""What every line begins with."""


@dataclass(frozen=True)
class Event:
    """Base: `kind` is the class name in snake case."""

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls, is_recorded: bool = True) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if is_recorded:
            EVENT_TYPES[cls.kind] = cls

    def fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


EVENT_TYPES: dict[str, type[Event]] = {}

RUN_STATES = ("preparing", "running", "pausing", "paused", "stopping", "saving", "finished", "stopped", "failed",
              "discarded")
"""`interrupted` is not recorded: it is what a reader concludes when the process that wrote an unfinished run is gone."""


@dataclass(frozen=True)
class RunStarted(Event):
    """Everything is prepared and the first step is next; again in each resume."""

    name: str = ""
    pid: int = 0
    device: str = "cpu"
    device_name: str = ""
    total_steps: int = 0
    parameters: int = 0
    units: list[str] = field(default_factory=list)
    resumed_step: int | None = None
    program_version: str = ""
    flops_formula: str = ""
    ceiling_tflops: float = 0.0
    """What large matrix products reach on this device, as it was measured before the run; 0 where it was not."""


@dataclass(frozen=True)
class StateChanged(Event):
    state: str = "preparing"
    reason: str = ""
    room: str = ""
    """What a paused run cannot write before there is room on the disk: its `record`, a `checkpoint`, or the checkpoint with
    which it would `stop`. Then it goes on by itself; `found` where it does so, back in the state from before."""


@dataclass(frozen=True)
class JobProgressed(Event):
    """Long work other than steps: `job` is download, load_model, tokenise, allocate, dry_run, checkpoint, export, evaluate,
    sample or prompts."""

    job: str = ""
    done: float = 0
    total: float = 0
    message: str = ""


@dataclass(frozen=True)
class DataPrepared(Event):
    """`summary` is what `engine.data` found: format, columns, rows, tokens, trained tokens, cut and skipped rows."""

    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitReported(Event):
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanBuilt(Event):
    """`choices`: micro-batches, rounds, slots, residency, save level, where gradients are summed; `grid`: the plan."""

    choices: dict[str, Any] = field(default_factory=dict)
    grid: str = ""


@dataclass(frozen=True)
class PlanSimulated(Event):
    """How a step of this session's plan should go by the rates of this machine, once it is in its stride: a span for each op,
    in the order and the form of a `StepTimeline`. Not recorded where no rates are known."""

    seconds: float = 0.0
    """From one step's home to the next one's."""
    spans: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ForecastChecked(Event):
    """What the fit report predicted beside what was measured, for the session under way.

    `moment`: dry_run (before the first step, whose seconds are then those of a step without updates), running (first known
    of real steps) or end. `quantities`: ``{quantity: {predicted, measured, error}}`` as `engine.train.forecast` names and compares
    them.
    """

    step: int = 0
    moment: str = "running"
    quantities: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepFinished(Event):
    """One optimizer step, emitted when the step is home (its last update is applied)."""

    step: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    """Tokens of the step, padding not counted."""
    loss_tokens: int = 0
    """Of these, the tokens that carry loss."""
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    tflops: float = 0.0
    """Model FLOPs (6 x parameters used per token x tokens) / seconds / 1e12; recompute and padding not counted."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds that the COMPUTE lane waited, by cause: h2d, d2h, optimizer, other."""
    data_seconds: float = 0.0
    """Of these (other), the seconds in which the step's rows were put together."""


@dataclass(frozen=True)
class StepTimeline(Event):
    """Per-op spans of one sampled step: ``{unit, op, lane, micro_batch, start, end}``, seconds from the step's first op."""

    step: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    """Stretches in which COMPUTE waited, ``{start, end, cause}``: h2d, d2h, optimizer or other. Empty in older records."""


@dataclass(frozen=True)
class UnreadTimeline(Event, is_recorded=False):
    """What a reader puts in the place of a `StepTimeline` that a later one replaces: its step, and the whole line, of which
    nothing else was looked at."""

    step: int = 0
    line: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class UnitNorms(Event):
    """Gradient norm of each unit in one sampled step, before clipping, in the order of `RunStarted.units`."""

    step: int = 0
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class MemorySampled(Event):
    """Bytes. `gpu_driver` is what the driver reports for the whole card, `host_total` what all processes of this session may
    use together, `power` the card's in watts; 0 where it is not known."""

    step: int = 0
    host_rss: int = 0
    host_pinned: int = 0
    host_available: int = 0
    gpu_allocated: int = 0
    gpu_reserved: int = 0
    gpu_peak: int = 0
    gpu_driver: int = 0
    gpu_total: int = 0
    host_total: int = 0
    power: float = 0.0


@dataclass(frozen=True)
class EvalFinished(Event):
    step: int = 0
    loss: float = 0.0
    loss_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ExactMatchMeasured(Event):
    """Greedy answers to held-out prompts against the expected ones; `moment` is before or after training."""

    step: int = 0
    moment: str = "after"
    correct: int = 0
    total: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)
    """The first few, ``{prompt, expected, answer}``."""


@dataclass(frozen=True)
class PromptsAnswered(Event):
    """Greedy answers to the prompts of `output.sample_prompts`, after `step` steps; 0 is before the first."""

    step: int = 0
    answers: list[dict[str, str]] = field(default_factory=list)
    """``{prompt, answer}``, in the order of the setting."""


@dataclass(frozen=True)
class CheckpointWritten(Event):
    step: int = 0
    path: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ExportWritten(Event):
    step: int = 0
    path: str = ""
    bytes: int = 0


@dataclass(frozen=True)
class ControlReceived(Event):
    """A request from a person: stop, discard, pause, resume, save or change; `values` of a change, by dotted name."""

    command: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SettingsChanged(Event):
    """A person's change holds from optimizer step `step` on; `values` by dotted name, `total_steps` of the run now."""

    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    total_steps: int = 0


@dataclass(frozen=True)
class LogLine(Event):
    level: str = "info"
    text: str = ""


@dataclass(frozen=True)
class LineDamaged(LogLine, is_recorded=False):
    """What a reader puts in the place of a line that is no record."""


@dataclass(frozen=True)
class RunEnded(Event):
    """Last line of a run: `state` is finished, stopped, failed or discarded; `reason` is one sentence."""

    state: str = "finished"
    reason: str = ""
    error_type: str = ""


@dataclass(frozen=True)
class Unknown(Event):
    """A line of a kind that this version does not know."""

    original_kind: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
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
    def from_json(cls, line: dict[str, Any]) -> Record:
        """Raises KeyError or TypeError where the envelope or a field is not what it must be: what is read here is computed
        with and drawn unseen."""
        kind, run_id, seq, time = line["kind"], line["run_id"], line["seq"], line["time"]
        _check_envelope(run_id, seq, time)
        event_type = EVENT_TYPES.get(kind)
        if event_type is None or event_type is Unknown:
            if not isinstance(kind, str):
                raise TypeError("kind")
            values = {name: value for name, value in line.items() if name not in ENVELOPE}
            return cls(run_id, seq, time, Unknown(original_kind=kind, values=values))
        rules, checks = _rules(event_type)
        known = {}
        for name, value in line.items():
            if name in rules:  # others are of a newer version
                types, low, high = rules[name]
                if type(value) not in types or low and not low <= value <= high:
                    raise TypeError(f"{kind}.{name}")
                known[name] = value
        for name, is_good in checks:
            if name in known and not is_good(known[name]):
                raise TypeError(f"{kind}.{name}")
        return cls(run_id, seq, time, event_type(**known))

    @classmethod
    def from_plain(cls, line: dict[str, Any]) -> Record | None:
        """What `from_json` gives, in a third of the time, for a line of one of `PLAIN_KINDS` in the form in which this version
        writes it; None for any other line, good or damaged. Uses `line` up. Raises TypeError for a damaged envelope."""
        event_type, form = _PLAIN_FORMS.get(line.get("kind"), (None, None))
        if form is None or tuple(line) != form.names:
            return None
        del line["kind"]
        run_id, seq, time = line.pop("run_id"), line.pop("seq"), line.pop("time")
        _check_envelope(run_id, seq, time)
        if not form.holds(line.values()):
            return None
        # All fields are there: `__init__` would only set them one by one, by the way around what frozen forbids.
        event, record = object.__new__(event_type), object.__new__(cls)
        event.__dict__.update(line)
        record.__dict__.update(run_id=run_id, seq=seq, time=time, event=event)
        return record


def _check_envelope(run_id: Any, seq: Any, time: Any) -> None:
    if not (type(seq) is int and 0 <= seq <= LARGEST_WHOLE and isinstance(run_id, str)
            and type(time) in (float, int) and 0 <= time < _LATEST):
        raise TypeError("the envelope")


def are_good_envelopes(run_ids: Sequence[Any], seqs: Sequence[Any], times: Sequence[Any]) -> bool:
    """`_check_envelope`, of many lines, and with a time above 0, as every line has it."""
    return (set(map(type, run_ids)) == {str} and set(map(type, seqs)) == {int} and set(map(type, times)) <= {float, int}
            and 0 <= min(seqs) and max(seqs) <= LARGEST_WHOLE and 0 < min(times) and max(times) < _LATEST)


_LATEST = 1e11
"""Unix seconds, some thousand years from now: what no calendar shows is a damaged number."""


@functools.cache
def _rules(event_type: type[Event]) -> tuple[dict[str, Rule], tuple[tuple[str, Check], ...]]:
    return field_rules(event_type, {"state": RUN_STATES.__contains__})


PLAIN_KINDS = (StepFinished, MemorySampled, UnitNorms)
"""Those that the lines of a long record nearly all are of; they consist of numbers."""
_PLAIN_FORMS = {kind.kind: (kind, PlainForm(kind, ENVELOPE)) for kind in PLAIN_KINDS}


def plain_form(event_type: type[Event]) -> PlainForm:
    """Of one of `PLAIN_KINDS`."""
    return _PLAIN_FORMS[event_type.kind][1]
