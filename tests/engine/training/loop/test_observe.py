"""The record contains what the curves need: norms of units, the time spent waiting for data, and
the machine's limits.
"""

from __future__ import annotations

import math
from time import perf_counter

import pytest

from engine.planning.schedule.ops import Lane
from engine.planning.schedule.schedule import Span
from engine.runs.record.events import (
    LogLine,
    MemorySampled,
    Record,
    RunStarted,
    StepFinished,
    StepTimeline,
    UnitNorms,
)
from engine.runs.record.following import replay
from engine.runs.record.snapshot import RunSnapshot
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop import measurements as observe
from engine.training.loop import step_loop
from engine.training.loop.measurements import data_wait
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.made_pairs import marked_config
from tests.support.planned_steps import op_on
from tests.support.trained_runs import events_of


def compute(start, end, lane=Lane.COMPUTE):
    return Span(op_on(lane), start, end)


def test_rows_are_waited_for_only_while_compute_has_nothing_else():
    before, after = (
        [compute(0, 5), compute(5, 6, Lane.H2D)],
        [compute(8, 9, Lane.H2D), compute(10, 11)],
    )
    assert data_wait(after, before, 4, 7) == 2  # from the end of the previous step
    assert data_wait(after, before, 1, 4) == 0  # COMPUTE was busy
    assert data_wait(after, before, 7, 12) == 3  # until this one begins
    assert data_wait(after, None, 4, 7) == data_wait([], before, 4, 7) == 0


def test_the_pass_over_strangers_is_no_wait_for_rows(tmp_path, monkeypatch):
    """Before each step of KTO, the engine is drained and computes. Rows are there by then."""
    times = []
    divergence, submitted = step_loop.with_kl_estimate, observe.Measurements.submitted

    def with_kl_estimate(*arguments):
        times.append([perf_counter()])
        return divergence(*arguments)

    def noting(measurements, step, micro, began, ended):
        times[-1] += [began, ended]
        submitted(measurements, step, micro, began, ended)

    monkeypatch.setattr(step_loop, "with_kl_estimate", with_kl_estimate)
    monkeypatch.setattr(observe.Measurements, "submitted", noting)
    own = {"train.objective": "kto", "train.steps": 3}
    run = start_run(marked_config(tmp_path, **own), tmp_path / "runs")
    assert run.execute().state == "finished"
    assert len(times) == 3
    assert all(began <= ended <= at for at, began, ended in times)


def test_the_record_has_norms_of_units_in_sampled_steps(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    run.execute()
    events = [record.event for record in replay(run.folder.events_path)]
    steps = {event.step: event for event in events if isinstance(event, StepFinished)}
    norms = [event for event in events if isinstance(event, UnitNorms)]
    started = next(event for event in events if isinstance(event, RunStarted))
    assert [event.step for event in norms] == run.recorder.snapshot.timeline_steps
    for event in norms:
        assert len(event.norms) == len(started.units)
        assert math.hypot(*event.norms) == pytest.approx(steps[event.step].grad_norm, rel=1e-3)
    for step in steps.values():
        assert 0 <= step.data_seconds <= step.exposed["other"] + 1e-6
    memory = next(event for event in events if isinstance(event, MemorySampled))
    assert memory.host_total >= memory.host_rss > 0 and memory.power == 0
    assert -1 <= memory.cpu_others <= 1


def fold(*timed):
    snapshot = RunSnapshot()
    for seq, (time, event) in enumerate(timed, 1):
        snapshot.apply(Record("r", seq, time, event))
    return snapshot


def test_energy_counts_while_a_session_trains_and_keeps_what_was_spent():
    snapshot = fold(
        (0.0, RunStarted(total_steps=9)),
        (3600.0, MemorySampled(1, power=400.0)),
        (7200.0, MemorySampled(2, power=600.0)),
        (90_000.0, RunStarted(total_steps=9, resumed_step=1)),
        (93_600.0, MemorySampled(2, power=100.0)),
        (97_200.0, MemorySampled(3, power=300.0)),
    )
    assert list(snapshot.memory.energy) == [0, 500, 700] and snapshot.energy == 700


def test_norms_are_kept_by_unit_whatever_a_record_names():
    snapshot = fold(
        (1.0, RunStarted(units=["a", "b"])),
        (2.0, UnitNorms(1, [1.0])),
        (3.0, UnitNorms(2, [2.0, 3.0])),
        (4.0, UnitNorms(3, [])),
    )
    assert {unit: list(values) for unit, values in snapshot.norms.norms.items()} == {
        0: [1, 2, 0],
        1: [0, 3, 0],
    }
    assert list(snapshot.norms.step) == [1, 2, 3]
    with pytest.raises(TypeError):
        Record.from_json(
            {"kind": "unit_norms", "run_id": "r", "seq": 1, "time": 1.0, "norms": [1.0, "x"]}
        )
    again = fold(
        (1.0, RunStarted(units=["a"])),
        (2.0, UnitNorms(5, [1.0])),
        (3.0, RunStarted(resumed_step=2)),
    )
    assert not len(again.norms)


def test_a_block_that_stops_being_compiled_in_a_late_step_is_told_once(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    problems: list[str] = []

    def fail_at_step_2(record: Record) -> None:
        if isinstance(record.event, StepFinished) and record.event.step == 2:
            problems.append("no kernel for 96 tokens")

    found = property(lambda _: [("A block", problem) for problem in problems])
    monkeypatch.setattr(StreamingEngine, "uncompiled", found)
    run.recorder.subscribe(fail_at_step_2)
    run.execute()
    texts = [event.text for event in events_of(run, LogLine) if event.level == "warning"]
    (found,) = [text for text in texts if "compiled" in text]
    assert "a shape of step 2" in found and "no kernel for 96 tokens" in found


def test_timelines_are_bounded_by_their_spans_and_the_log_says_so(tmp_path, monkeypatch):
    config = make_config(tmp_path, **{"train.steps": 5, "output.timeline_every": 1})
    run = start_run(config, tmp_path / "runs")
    run.execute()
    timelines = events_of(run, StepTimeline)
    assert [event.step for event in timelines] == [1, 2, 3, 4, 5]
    spans = max(len(event.spans) for event in timelines)
    monkeypatch.setattr(observe, "SPANS_KEPT", 2 * spans)
    run = start_run(config, tmp_path / "runs")
    run.execute()
    assert [event.step for event in events_of(run, StepTimeline)] == [1, 2]
    (found,) = [event.text for event in events_of(run, LogLine) if "timelines" in event.text]
    assert found.startswith("The record has 2 timelines")
