"""A run's settings change while it goes on."""

from __future__ import annotations

import pytest

from engine.config.changes import Change
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.record.control import CommandReader, send_command
from engine.runs.record.events import ControlReceived, LogLine, SettingsChanged, StepFinished
from engine.training.loop.lr_schedule import learning_rate
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute


def test_rate_and_steps_change_at_a_safe_step_and_are_recorded(tmp_path):
    config = make_config(tmp_path, **{"train.schedule": "linear"})
    run = start_run(config, tmp_path / "runs")
    ended = execute(run, {3: Change.from_dict({"train.learning_rate": 2e-2, "train.steps": 11})})
    assert ended.reason == "Finished all 11 steps."
    (changed,) = events_of(run, SettingsChanged)
    assert 4 <= changed.step <= 8 and changed.total_steps == 11
    assert changed.values == {"train.learning_rate": 2e-2, "train.steps": 11}
    after = run.folder.config.train
    assert (after.learning_rate, after.steps) == (2e-2, 11)
    for step in events_of(run, StepFinished):
        old = step.step < changed.step
        assert step.learning_rate == learning_rate(
            config.train if old else after, step.step, 8 if old else 11
        )
    assert run.recorder.snapshot.total_steps == 11 and run.recorder.snapshot.progress == 1.0
    assert ControlReceived("change", changed.values) in events_of(run, ControlReceived)
    found = (
        f"From step {changed.step} on: train.learning_rate 0.01 → 0.02, train.steps 8 → 11; the "
        "learning rate falls until step 11."
    )
    assert found in [line.text for line in events_of(run, LogLine)]


def test_a_run_that_was_changed_resumes_with_what_it_was_changed_to(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")

    def react(record):
        if isinstance(record.event, StepFinished) and record.event.step == 2:
            run.request(Change.from_dict({"train.steps": 12}))
            run.request("stop")

    run.recorder.subscribe(react)
    run.execute()
    assert resume_run(tmp_path / "runs", run.id).execute().reason == "Finished all 12 steps."
    paused = start_run(make_config(tmp_path), tmp_path / "runs")

    def pausing(record):
        if isinstance(record.event, StepFinished) and record.event.step == 2:
            paused.request("pause")
        elif record.event.kind == "state_changed" and record.event.state == "paused":
            paused.request(Change.from_dict({"train.steps": 5}))
            paused.request("resume")

    paused.recorder.subscribe(pausing)
    assert paused.execute().reason == "Finished all 5 steps."
    assert paused.folder.config.train.steps == 5


def test_what_cannot_be_changed_is_told_and_the_run_goes_on(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    ended = execute(
        run,
        {4: Change.from_dict({"train.steps": 2}), 5: Change.from_dict({"train.learning_rate": -1})},
    )
    assert ended.reason == "Finished all 8 steps." and not events_of(run, SettingsChanged)
    found = " ".join(line.text for line in events_of(run, LogLine) if line.level == "warning")
    assert "2 are fewer than the" in found and "train.learning_rate" in found
    assert run.folder.config.train.steps == 8


@pytest.mark.parametrize(
    "values", [None, {}, [], {"train.batch_size": 2}, {"train.steps": "8"}, {"train.steps": True}]
)
def test_a_change_says_what_it_can_change(values):
    with pytest.raises(RunError, match="train.learning_rate|not a number"):
        Change.from_dict(values)


def test_changes_travel_through_the_control_file(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    reader = CommandReader(run.folder)
    change = Change.from_dict({"train.learning_rate": 1e-4})
    send_command(run.folder, change)
    send_command(run.folder, "save")
    with open(run.folder.control_path, "a") as file:
        file.write('{"command": "change", "values": {"name": 1}}\n{"command": "change"}\n')
    assert reader.read_new() == [change, "save"]
    run.close()


def test_epochs_give_way_to_steps():
    config = TrainConfig.from_dict(
        {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"epochs": 2}}
    )
    after = Change.from_dict({"train.steps": 300}).applied(config, 10)
    assert (after.train.steps, after.train.epochs) == (300, None)
