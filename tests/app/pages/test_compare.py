"""Runs side by side: curves, key figures, settings that differ, and that a record is read once."""

from __future__ import annotations

import json
import os

import plotly.graph_objects as go
import pytest

import app.pages.compare
from app.pages.compare import (COLOURS, FIGURES, MOST_RUNS, Compared, Records, by_dotted_name, comparison, differing_settings,
                               labels)
from app.session.session import Session
from app.web.compare_routes import compare_routes
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.about import write_about
from engine.runs.folder import create_run
from engine.runs.recorder import RunRecorder
from engine.runs.snapshot import RunSnapshot
from tests.support.routes import send
from tests.support.synthetic_run import records, run_events, step_finished

CONFIG = TrainConfig.from_dict({"name": "Run", "model": {"source": "m"}, "data": {"source": "d"}})


def fold(events):
    snapshot = RunSnapshot()
    for record in records(events):
        snapshot.apply(record)
    return snapshot


def compared(name="Run", steps=60, settings=None, state="finished", **events):
    values = {"name": name, **by_dotted_name(CONFIG.to_dict()), **(settings or {})}
    return Compared(f"id-{name}", name, state, fold(run_events(steps, **events)), values)


def recorded(runs_dir, steps=60, ended="finished", **values):
    folder = create_run(runs_dir, CONFIG.with_values(values))
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(steps, total=100, ended=ended):
        recorder.emit(event)
    recorder.close()
    return folder


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize("axis", ["step", "time"])
def test_each_run_has_one_colour_and_its_name_as_text(axis):
    hostile = "<img src=x onerror=1> & co"
    runs = [compared("Plain"), compared(hostile, 3000, gpu=False), compared("Empty", 0, ended=None)]
    answer = comparison(runs, axis)
    json.dumps(answer, allow_nan=False)
    assert [run["name"] for run in answer["runs"]] == ["Plain", hostile, "Empty"]
    assert [run["colour"] for run in answer["runs"]] == list(COLOURS[:3])
    for figure in answer["figures"].values():
        go.Figure(figure)
        by_name = {}
        for trace in figure["data"]:
            assert "<" not in trace["name"] and len(trace["x"]) <= app.pages.compare.CURVE_POINTS
            by_name.setdefault(trace["name"].removesuffix(", held out"), set()).add(trace["line"]["color"])
        assert all(len(colours) == 1 for colours in by_name.values())
        assert by_name["Plain"] == {COLOURS[0]} and by_name["&lt;img src=x onerror=1&gt; &amp; co"] == {COLOURS[1]}
        assert figure["layout"]["xaxis"].get("type") == ("date" if axis == "time" else None)


def test_memory_has_a_second_row_where_a_run_has_a_gpu():
    both = FIGURES["memory"]([compared("a"), compared("b", gpu=False)], ["a", "b"], "step")
    assert [trace.get("yaxis") for trace in both["data"]] == [None, "y2", None] and "yaxis2" in both["layout"]
    cpu = FIGURES["memory"]([compared("a", gpu=False)], ["a"], "step")
    assert "yaxis2" not in cpu["layout"]


def test_runs_without_a_step_say_so():
    figure = FIGURES["loss"]([compared("a", 0, ended=None)], ["a"], "step")
    assert "made a step yet" in figure["layout"]["annotations"][0]["text"]


# ------------------------------------------------------------------ numbers and settings


def test_key_figures_mark_the_better_value():
    slow = compared("slow", 40, total=200)
    rows = {row["name"]: row for row in comparison([compared("long", 200), slow], "step")["rows"]}
    assert rows["Steps"] == {"name": "Steps", "texts": ["200", "40"], "best": []}
    assert rows["Final loss (mean of the last steps)"]["best"] == [0]
    assert rows["Time of a step (median)"]["texts"] == ["0.25 s", "0.25 s"] and rows["Time of a step (median)"]["best"] == []
    assert rows["Host memory, peak"]["texts"] == ["100 GiB", "100 GiB"]
    cpu = {row["name"]: row for row in comparison([compared("a"), compared("b", 0, ended=None)], "step")["rows"]}
    assert cpu["GPU memory, peak"]["texts"] == ["43.0 GiB", "–"] and cpu["GPU memory, peak"]["best"] == []


def test_only_settings_that_differ_are_listed():
    runs = [compared("a"), compared("b", settings={"train.learning_rate": 1e-4, "train.epochs": 2.0, "name": "other"})]
    assert differing_settings(runs) == [{"name": "train.epochs", "texts": ["null", "2.0"]},
                                        {"name": "train.learning_rate", "texts": ["1e-05", "0.0001"]}]
    mix = [{"source": "a.jsonl", "weight": 2}]
    row, = differing_settings([compared("a"), compared("b", settings={"data.source": mix})])
    assert row["texts"] == ["d", '[{"source": "a.jsonl", "weight": 2}]']
    assert differing_settings([compared("a"), compared("b")]) == []


def test_a_run_whose_settings_cannot_be_read_differs_in_none():
    unread = Compared("x", "x", "finished", fold(run_events(5)), {})
    answer = comparison([compared("a"), compared("b", settings={"train.seed": 7}), unread], "step")
    assert answer["unread"] == ["x"] and [row["texts"][2] for row in answer["settings"]] == ["–"]


def test_runs_of_the_same_name_are_told_apart():
    one, two, other = (Compared(run_id, name, "finished", RunSnapshot(), {}) for run_id, name in (
        ("1", "Same"), ("2", "Same"), ("3", "Other")))
    assert labels([one, two, other]) == ["Same (1)", "Same (2)", "Other"]


# ------------------------------------------------------------------ reading


def test_a_record_is_folded_once_and_gone_on_with_as_it_grows(tmp_path, monkeypatch):
    read = []
    real = app.pages.compare.catch_up
    monkeypatch.setattr(app.pages.compare, "catch_up", lambda *given: read.append(1) or real(*given))
    folders = [recorded(tmp_path), recorded(tmp_path, 20, None)]
    kept = Records()
    for _ in range(3):
        answer = kept.compare(folders, "step", lambda folder: False)
    assert len(read) == 2
    assert [run["word"] for run in answer["runs"]] == ["Finished", "Interrupted"] and not answer["going_on"]
    recorder = RunRecorder(folders[1].path, folders[1].id)
    recorder.emit(step_finished(21, 100))
    recorder.close()
    answer = kept.compare(folders, "step", lambda folder: folder is folders[1])
    assert len(read) == 3 and answer["rows"][0]["texts"] == ["60", "21"] and answer["going_on"]
    # Another record in its place is read from its beginning.
    content = folders[0].events_path.read_bytes()
    folders[0].events_path.write_bytes(content[:content.index(b'"step":31,') - 30].rpartition(b"\n")[0] + b"\n")
    os.utime(folders[0].events_path, (1, 1))
    assert kept.compare(folders, "step", lambda folder: False)["rows"][0]["texts"] == ["30", "21"]


@pytest.mark.parametrize("count", [0, 1, MOST_RUNS + 1])
def test_two_to_six_runs_are_compared(tmp_path, count):
    with pytest.raises(RunError, match="2 to 6 runs are compared"):
        Records().compare([recorded(tmp_path, 2) for _ in range(count)], "step", lambda folder: False)


def test_the_route(tmp_path):
    session = Session(tmp_path)
    a, b, damaged = recorded(tmp_path, **{"train.seed": 1}), recorded(tmp_path, **{"train.seed": 2}), recorded(tmp_path)
    write_about(b, "Renamed", "")
    (damaged.path / "config.yaml").write_text("{")
    damaged.events_path.write_bytes(b"\xff\n" + damaged.events_path.read_bytes())

    def get(query):
        return send(compare_routes(session), "GET", f"/api/compare?{query}")

    answer = get(f"runs={a.id},{b.id},{a.id},{damaged.id}&axis=time").json()
    assert [run["id"] for run in answer["runs"]] == [a.id, b.id, damaged.id] and answer["runs"][1]["name"] == "Renamed"
    assert {"name": "train.seed", "texts": ["1", "2", "–"]} in answer["settings"]
    assert get(f"runs={a.id}").json()["error"] == "2 to 6 runs are compared; 1 is chosen."
    for query in ("", f"runs={a.id},nothing", f"runs={a.id},..%2Fx"):
        assert get(query).status_code == 404 and get(query).json()["error"]
