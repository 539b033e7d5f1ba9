"""`output.checkpoint` says what a run keeps: it can be used, and the words about it hold."""

from __future__ import annotations

import json
import re
import signal

import pytest

import launch
from engine.errors import RunError
from engine.runs.record.events import CheckpointWritten, FitReported, LogLine, RunStarted
from engine.runs.summaries.listing import list_runs
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.saved_on_disk import SavedSteps, saved_steps
from engine.training.export.export import export_run
from engine.training.loop import planning
from engine.training.loop.run import Run, resume_run, start_run
from engine.training.weights.open_for_sampling import open_checkpoint
from tests.support.failing import at_event, at_step, command, plenty
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute, planes_on_disk, weights_in

WEIGHTS = {"output.checkpoint": "weights"}
NONE = {"output.checkpoint": "none"}


def started(tmp_path, name: str = "runs", **values) -> Run:
    return start_run(make_config(tmp_path, **values), tmp_path / name)


def exported(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def breaks(monkeypatch):
    """Makes a training step fail before its updates."""

    def at(step: int) -> None:
        train_step = StreamingEngine.train_step

        def failing(self, number, *arguments):
            if number == step:
                raise RuntimeError("broken")
            train_step(self, number, *arguments)

        monkeypatch.setattr(StreamingEngine, "train_step", failing)

    return at


# ---------------------------------------------------------------------- weights


@pytest.mark.slow("it sweeps over many cases")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_alone_are_used_as_those_of_a_full_checkpoint(tmp_path, dtype):
    values = {"model.dtype": dtype}
    full, alone = (
        started(tmp_path, "full", **values),
        started(tmp_path, "alone", **values, **WEIGHTS),
    )
    later, folders = [], []
    for run in (full, alone):
        assert execute(run).state == "finished", run.recorder.snapshot.reason
        folders.append(tmp_path / f"export-{len(folders)}")
        assert export_run(run.folder.path.parent, run.id, folders[-1]).step == 8
        with open_checkpoint(run.folder.path.parent, run.id) as opened:
            assert opened.checkpoint.step == 8
        start = {"model.start_from": str(run.folder.path), "train.steps": 2}
        later.append(start_run(run.folder.config.with_values(start), tmp_path / "later"))
        assert execute(later[-1]).state == "finished"
    for name in ("step-6", "step-8"):
        paths = [run.folder.checkpoints_path / name for run in (full, alone)]
        assert weights_in(paths[0]) == weights_in(paths[1])
        assert json.loads((paths[1] / "manifest.json").read_text())["holds"] == "weights"
    assert exported(folders[0]) == exported(folders[1])
    with open_checkpoint(tmp_path / "later", later[0].id) as one:
        first = {
            unit: one.host_states.array(unit, "weight_high").tobytes()
            for unit in one.host_states.layouts
        }
    with open_checkpoint(tmp_path / "later", later[1].id) as other:
        for unit in other.host_states.layouts:
            assert other.host_states.array(unit, "weight_high").tobytes() == first[unit]
    checked = alone.recorder.snapshot.prediction_check.quantities["checkpoint_bytes"]
    assert abs(checked["error"]) < 0.2


def test_a_run_that_kept_weights_alone_is_not_resumed_and_says_how_it_goes_on(
    tmp_path, capsys, breaks
):
    stopped = started(tmp_path, **WEIGHTS)
    ended = execute(stopped, {4: "stop"})
    assert ended.state == "stopped"
    assert "Its weights are saved, and a new run can train on" in ended.reason
    assert "cannot be resumed" in ended.reason
    step = stopped.recorder.snapshot.step
    assert saved_steps(stopped.folder.checkpoints_path) == SavedSteps(step, None)
    record = stopped.folder.events_path.read_bytes()
    how = f"launch.py train --from {stopped.id}"
    with pytest.raises(RunError, match="kept weights alone.*cannot be resumed.*" + how):
        resume_run(tmp_path / "runs", stopped.id)
    arguments = ["--runs-dir", tmp_path / "runs", "train", "--resume", stopped.id]
    assert how in command(capsys, *arguments)[2]
    assert stopped.folder.events_path.read_bytes() == record
    arguments[2:] = ["train", "--from", stopped.id, "--set", "train.steps=1"]
    code, out, _ = command(capsys, *arguments)
    assert code == 0 and f"step-{step}." in out
    breaks(6)
    failed = started(tmp_path, **WEIGHTS)
    ended = execute(failed)
    assert ended.state == "failed"
    assert "The weights of step 5 are saved, and a new run can train on from" in ended.reason


def test_a_resume_goes_on_from_an_older_full_checkpoint(tmp_path, runs, stopped_run, whole):
    """The kind was changed by a resume. The full checkpoint of step 6 is older and still there."""
    again = resume_run(runs, stopped_run.id, ["output.checkpoint=weights"])
    ended = execute(again, {7: "stop"})
    assert ended.state == "stopped" and "checkpoint of step 6" in ended.reason
    assert saved_steps(again.folder.checkpoints_path) == SavedSteps(7, 6)
    assert any(
        line.text.startswith("output.checkpoint was full up to step 6 and is weights")
        for line in events_of(again, LogLine)
    )
    last = resume_run(runs, stopped_run.id, ["output.checkpoint=full"])
    assert execute(last).state == "finished"
    assert events_of(last, RunStarted)[-1].resumed_step == 6
    found = [line.text for line in events_of(last, LogLine) if line.level == "warning"]
    (alone,) = (text for text in found if "step-7 holds weights alone" in text)
    assert "a full checkpoint, and those that it writes take the place of this one." in alone
    assert saved_steps(last.folder.checkpoints_path) == SavedSteps(8, 8)
    assert planes_on_disk(last) == planes_on_disk(whole)


def test_what_earlier_sessions_left_counts_only_as_far_as_it_is_replaced(
    runs, stopped_run, monkeypatch
):
    """A full checkpoint stays until checkpoints of weights have taken its place."""
    monkeypatch.setattr(planning, "read_machine", plenty)
    left = [
        sum(file.stat().st_size for file in path.iterdir())
        for path in stopped_run.folder.checkpoints_path.glob("step-*")
    ]
    assert len(left) == 2
    for kind in ("none", "weights"):
        best = sum(file.stat().st_size for file in stopped_run.folder.best_path.glob("*/*"))
        again = resume_run(runs, stopped_run.id, [f"output.checkpoint={kind}"])
        assert execute(again, {7: "stop"}).state == "stopped"
        disk = events_of(again, FitReported)[-1].report["disk"]
        items = {item["name"]: item["bytes"] for item in disk["items"]}
        free = disk["limit"] - (1 << 40) - best
        if kind == "none":
            assert "Checkpoints" not in items and free == 0
            continue
        # Two are there, and at most one more at once: the settings keep two.
        each, rest = divmod(items["Checkpoints"], 3)
        assert rest == 0 and free == 2 * each < sum(left)


# ---------------------------------------------------------------------- none


def test_a_run_without_checkpoints_keeps_its_export_alone(tmp_path):
    run = started(tmp_path, **NONE, **{"output.export": True})
    ended = execute(run, {2: "save"})
    assert ended.reason == (
        "Finished all 8 steps; no checkpoint is kept, as this run writes no checkpoints."
    )
    assert not run.folder.checkpoints_path.exists() and not events_of(run, CheckpointWritten)
    assert (run.folder.export_path / "config.json").is_file()
    lines = [line.text for line in events_of(run, LogLine)]
    assert "Nothing was saved, as output.checkpoint is none." in lines
    assert not any("keeps nothing" in line for line in lines)
    full = started(tmp_path / "full", **{"output.export": True})
    assert execute(full).state == "finished"
    assert exported(full.folder.export_path) == exported(run.folder.export_path)


def test_a_run_without_checkpoints_says_that_nothing_is_kept(tmp_path, breaks):
    stopped = started(tmp_path, **NONE, **{"output.keep_best": "none"})
    ended = execute(stopped, {4: "stop"})
    step = stopped.recorder.snapshot.step
    assert ended.reason == (
        f"Stopped at step {step}, and nothing is kept of it, as this run writes no checkpoints; a "
        "resume begins anew."
    )
    assert any("keeps nothing that it trains" in line.text for line in events_of(stopped, LogLine))
    breaks(6)
    failed = started(tmp_path, **NONE)
    ended = execute(failed)
    assert ended.state == "failed" and "Nothing is kept of step 5" in ended.reason
    assert "a resume begins anew" in ended.reason
    for run in (stopped, failed):
        assert not run.folder.checkpoints_path.exists()


def test_a_resume_may_stop_keeping_checkpoints(runs, stopped_run):
    """What is there already stays, and a resume goes on from it."""
    again = resume_run(runs, stopped_run.id, ["output.checkpoint=none"])
    ended = execute(again, {7: "stop"})
    assert ended.reason.endswith("; a resume goes on from the checkpoint of step 6.")
    assert saved_steps(again.folder.checkpoints_path) == SavedSteps(6, 6)
    last = resume_run(runs, stopped_run.id, ["output.checkpoint=full"])
    assert execute(last).state == "finished"
    assert saved_steps(last.folder.checkpoints_path) == SavedSteps(8, 8)


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("kind", "while_it_stops", "then"),
    [
        ("full", "step and saving", "Resume it with: python launch.py train --resume"),
        (
            "weights",
            "step and saving",
            "Train on from its weights with: python launch.py train --from",
        ),
        ("none", "step;", "Begin it again with: python launch.py train --resume"),
    ],
)
def test_a_stop_tells_the_command_that_goes_on(
    tmp_path, runs, monkeypatch, capfd, kind, while_it_stops, then
):
    preset = tmp_path / "preset.yaml"
    values = {"output.checkpoint": kind, "output.checkpoint_every": 2}
    make_config(tmp_path, **values).save(preset)
    at_event(monkeypatch, at_step(3), lambda: signal.raise_signal(signal.SIGINT))
    assert launch.main(["--runs-dir", str(runs), "train", str(preset)]) == 0
    out, err = capfd.readouterr()
    (run,) = list_runs(runs)
    assert f"{then} {run.id}" in out and f"after this {while_it_stops}" in err
    assert ("checkpoint of weights alone, of" in out) == (kind == "weights")
    whole = re.search(r"checkpoint of [\d.]+ [KM]B saved", out)
    assert (whole is not None) == (kind == "full")
