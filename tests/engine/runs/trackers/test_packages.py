"""What the packages of trackers are called with, and what TensorBoard's and Trackio's own readers
then find, and what is in the files of Weights & Biases.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import EvalFinished, StepFinished
from engine.runs.record.following import replay
from engine.runs.record.run_folder import RunFolder, create_run
from engine.runs.trackers.points import GRAD_NORM, LOSS, VALIDATION_LOSS, Point
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config
from tests.support.tracked_records import loss_of, record_session, tracked
from tests.support.trained_runs import execute

READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
found.Reload()
print(json.dumps({
    tag: [(event.step, event.value) for event in found.Scalars(tag)]
    for tag in found.Tags()["scalars"]
}))
"""
READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
curves = {}
for row in SQLiteStorage.get_logs("ramstream", sys.argv[1]):
    for name, value in row.items():
        if name not in ("step", "timestamp"):
            curves.setdefault(name, []).append((row["step"], value))
print(json.dumps(curves))
"""
READ_WANDB = """
import json, pathlib, struct, sys
from wandb.proto import wandb_internal_pb2
BLOCK, HEAD, FILE_HEAD = 32768, 7, 7
def pieces(data):  # of a log as LevelDB writes it: each has a checksum, its length and its type
    place, whole = FILE_HEAD, b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""
curves = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("offline-run-*/*.wandb")):
    for piece in pieces(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(piece)
        items = record.history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for name, value in row.items():
            if name != "step" and not name.startswith("_"):
                curves.setdefault(name, []).append((row["step"], value))
print(json.dumps(curves))
"""


def read_by(program: str, argument: str | Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the curves that a tracker's own reader finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(argument)], capture_output=True, text=True, check=True
    )
    curves = json.loads(done.stdout.splitlines()[-1])
    return {name: [tuple(point) for point in points] for name, points in curves.items()}


def track(folder: RunFolder, name: str) -> None:
    command = [sys.executable, "launch.py", "track", folder.id, "--to", name]
    done = subprocess.run(
        [*command, "--runs-dir", str(folder.path.parent)],
        cwd=PROGRAM_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def of_record(folder: RunFolder, kind: type, figure: str) -> list[tuple[int, float]]:
    events = [record.event for record in replay(folder.events_path)]
    return [(event.step, getattr(event, figure)) for event in events if type(event) is kind]


def as_float32(points):
    return [(step, pytest.approx(value, rel=1e-7)) for step, value in points]


@pytest.fixture
def crashed(tmp_path) -> RunFolder:
    """Returns a run that was killed after step 9 and went on from its checkpoint of step 6."""
    folder = create_run(tmp_path / "runs", make_config(tmp_path))
    record_session(folder.path, 1, range(1, 10))
    return folder


def test_tensorboards_reader_sees_a_run_that_was_stopped_and_resumed(tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    changes = {"train.steps": 6, "train.warmup_steps": 1, "output.trackers": ["tensorboard"]}
    changes |= {"data.eval_fraction": 0.25, "output.eval_every": 2}
    first = start_run(make_config(tmp_path, **changes), tmp_path / "runs")
    assert execute(first, at_step={3: "stop"}).state == "stopped"
    stopped = read_by(READ_TENSORBOARD, first.folder.path / "tensorboard")
    assert stopped[LOSS] == as_float32(of_record(first.folder, StepFinished, "loss"))
    assert resume_run(tmp_path / "runs", first.id).execute().state == "finished"
    curves = read_by(READ_TENSORBOARD, first.folder.path / "tensorboard")
    assert [step for step, _ in curves[LOSS]] == [1, 2, 3, 4, 5, 6]
    assert curves[LOSS] == as_float32(of_record(first.folder, StepFinished, "loss"))
    assert curves[GRAD_NORM] == as_float32(of_record(first.folder, StepFinished, "grad_norm"))
    assert curves[VALIDATION_LOSS] == as_float32(of_record(first.folder, EvalFinished, "loss"))
    assert len(list((first.folder.path / "tensorboard").iterdir())) == 1


def test_tensorboards_reader_sees_steps_that_were_trained_again_once(crashed):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    track(crashed, "tensorboard")
    record_session(crashed.path, 2, range(7, 13), resumed=6)
    track(crashed, "tensorboard")
    curves = read_by(READ_TENSORBOARD, crashed.path / "tensorboard")
    newest = [(step, loss_of(1 if step <= 6 else 2, step)) for step in range(1, 13)]
    assert curves[LOSS] == newest
    assert [step for step, _ in curves[VALIDATION_LOSS]] == [0, 4, 8, 12]


def test_trackios_reader_sees_a_run_that_was_stopped_and_resumed(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    changes = {"train.steps": 6, "train.warmup_steps": 1, "output.trackers": ["trackio"]}
    changes |= {"data.eval_fraction": 0.25, "output.eval_every": 2}
    run = start_run(make_config(tmp_path, **changes), tmp_path / "runs")
    assert execute(run, at_step={3: "stop"}).state == "stopped"
    assert resume_run(tmp_path / "runs", run.id).execute().state == "finished"
    curves = read_by(READ_TRACKIO, run.id)
    assert curves[LOSS] == of_record(run.folder, StepFinished, "loss")
    assert [step for step, _ in curves[LOSS]] == [1, 2, 3, 4, 5, 6]
    assert curves[VALIDATION_LOSS] == of_record(run.folder, EvalFinished, "loss")


def test_trackios_reader_sees_steps_that_were_trained_again_once(crashed, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    track(crashed, "trackio")
    record_session(crashed.path, 2, range(7, 13), resumed=6)
    track(crashed, "trackio")
    curves = read_by(READ_TRACKIO, crashed.id)
    first = [(step, loss_of(1 if step <= 9 else 2, step)) for step in range(1, 13)]
    assert curves[LOSS] == first
    assert [step for step, _ in curves[VALIDATION_LOSS]] == [0, 4, 8, 12]


def test_the_files_of_weights_and_biases_have_a_run_that_was_stopped_and_resumed(
    tmp_path, monkeypatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    changes = {"train.steps": 6, "train.warmup_steps": 1, "output.trackers": ["wandb"]}
    changes |= {"data.eval_fraction": 0.25, "output.eval_every": 2}
    run = start_run(make_config(tmp_path, **changes), tmp_path / "runs")
    assert execute(run, at_step={3: "stop"}).state == "stopped"
    assert resume_run(tmp_path / "runs", run.id).execute().state == "finished"
    curves = read_by(READ_WANDB, run.folder.path / "wandb")
    assert curves[LOSS] == of_record(run.folder, StepFinished, "loss")
    assert [step for step, _ in curves[LOSS]] == [1, 2, 3, 4, 5, 6]
    assert curves[VALIDATION_LOSS] == of_record(run.folder, EvalFinished, "loss")


# ------------------------------------------------------------------ packages that are played


def opened(monkeypatch, module: str, packages: dict[str, types.ModuleType]):
    """Returns a module of the house, imported anew with these packages in place of real ones."""
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delitem(sys.modules, module, raising=False)
    found = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, module, found)  # so that it is gone after the test
    return found


def package(name: str, **members) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


POINTS = [Point(1, 5.0, {LOSS: 2.0}), Point(2, 6.0, {LOSS: 1.5, VALIDATION_LOSS: 3.0})]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("finished", 0),
        ("finished, export failed", 0),
        ("stopped", 0),
        ("failed", 1),
        ("interrupted", 1),
    ],
)
def test_weights_and_biases_gets_a_run_that_can_be_resumed(tmp_path, monkeypatch, state, code):
    calls: list[tuple] = []

    class Run:
        id, url = tmp_path.name, "https://wandb.example/run"
        summary: ClassVar[dict[str, str]] = {}

        def define_metric(self, name, step_metric=None):
            calls.append(("define", name, step_metric))

        def log(self, values):
            calls.append(("log", values))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**given):
        calls.append(("init", given))
        return Run()

    monkeypatch.setenv("WANDB_PROJECT", "mine")
    fake = package("wandb", init=init, Settings=lambda **values: values)
    to_wandb = opened(monkeypatch, "engine.runs.trackers.to_wandb", {"wandb": fake})
    tracker = to_wandb.ToWandb(tracked(tmp_path))
    assert (tracker.run, tracker.where, tracker.held()) == (tmp_path.name, Run.url, {})
    tracker.log(POINTS)
    tracker.close(state)
    given = calls[0][1]
    assert (given["project"], given["id"], given["resume"]) == ("mine", tmp_path.name, "allow")
    assert given["config"] == {"train.steps": 9, "name": "Tiny"}
    assert given["settings"]["console"] == "off" and given["settings"]["disable_code"] is True
    assert calls[1:] == [
        ("define", "step", None),
        ("define", "*", "step"),
        ("log", {"step": 1, LOSS: 2.0}),
        ("log", {"step": 2, LOSS: 1.5, VALIDATION_LOSS: 3.0}),
        ("finish", code),
    ]
    assert Run.summary == {"state": state}


def test_mlflow_gets_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    server: dict[str, list] = {"metrics": [], "params": [], "states": [], "runs": [], "tags": []}

    class Client:
        def __init__(self, tracking_uri):
            self.uri = tracking_uri

        def get_experiment_by_name(self, name):
            assert name == "ramstream"

        def create_experiment(self, name):
            return f"the id of {name}"

        def create_run(self, experiment, run_name, tags):
            server["runs"].append((experiment, run_name, tags))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="m1"))

        def update_run(self, run, status):
            server["states"].append((run, status))

        def log_batch(self, run, metrics=(), params=()):
            assert run == "m1"
            assert len(metrics) <= 1000
            assert len(params) <= 100
            server["metrics"] += metrics
            server["params"] += params

        def get_metric_history(self, run, name):
            found = [metric for metric in server["metrics"] if metric[0] == name]
            return [types.SimpleNamespace(step=metric[3]) for metric in found]

        def set_tag(self, run, name, value):
            server["tags"].append((name, value))

        def set_terminated(self, run, status):
            server["states"].append((run, status))

    entities = package("mlflow.entities", Metric=lambda *v: v, Param=lambda *v: v)
    tracking = package("mlflow.tracking", MlflowClient=Client)
    fakes = {"mlflow": package("mlflow"), "mlflow.entities": entities, "mlflow.tracking": tracking}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    to_mlflow = opened(monkeypatch, "engine.runs.trackers.to_mlflow", fakes)
    tracker = to_mlflow.ToMlflow(tracked(tmp_path))
    assert tracker.where == f"sqlite:///{tmp_path.parent / 'mlflow.db'}" and tracker.run == "m1"
    assert tracker.held() == {}
    tracker.log(POINTS)
    assert server["metrics"] == [
        (LOSS, 2.0, 5000, 1),
        (LOSS, 1.5, 6000, 2),
        (VALIDATION_LOSS, 3.0, 6000, 2),
    ]
    tracker.close("stopped")
    again = to_mlflow.ToMlflow(tracked(tmp_path, known_as="m1"))
    assert again.held() == {LOSS: 2, VALIDATION_LOSS: 2}
    again.log([Point(step, 7.0, {LOSS: 1.0}) for step in range(3, 3000)])
    again.close("interrupted")
    again.close("finished, export failed")
    tags = {"ramstream.run": tmp_path.name}
    assert server["runs"] == [("the id of ramstream", "Tiny", tags)]
    assert server["params"] == [("train.steps", "9"), ("name", "Tiny")]
    assert server["states"] == [
        ("m1", "KILLED"),
        ("m1", "RUNNING"),
        ("m1", "FAILED"),
        ("m1", "FINISHED"),
    ]
    ended = ("stopped", "interrupted", "finished, export failed")
    assert server["tags"] == [("ramstream.state", state) for state in ended]
    assert len(server["metrics"]) == 3 + 2997 and os.environ.get("MLFLOW_TRACKING_URI") is None
