"""Events become lines: nothing is lost on the way to JSON and back, or between older and newer
versions.
"""

from __future__ import annotations

import json
from typing import get_args

import pytest
from msgspec.structs import fields

from engine.runs.record.events import (
    EVENT_TYPES,
    Event,
    Record,
    RunStarted,
    RunState,
    StepFinished,
    StepTimeline,
    Unknown,
)
from engine.runs.record.lines import parse_line
from engine.runs.record.snapshot import OVER_STATES

KINDS = {
    "run_started",
    "state_changed",
    "job_progressed",
    "data_prepared",
    "fit_reported",
    "plan_built",
    "plan_simulated",
    "forecast_checked",
    "step_finished",
    "step_timeline",
    "unit_norms",
    "memory_sampled",
    "eval_finished",
    "exact_match_measured",
    "checkpoint_written",
    "best_kept",
    "export_written",
    "control_received",
    "settings_changed",
    "step_skipped",
    "planned_anew",
    "prompts_answered",
    "log_line",
    "run_ended",
}

EXAMPLES = {int: 3, float: 0.1, str: 'é \u2028 "quoted"\n', bool: True}

SPECIAL = {
    "state": "paused",
    "best_by": "exact_match",
    "exposed": {"h2d": 0.5},
    "preference": {"rewards/margins": 0.5},
}
LISTS = {
    "norms": [0.5, 1],
    "row_losses": [0.5, 1],
    "row_tokens": [3, 0],
    "rows": [0, 7],
    "answers": [{"prompt": "p", "answer": "a"}],
    "units": ["embedding", "é"],
    "samples": [{"prompt": "p", "expected": "a", "answer": "b"}],
    "ranks": [
        {
            "rank": 1,
            "host": 5,
            "gpu_allocated": 5,
            "gpu_reserved": 5,
            "gpu_peak": 5,
            "gpu_driver": 5,
            "gpu_total": 5,
            "power": 5.5,
        }
    ],
    "waits": [{"start": 0.5, "end": 1, "cause": "h2d"}],
    "spans": [{"unit": "block.0", "op": "loss", "lane": "HOST", "start": 0.5, "end": 1}],
}


def filled(kind: type[Event]) -> Event:
    """Returns an event whose fields all differ from their defaults."""
    values = {}
    for field in fields(kind):
        default = getattr(kind(), field.name)
        values[field.name] = (
            SPECIAL[field.name]
            if field.name in SPECIAL
            else LISTS.get(field.name, LISTS["spans"])
            if isinstance(default, list)
            else {"a": {"predicted": 1, "measured": None, "error": 2.5}}
            if isinstance(default, dict)
            else 5
            if default is None
            else EXAMPLES[type(default)]
        )
    return kind(**values)


def test_the_kinds_are_the_contract():
    assert set(EVENT_TYPES) == KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_event_survives_json(kind):
    event = filled(EVENT_TYPES[kind])
    record = Record("run-1", 7, 1700000000.123456, event)
    line = json.dumps(record.to_json())
    assert parse_line(line.encode()) == record
    assert list(json.loads(line))[:4] == ["kind", "run_id", "seq", "time"]
    assert json.loads(line)["kind"] == kind
    assert Record.from_json(json.loads(line)) == record


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_field_takes_a_name_of_the_envelope(kind):
    names = {field.encode_name for field in fields(EVENT_TYPES[kind])}
    assert not names & {"kind", "run_id", "seq", "time"}


def test_what_outside_tools_rely_on():
    step = Record("r", 1, 2.0, StepFinished()).to_json()
    assert {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "seconds",
        "tokens_per_second",
        "tflops",
        "exposed",
    } <= set(step)
    assert {"step", "spans"} <= set(StepTimeline().fields())


def test_a_line_of_an_older_version_takes_the_defaults():
    record = Record.from_json(
        {"kind": "step_finished", "run_id": "r", "seq": 1, "time": 2.0, "step": 4, "loss": 1.5}
    )
    assert record.event == StepFinished(step=4, loss=1.5)


def test_a_field_of_a_newer_version_is_passed_over():
    line = {
        "kind": "run_started",
        "run_id": "r",
        "seq": 1,
        "time": 2.0,
        "name": "n",
        "color": "red",
    }
    assert Record.from_json(line).event == RunStarted(name="n")


def test_a_kind_of_a_newer_version_is_kept_as_it_is():
    line = {
        "kind": "moon_phase",
        "run_id": "r",
        "seq": 1,
        "time": 2.0,
        "phase": 0.5,
        "names": ["a"],
    }
    record = Record.from_json(line)
    assert record.event == Unknown("moon_phase", {"phase": 0.5, "names": ["a"]})
    assert record.to_json() == line


def test_events_cannot_be_changed():
    with pytest.raises(AttributeError):
        StepFinished().step = 1


def test_the_states_that_end_a_run_are_states():
    assert set(OVER_STATES) < set(get_args(RunState))
