"""The log has everything of a record that is an event for a person, with its step and time."""

from __future__ import annotations

from app.pages.run.run_log import RunLog
from engine.runs.record.events import (
    CheckpointWritten,
    ControlReceived,
    EvalFinished,
    ExportWritten,
    LogLine,
    RunEnded,
    RunStarted,
    SettingsChanged,
    StateChanged,
    StepFinished,
    StepSkipped,
)
from tests.support.synthetic_run import records, run_events, write_events


def texts(log, **asked):
    return [entry["text"] for entry in log.entries(**asked)["entries"]]


def test_nothing_is_lost_and_steps_are_told(tmp_path):
    path = tmp_path / "events.jsonl"
    many = [LogLine("info", f"message {number}") for number in range(2_000)]
    write_events(path, records([StepFinished(step=3), *many, EvalFinished(step=3, loss=0.5)]))
    log = RunLog(path)
    found = log.entries()
    assert found["count"] == 2_001 and {entry["step"] for entry in found["entries"]} == {3}
    assert texts(log)[0] == "message 0" and texts(log)[-1].startswith("Validation loss 0.5")
    # What is new is read alone.
    later = [StepFinished(step=4), StepSkipped(4, "loss"), RunEnded("failed", "It diverged.")]
    write_events(path, records(later, first_seq=5_000))
    new = log.entries(after=2_001)["entries"]
    assert [entry["text"] for entry in new] == [
        "Step 4 was skipped: its loss was not finite.",
        "Failed: It diverged.",
    ]
    assert [(entry["level"], entry["step"]) for entry in new] == [("warning", 4), ("error", 4)]


def test_a_reason_that_names_the_state_is_not_said_twice(tmp_path):
    path = tmp_path / "events.jsonl"
    ended = [RunEnded("finished", "Finished all 450 steps."), RunEnded("failed", "It diverged.")]
    write_events(path, records(ended))
    assert [entry["text"] for entry in RunLog(path).entries()["entries"]] == [
        "Finished all 450 steps.",
        "Failed: It diverged.",
    ]


def test_an_export_of_an_earlier_step_does_not_move_the_run(tmp_path):
    path = tmp_path / "events.jsonl"
    exported = ExportWritten(step=5, path="export", bytes=10)
    write_events(path, records([StepFinished(step=9), exported, RunEnded("finished", "")]))
    assert [entry["step"] for entry in RunLog(path).entries()["entries"]] == [5, 9]


def test_requests_changes_states_and_a_resume_are_entries(tmp_path):
    path = tmp_path / "events.jsonl"
    events = [
        StateChanged("preparing"),
        RunStarted(total_steps=90),
        StepFinished(step=9),
        ControlReceived("change", {"train.learning_rate": 0.0007}),
        SettingsChanged(10, {"train.learning_rate": 0.0007}, 90),
        StateChanged("paused", "The disk is full.", "checkpoint"),
        RunStarted(total_steps=90, resumed_step=5),
    ]
    write_events(path, records(events))
    log = RunLog(path)
    assert texts(log) == [
        "Preparing.",
        "Ready to train 90 steps.",
        "Requested: change (learning rate 0.0007).",
        "From step 10 on: learning rate 0.0007.",
        "Paused: The disk is full.",
        "Resumed after step 5 of 90.",
    ]
    entries = log.entries()["entries"]
    matters = [entry["text"] for entry in entries if not entry["is_minor"]]
    assert matters == [texts(log)[place] for place in (1, 4, 5)]
    assert entries[4]["level"] == "warning" and entries[5]["step"] == 5
    assert entries[2]["time"] > entries[0]["time"] > 1_000_000_000


def test_a_checkpoint_says_what_it_holds_and_how_long_training_waited(tmp_path):
    path = tmp_path / "events.jsonl"
    written = [
        CheckpointWritten(step=3, bytes=4 << 20, seconds=2.0, waited_seconds=0.25),
        CheckpointWritten(step=4, holds="weights", due_step=2),
    ]
    write_events(path, records(written))
    full, alone = texts(RunLog(path))
    # While an update is held back, the device may compute, so this is an upper bound.
    assert full == (
        "Checkpoint of step 3: 4.00 MiB in 2.00 s (2.00 MiB/s); training waited at most 250 ms "
        "for it."
    )
    assert alone.startswith("Checkpoint of step 4, weights alone: ")
    assert alone.endswith("; due after step 2, postponed while another was written.")


def test_a_damaged_line_is_told_and_a_torn_one_waits(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, records(run_events(40)))
    log = RunLog(path)
    count = log.entries()["count"]
    with path.open("ab") as file:
        file.write(b"no record\n" + b'{"kind":"log_line","run')
    assert texts(log, after=count) == [
        f"Line {path.read_bytes().count(10)} of events.jsonl is damaged: what it recorded is not "
        "shown."
    ]
    path.write_bytes(b"")
    nothing = {"count": 0, "entries": [], "damage": []}
    assert log.entries() == nothing, "another record took its place"
    path.unlink()
    assert log.entries() == nothing
