"""A tracker that raises, hangs, dies or is full stops no run, and is told once."""

from __future__ import annotations

import os
import time

import pytest

from engine.config.output_settings import TRACKERS
from engine.errors import ConfigError
from engine.runs.record.events import LogLine, RunEnded, StepFinished
from engine.runs.record.following import replay
from engine.runs.record.run_folder import open_run
from engine.runs.trackers import attached
from engine.runs.trackers.known_trackers import KINDS, LEAVES, STAYS, destinations
from engine.runs.trackers.tracked import tracked_run
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of

STEPS = 4
FAULTS = {
    "raises": "raise ValueError('no such thing')",
    "full": "import errno; raise OSError(errno.ENOSPC, 'No space left on device')",
    "dies": "import os; os._exit(3)",
    "hangs": "import time; time.sleep(3600)",
}
TOLD = {
    "raises": "failed (ValueError: no such thing)",
    "full": "failed (OSError: [Errno 28] No space left on device)",
    "dies": "failed (its process has ended)",
    "hangs": "did not take everything in 1 s",
}


def with_package(folder, monkeypatch, name: str, content: str) -> None:
    """Makes `name` a package that this process and its helpers find first."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))


def config_of(tmp_path, **changes):
    return make_config(
        tmp_path, **{"train.steps": STEPS, "train.warmup_steps": 1, "name": "Tiny", **changes}
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tracker_that_fails_stops_no_run_and_is_told_once(tmp_path, monkeypatch, fault):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    with_package(tmp_path / "packages", monkeypatch, "wandb", FAULTS[fault])
    monkeypatch.setattr(attached, "FINISH_SECONDS", 1 if fault == "hangs" else 30)
    run = start_run(config_of(tmp_path, **{"output.trackers": ["wandb"]}), tmp_path / "runs")
    began = time.monotonic()
    ended = run.execute()
    assert (ended.state, ended.reason) == ("finished", f"Finished all {STEPS} steps.")
    assert time.monotonic() - began < 25
    assert [event.step for event in events_of(run, StepFinished)] == [1, 2, 3, 4]
    warnings = [event.text for event in events_of(run, LogLine) if event.level == "warning"]
    (found,) = [text for text in warnings if "Weights" in text]
    assert found.startswith(f"Weights & Biases (output.trackers) {TOLD[fault]}.")
    assert "wandb login" in found and f"track {run.id}` sends the rest" in found
    last = list(replay(run.folder.events_path))[-1]
    assert type(last.event) is RunEnded


def test_a_tracker_that_is_not_installed_is_told_before_the_start_and_in_the_log(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = (
        'Trackio is not installed, so it gets no curves: pip install -e ".[trackio]" installs it.'
    )
    assert destinations(("trackio",), tmp_path) == [sentence]
    run = start_run(config_of(tmp_path, **{"output.trackers": ["trackio"]}), tmp_path / "runs")
    assert run.execute().state == "finished"
    assert [e.text for e in events_of(run, LogLine) if "Trackio" in e.text] == [sentence]


def test_off_by_default_and_nothing_is_left_in_the_folder(tmp_path):
    config = config_of(tmp_path)
    assert config.output.trackers == () and destinations((), tmp_path) == []
    run = start_run(config, tmp_path / "runs")
    run.execute()
    assert not (run.folder.path / "trackers.json").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [(["tensorbord"], "'tensorbord' is unknown; known are tensorboard"), (["mlflow"] * 2, "twice")],
)
def test_a_wrong_name_is_refused(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words) as refused:
        config_of(tmp_path, **{"output.trackers": given})
    assert refused.value.field == "output.trackers"


@pytest.mark.parametrize(
    ("name", "variables", "words", "leaves"),
    [
        ("tensorboard", {}, "tensorboard --logdir", False),
        ("trackio", {}, "trackio show --project ramstream", False),
        ("trackio", {"TRACKIO_SPACE_ID": "me/curves"}, "the Hugging Face Space me/curves", True),
        ("trackio", {"TRACKIO_SERVER_URL": "https://t.example/?write_token=s"}, "t.example", True),
        ("wandb", {}, "api.wandb.ai, project ramstream", True),
        ("wandb", {"WANDB_PROJECT": "p", "WANDB_BASE_URL": "http://localhost:8080"}, "p", False),
        ("wandb", {"WANDB_MODE": "offline"}, "the folder wandb of the run", False),
        ("mlflow", {}, "mlflow.db", False),
        ("mlflow", {"MLFLOW_TRACKING_URI": "https://u:secret@ml.example/x"}, "ml.example", True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "mysql://u:secret@db/x"}, "mysql://db/x", True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "databricks"}, "databricks", True),
        ("mlflow", {"MLFLOW_TRACKING_URI": "file:///curves"}, "/curves", False),
    ],
)
def test_the_destination_is_named_without_secrets(tmp_path, name, variables, words, leaves):
    place = KINDS[name].place(variables, tmp_path)
    assert words in place.text and place.leaves is leaves
    assert "secret" not in place.sentence and "write_token" not in place.sentence
    assert place.sentence.endswith(LEAVES if leaves else STAYS)


def test_every_tracker_has_its_kind():
    assert tuple(KINDS) == TRACKERS


def test_trackers_get_the_settings_without_what_may_be_secret(tmp_path):
    changes = {"output.webhook": "https://hooks.example/secret", "output.sample_prompts": ["hush"]}
    run = start_run(config_of(tmp_path, **changes), tmp_path / "runs")
    run.close()
    found = tracked_run(open_run(tmp_path / "runs", run.id))
    assert found.name == "Tiny" and found.parameters["train.steps"] == STEPS
    assert not [value for value in found.parameters.values() if "secret" in str(value)]
    assert not [value for value in found.parameters.values() if "hush" in str(value)]
