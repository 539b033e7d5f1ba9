"""Runs and conversations with a model of the hub wait for its download, and say how far it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from app.shared.run_bar import ShownRun, run_bar
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import JobProgressed
from engine.runs.record.following import replay
from engine.runs.record.snapshot import RunSnapshot
from engine.tools.chat import chat_engines
from engine.tools.chat.conversation import base_of
from tests.support.fake_hub import NAME, FakeHub, GivenUp, serve
from tests.support.folded import fold
from tests.support.folders import make_config, make_data

# ------------------------------------------------------------------ who uses it


def test_the_run_bar_says_how_far_it_is():
    snapshot = RunSnapshot()
    snapshot.state = "preparing"
    snapshot._job_progressed(
        1.0, JobProgressed("download", 34, 100, "3 of 7 files, about 12 min left")
    )
    shown = run_bar(snapshot, ShownRun("one", "Tiny", True))
    assert shown["sentence"] == "Downloading the model 34 %: 3 of 7 files, about 12 min left."
    assert "stop" in shown["actions"]


def test_chat_downloads_before_it_loads(tmp_path, monkeypatch):
    """Under the weights' own name, from where the download was; what is raised gives up."""
    config, seen = make_config(tmp_path), []

    def fake(source, weights, progress, check):
        assert weights
        check()
        progress(30, 100, "0 of 2 files")
        progress(100, 100, "2 of 2 files")

    monkeypatch.setattr(chat_engines, "fetch", fake)
    source = base_of(config)
    chat_engines.load(source, lambda *given: seen.append(given)).close()
    downloading = f"Downloading {config.model.source}"
    assert seen[:3] == [(0, 0), (0, 70, downloading), (70, 70, downloading)]
    assert {given[2] for given in seen[3:]} == {f"Loading the weights: {source.label}"}
    assert seen[-1][0] == seen[-1][1]

    def cancel(*_):
        raise GivenUp

    with pytest.raises(GivenUp):
        chat_engines.load(source, cancel)


def train(tmp_path, variables, *given):
    command = [
        sys.executable,
        str(PROGRAM_ROOT / "launch.py"),
        "train",
        *map(str, given),
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def folded(folder):
    return fold(replay(folder / "events.jsonl"))


def downloads(events):
    """The job's progress, of each session; weights follow small files."""
    return [
        (event["done"], event["total"])
        for event in map(json.loads, events.read_text(encoding="utf-8").splitlines())
        if event["kind"] == "job_progressed" and event["job"] == "download"
    ]


@pytest.mark.slow("three runs in processes of their own take 20 seconds")
def test_a_run_of_a_hub_model_stops_goes_on_and_trains(model, tmp_path):
    config = make_config(tmp_path, **{"train.steps": 3, "output.checkpoint_every": 2}).to_dict()
    config["model"]["source"], config["data"]["source"] = (
        NAME,
        str(make_data(tmp_path / "rows.jsonl")),
    )
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.rmtree(tmp_path / "model")
    with serve(FakeHub({NAME: model}, pause=0.2)) as hub:
        variables = hub.variables(tmp_path / "hub")
        process = train(tmp_path, variables, preset)
        while hub.sent < 1 << 20 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and "Stopped before the first step" in shown, shown
        assert "Download, 5 of 6 files" in shown
        (folder,) = (tmp_path / "runs").iterdir()
        assert folded(folder).state == "stopped"
        stopped = downloads(folder / "events.jsonl")
        assert 0 < stopped[-1][0] < stopped[-1][1] and hub.weights_asked() == [""]

        hub.pause = 0
        process = train(tmp_path, variables, "--resume", folder.name)
        shown = process.communicate(timeout=120)[0]
        assert process.returncode == 0, shown
        snapshot = folded(folder)
        assert snapshot.state == "finished"
        assert snapshot.step == 3
        assert snapshot.job is None
        weights = hub.weights_asked()
        assert len(weights) == 2 and weights[1].startswith("bytes=")
        seen = downloads(folder / "events.jsonl")
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (hub.size(NAME),) * 2

        asked = [path for _, path, _ in hub.requests]
    again = train(tmp_path, variables, preset)  # all is in the cache, so that no hub is needed
    shown = again.communicate(timeout=120)[0]
    assert again.returncode == 0, shown
    assert [path for _, path, _ in hub.requests] == asked


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_weights_are_not_waited_for_where_the_data_cannot_be_used(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"nr": 1, "what": 2}\n' * 20, encoding="utf-8")
    config = make_config(tmp_path).to_dict()
    config["model"]["source"], config["data"]["source"] = NAME, str(rows)
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump(config), encoding="utf-8")
    with serve(FakeHub({NAME: model})) as hub:
        process = train(tmp_path, hub.variables(tmp_path / "hub"), preset)
        shown = process.communicate(timeout=120)[0]
        assert process.returncode != 0 and "rows.jsonl" in shown, shown
        assert hub.requests and hub.weights_asked() == []
