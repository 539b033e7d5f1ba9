"""Runs are compared side by side through a route, and each record is read once."""

from __future__ import annotations

import os

import pytest

import app.pages.runs.compare
from app.pages.runs.compare import MOST_RUNS, Records
from app.pages.runs.compare_routes import compare_routes
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.runs.summaries.about import write_about
from tests.support.routes import send
from tests.support.synthetic_run import run_events, step_finished

CONFIG = TrainConfig.from_dict({"name": "Run", "model": {"source": "m"}, "data": {"source": "d"}})


def recorded(runs_dir, steps=60, ended="finished", **values):
    folder = create_run(runs_dir, CONFIG.with_values(values))
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(steps, total=100, ended=ended):
        recorder.emit(event)
    recorder.close()
    return folder


def test_a_record_is_folded_once_and_gone_on_with_as_it_grows(tmp_path, monkeypatch):
    read = []
    real = app.pages.runs.compare.catch_up
    monkeypatch.setattr(
        app.pages.runs.compare, "catch_up", lambda *given: read.append(1) or real(*given)
    )
    folders = [recorded(tmp_path), recorded(tmp_path, 20, None)]
    kept = Records()
    for _ in range(3):
        answer = kept.compare(folders, "step", lambda folder: False)
    assert len(read) == 2
    assert [run["word"] for run in answer["runs"]] == ["Learned", "Interrupted"]
    assert not answer["going_on"]
    recorder = RunRecorder(folders[1].path, folders[1].id)
    recorder.emit(step_finished(21, 100))
    recorder.close()
    answer = kept.compare(folders, "step", lambda folder: folder is folders[1])
    assert len(read) == 3
    assert answer["rows"][0]["texts"] == ["60", "21"]
    assert answer["going_on"]
    # A record that replaces it is read from the beginning.
    content = folders[0].events_path.read_bytes()
    folders[0].events_path.write_bytes(
        content[: content.index(b'"step":31,') - 30].rpartition(b"\n")[0] + b"\n"
    )
    os.utime(folders[0].events_path, (1, 1))
    assert kept.compare(folders, "step", lambda folder: False)["rows"][0]["texts"] == ["30", "21"]


@pytest.mark.parametrize("count", [0, 1, MOST_RUNS + 1])
def test_two_to_six_runs_are_compared(tmp_path, count):
    with pytest.raises(RunError, match="2 to 6 runs are compared"):
        Records().compare(
            [recorded(tmp_path, 2) for _ in range(count)], "step", lambda folder: False
        )


def test_the_route(tmp_path):
    session = Session(tmp_path)
    a, b, damaged = (
        recorded(tmp_path, **{"train.seed": 1}),
        recorded(tmp_path, **{"train.seed": 2}),
        recorded(tmp_path),
    )
    write_about(b, "Renamed", "")
    (damaged.path / "config.yaml").write_text("{")
    damaged.events_path.write_bytes(b"\xff\n" + damaged.events_path.read_bytes())

    def get(query):
        return send(compare_routes(session), "GET", f"/api/compare?{query}")

    answer = get(f"runs={a.id},{b.id},{a.id},{damaged.id}&axis=time").json()
    assert [run["id"] for run in answer["runs"]] == [a.id, b.id, damaged.id]
    assert answer["runs"][1]["name"] == "Renamed"
    assert {"name": "Seed", "title": "train.seed", "texts": ["1", "2", "–"]} in answer["settings"]
    assert get(f"runs={a.id}").json()["error"] == "2 to 6 runs are compared; 1 is chosen."
    for query in ("", f"runs={a.id},nothing", f"runs={a.id},..%2Fx"):
        assert get(query).status_code == 404 and get(query).json()["error"]
