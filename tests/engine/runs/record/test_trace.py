"""Timelines of a record are found by step, and written as traces that other tools can open."""

from __future__ import annotations

import json

import pytest

import launch
from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import RunError
from engine.planning.schedule.ops import Lane
from engine.runs.record.events import LogLine, PlanBuilt, PlanSimulated, RunStarted, StepTimeline
from engine.runs.record.run_folder import create_run
from engine.runs.record.timeline_index import TimelineIndex, nearest, of_rank
from engine.runs.record.trace import MEASURED, PREDICTED, ROWS, trace_of
from tests.support.several_ranks import timeline_of_ranks
from tests.support.synthetic_run import records, run_events, span, timeline, write_events

CONFIG = TrainConfig(name="Traced", model=ModelConfig(source="m"), data=DataConfig(source="d"))


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, records(run_events(60)))
    return path


# ------------------------------------------------------------------ steps of a record


def test_any_sampled_step_can_be_read(record):
    index = TimelineIndex(record)
    assert index.steps() == [10, 20, 30, 40, 50, 60]
    assert index.read(30) == (timeline(30), None) and index.read()[0] == timeline(60)


@pytest.mark.parametrize(
    "step, sentence",
    [
        (7, "Step 7 has no timeline; the nearest one that has is step 10."),
        (9**15, "is step 60."),
        (0, "is step 10."),
    ],
)
def test_a_step_that_was_not_sampled_is_told_with_the_nearest(record, step, sentence):
    with pytest.raises(RunError) as found:
        TimelineIndex(record).read(step)
    assert sentence in str(found.value)


def test_nothing_sampled_and_nothing_there(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        with pytest.raises(RunError, match="No step of this run has a timeline yet"):
            TimelineIndex(path).read()
        path.touch()


def test_what_is_added_is_found_and_a_torn_line_is_not(record):
    index = TimelineIndex(record)
    assert index.steps()[-1] == 60
    line = json.dumps(records([timeline(70)], first_seq=999)[0].to_json()) + "\n"
    with open(record, "a", encoding="utf-8") as file:
        file.write(line[:-20])
    assert index.steps()[-1] == 60
    with open(record, "a", encoding="utf-8") as file:
        file.write(line[-20:])
    assert index.read()[0] == timeline(70)


def test_a_resume_takes_later_steps_out_and_brings_its_own_prediction(tmp_path):
    path = tmp_path / "events.jsonl"
    first, second = (
        PlanSimulated(1.0, [span("a", "forward", "COMPUTE", 0, 1)]),
        PlanSimulated(2.0, []),
    )
    write_events(
        path,
        records(
            [
                PlanBuilt(),
                first,
                RunStarted(),
                timeline(10),
                timeline(20),
                timeline(30),
                PlanBuilt(),
                RunStarted(resumed_step=20),
                timeline(30, blocks=2),
                PlanBuilt(),
                second,
                RunStarted(resumed_step=30),
                timeline(40),
            ]
        ),
    )
    index = TimelineIndex(path)
    assert index.steps() == [10, 20, 30, 40]
    assert [index.read(step)[1] for step in index.steps()] == [first, first, None, second]
    assert index.read(30)[0] == timeline(30, blocks=2)


def test_a_text_that_looks_like_a_timeline_is_none(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, records([LogLine(text='{"kind":"step_timeline","step":5,"spans":[')]))
    assert TimelineIndex(path).steps() == []


def test_a_damaged_timeline_is_told(record):
    text = record.read_text(encoding="utf-8").replace(
        '"unit": "block 3", "op": "forward"', '"unit": 3, "op": "forward"'
    )
    record.write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match="The timeline of step 20 is damaged"):
        TimelineIndex(record).read(20)


def test_another_record_in_its_place_is_read_anew(record):
    index = TimelineIndex(record)
    assert len(index.steps()) == 6
    record.unlink()
    write_events(record, records([timeline(5)]))
    assert index.steps() == [5]


def test_the_nearest_step():
    assert [nearest([10, 20, 40], wanted) for wanted in (1, 15, 16, 30, 99)] == [10, 10, 20, 20, 40]


# ------------------------------------------------------------------ traces


def checked(trace, spans, process, begin=0.0):
    """Checks the events of the trace against the spans, one by one."""
    threads = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == process
    }
    found = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["pid"] == process and event["cat"] != "wait"
    ]
    assert len(found) == len(spans)
    for event, given in zip(found, spans):
        assert threads[event["tid"]] == given["lane"]
        assert event["args"]["unit"] == given["unit"]
        assert event["args"]["op"] == given["op"] == event["cat"]
        assert event["args"].get("micro_batch") == given["micro_batch"]
        assert event["ts"] == pytest.approx(1e6 * (given["start"] - begin), abs=1e-3)
        assert event["ts"] >= 0
        assert event["dur"] == pytest.approx(1e6 * (given["end"] - given["start"]), abs=1e-3)
    return threads


def test_a_trace_is_the_spans_in_microseconds():
    spans = [
        span("block 0", "forward", "COMPUTE", 0.001, 0.0035, micro_batch=1),
        span("step", "clip", "HOST", 0.0035, 0.0035),
        span("block 0", "prefetch", "H2D", 0.0, 0.001),
    ]
    waits = [{"start": -0.002, "end": 0.001, "cause": "h2d"}]
    trace = trace_of("run-1", StepTimeline(8, spans, waits), PlanSimulated(0.004, spans[:1]))
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert {"COMPUTE", "HOST", "H2D", "COMPUTE waits"} == set(
        checked(trace, spans, MEASURED, begin=-0.002).values()
    )
    checked(trace, spans[:1], PREDICTED, begin=-0.002)
    (wait,) = (event for event in trace["traceEvents"] if event.get("cat") == "wait")
    assert (wait["ts"], wait["dur"], wait["args"]) == (0, 3000, {"cause": "h2d"})
    named = next(
        event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == MEASURED
    )
    assert named["name"] == "forward block 0 [1]"
    assert trace["otherData"] == {"program": "Ramstream", "run": "run-1", "step": "8"}
    assert set(Lane) <= set(ROWS)


def test_each_rank_is_a_process_of_its_own():
    step = timeline_of_ranks(8, ranks=3)
    trace = trace_of("run-1", step, PlanSimulated(0.004, of_rank(step, 0).spans))
    begin = -0.004
    processes = (MEASURED, PREDICTED + 1, PREDICTED + 2)
    for rank, process in enumerate(processes):
        threads = checked(trace, of_rank(step, rank).spans, process, begin)
        assert {"COLLECTIVE", "COMPUTE waits"} <= set(threads.values())
    checked(trace, of_rank(step, 0).spans, PREDICTED, begin)
    waits = [event for event in trace["traceEvents"] if event.get("cat") == "wait"]
    assert [event["pid"] for event in waits] == list(processes)
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names[PREDICTED + 2] == "Step 8, rank 2, measured"
    assert names[PREDICTED] == "As predicted"


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    folder = create_run(tmp_path / "runs", CONFIG)
    write_events(folder.events_path, records(run_events(60), folder.id))
    monkeypatch.chdir(tmp_path)
    where = ["--runs-dir", str(tmp_path / "runs")]
    assert launch.main(["trace", folder.id, *where]) == 0
    path = tmp_path / f"{folder.id}-step-60.trace.json"
    assert path.name in capsys.readouterr().out
    checked(json.loads(path.read_text(encoding="utf-8")), timeline(60).spans, MEASURED)
    assert (
        launch.main(
            ["trace", folder.id, *where, "--step", "20", "--out", str(tmp_path / "own.json")]
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "own.json").read_text(encoding="utf-8"))["otherData"]["step"] == "20"
    )

    capsys.readouterr()
    for wrong, sentence in (
        (["trace", "nothing"], "nothing"),
        (["trace", folder.id, "--step", "7"], "the nearest one that has is step 10"),
        (["trace", folder.id, "--out", str(tmp_path / "no" / "where.json")], "cannot be written"),
    ):
        assert launch.main([*wrong, *where]) == 2
        found = capsys.readouterr().err
        assert sentence in found and found.count("\n") == 1
    assert not list(tmp_path.glob(".trace*"))
