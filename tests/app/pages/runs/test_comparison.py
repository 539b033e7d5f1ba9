"""Runs are shown side by side: their curves, their key figures, and the settings that differ."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from app.pages.runs.comparison import (
    COLORS,
    CURVE_POINTS,
    FIGURES,
    Compared,
    comparison,
)
from app.pages.runs.key_figures import KEY_FIGURES
from app.pages.runs.setting_differences import (
    differing_settings,
    queued_differences,
)
from app.shared.run_names import distinct_names
from engine.config.settings import TrainConfig
from engine.config.tree import by_dotted_name
from engine.runs.record.events import ExactMatchMeasured
from tests.support import folded
from tests.support.synthetic_run import records, run_events

CONFIG = TrainConfig.from_dict({"name": "Run", "model": {"source": "m"}, "data": {"source": "d"}})


def fold(events):
    return folded.fold(records(events))


def compared(name="Run", steps=60, settings=None, state="finished", **events):
    values = {"name": name, **by_dotted_name(CONFIG.to_dict()), **(settings or {})}
    return Compared(f"id-{name}", name, state, fold(run_events(steps, **events)), values)


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize("axis", ["step", "time"])
def test_each_run_has_one_color_and_its_name_as_text(axis):
    hostile = "<img src=x onerror=1> & co"
    runs = [compared("Plain"), compared(hostile, 3000, gpu=False), compared("Empty", 0, ended=None)]
    answer = comparison(runs, axis)
    json.dumps(answer, allow_nan=False)
    assert [run["name"] for run in answer["runs"]] == ["Plain", hostile, "Empty"]
    assert [run["color"] for run in answer["runs"]] == list(COLORS[:3])
    for figure in answer["figures"].values():
        go.Figure(figure)
        by_name = {}
        for trace in figure["data"]:
            assert "<" not in trace["name"] and len(trace["x"]) <= CURVE_POINTS
            by_name.setdefault(trace["name"].removesuffix(", validation"), set()).add(
                trace["line"]["color"]
            )
        assert all(len(colors) == 1 for colors in by_name.values())
        assert by_name["Plain"] == {COLORS[0]}
        assert by_name["&lt;img src=x onerror=1&gt; &amp; co"] == {COLORS[1]}
        assert figure["layout"]["xaxis"].get("type") == ("date" if axis == "time" else None)


def test_memory_has_a_second_row_where_a_run_has_a_gpu():
    both = FIGURES["memory"]([compared("a"), compared("b", gpu=False)], ["a", "b"], "step")
    assert [trace.get("yaxis") for trace in both["data"]] == [
        None,
        "y2",
        None,
    ]
    assert "yaxis2" in both["layout"]
    cpu = FIGURES["memory"]([compared("a", gpu=False)], ["a"], "step")
    assert "yaxis2" not in cpu["layout"]


def test_runs_without_a_step_say_so():
    figure = FIGURES["loss"]([compared("a", 0, ended=None)], ["a"], "step")
    assert "made a step yet" in figure["layout"]["annotations"][0]["text"]


# ------------------------------------------------------------------ numbers and settings


def test_key_figures_mark_the_better_value():
    slow = compared("slow", 40, total=200)
    rows = {row["name"]: row for row in comparison([compared("long", 200), slow], "step")["rows"]}
    assert rows["Steps"] == {
        "name": "Steps",
        "texts": ["200", "40"],
        "best": None,
        "changes": ["", ""],
    }
    assert rows["Training loss, last (smoothed)"]["best"] == 0
    assert rows["Step time, median of the run"]["texts"] == ["0.25 s", "0.25 s"]
    assert rows["Step time, median of the run"]["best"] is None
    assert rows["RAM, peak"]["texts"] == ["100 GiB", "100 GiB"]
    cpu = {
        row["name"]: row
        for row in comparison([compared("a"), compared("b", 0, ended=None)], "step")["rows"]
    }
    assert cpu["GPU memory, peak"]["texts"] == ["43.0 GiB", "–"]
    assert cpu["GPU memory, peak"]["best"] is None


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("Compute, median of the run", (100.0, 101.0), None),
        ("Compute, median of the run", (100.0, 103.0), 1),
        ("Compute, median of the run", (100.0, 103.0, 103.5), None),  # two of them are equally good
        ("RAM, peak", (100e9, 99e9), None),
        ("RAM, peak", (100e9, 90e9), 1),
        ("Validation loss, lowest", (0.5, 0.496), None),
        ("Validation loss, lowest", (0.5, 0.49), 1),
    ],
)
def test_a_difference_that_chance_could_make_has_no_best(name, values, best):
    (figure,) = (each for each in KEY_FIGURES if each.name == name)
    runs = [compared(str(value)).snapshot for value in values]
    given = {id(run): value for run, value in zip(runs, values)}
    shown = replace(figure, read=lambda run: given[id(run)])
    assert shown.row(runs, same_data=True)["best"] == best


def test_times_of_steps_of_other_sizes_are_not_compared():
    (figure,) = (each for each in KEY_FIGURES if each.is_of_step)
    small, large = (compared(name).snapshot for name in ("a", "b"))
    for run, tokens, seconds in ((small, 1000, 0.1), (large, 4000, 0.3)):
        run.steps.tokens[:] = array(run.steps.tokens.typecode, [tokens] * len(run.steps))
        run.steps.seconds[:] = array(run.steps.seconds.typecode, [seconds] * len(run.steps))
    row = figure.row([small, large], same_data=True)
    assert row["best"] is None and row["name"].endswith("(steps of other sizes)")
    assert figure.changes([small, large], 0) == ["", ""]
    (speed,) = (each for each in KEY_FIGURES if each.name == "Speed, median of the run")
    assert not speed.is_of_step


@pytest.mark.parametrize(
    ("right", "total", "best"), [((47, 48), 50, None), ((46, 48), 50, 1), ((960, 965), 1000, None)]
)
def test_one_answer_more_is_not_the_best(right, total, best):
    (figure,) = (each for each in KEY_FIGURES if each.name == "Answers right, last")
    runs = [compared(str(count)).snapshot for count in right]
    for run, count in zip(runs, right):
        run.exact_matches.append(ExactMatchMeasured(10_000, "after", count, total, []))
    assert figure.row(runs, same_data=True)["best"] == best


def test_only_settings_that_differ_are_listed():
    other = {"train.learning_rate": 1e-4, "train.epochs": 2.0, "name": "other"}
    runs = [compared("a").settings, compared("b", settings=other).settings]
    assert differing_settings(runs) == [
        {"name": "Train for", "title": "train.steps", "texts": ["1 pass", "2 passes"]},
        {"name": "Learning rate", "title": "train.learning_rate", "texts": ["1×10⁻⁵", "0.0001"]},
    ]
    upload = compared("b", settings={"data.source": "runs/.uploads/abc/rows.jsonl"}).settings
    (row,) = differing_settings([compared("a").settings, upload])
    assert row["texts"] == ["d", "rows.jsonl"]
    mix = [{"source": "a.jsonl", "weight": 2}]
    mixed = compared("b", settings={"data.source": mix}).settings
    (row,) = differing_settings([compared("a").settings, mixed])
    assert row["texts"] == ["d", '[{"source": "a.jsonl", "weight": 2}]']
    assert differing_settings([compared("a").settings, compared("b").settings]) == []


def test_an_entry_of_the_queue_shows_in_what_it_differs():
    plain = CONFIG.to_dict()
    faster = CONFIG.with_values({"name": "Other", "train.learning_rate": 1e-4}).to_dict()
    assert queued_differences([plain]) == [""]
    assert queued_differences([plain, faster, plain]) == [
        "learning rate 1×10⁻⁵",
        "learning rate 0.0001",
        "learning rate 1×10⁻⁵",
    ]
    adapters = CONFIG.with_values({"train.method": "lora", "train.lora_rank": 8}).to_dict()
    assert queued_differences([plain, adapters])[1].startswith("LoRA · rank of the adapters 8")


def test_figures_differ_from_those_of_the_baseline():
    runs = [compared("a", 200), compared("b", 100, total=200), compared("c", 0, ended=None)]
    answer = comparison(runs, "step", "id-a")
    assert [run["is_baseline"] for run in answer["runs"]] == [True, False, False]
    changes = {row["name"]: row["changes"] for row in answer["rows"]}
    assert changes["Steps"] == ["", "−50 %", "−100 %"]
    assert changes["Step time, median of the run"] == ["", "", ""]
    # Without one, and with one that is not compared, there is nothing to differ from.
    for baseline in ("", "another"):
        rows = comparison(runs, "step", baseline)["rows"]
        assert all(row["changes"] == ["", "", ""] for row in rows)


def test_no_loss_is_called_the_best_across_different_data():
    def best_of(answer):
        return {row["name"] for row in answer["rows"] if row["best"] is not None}

    long, short = compared("a", 200), compared("b", 40, total=200)
    same = comparison([long, short], "step")
    assert "Training loss, last (smoothed)" in best_of(same) and not same["caution"]
    other = compared("b", 40, settings={"data.source": "another"}, total=200)
    answer = comparison([long, other], "step")
    assert (
        not {name for name in best_of(answer) if "oss" in name}
        and "data may differ" in answer["caution"]
    )
    unread = Compared("x", "x", "finished", short.snapshot, {})
    assert comparison([long, unread], "step")["caution"] == answer["caution"]
    # How rows are packed does not change the rows.
    packed = compared("b", 40, settings={"data.packing": False}, total=200)
    assert not comparison([long, packed], "step")["caution"]


def test_accuracy_and_rate_are_compared_where_there_are_any():
    asked = compared("a", settings={})
    asked.snapshot.exact_matches[:] = [
        ExactMatchMeasured(step=20, correct=3, total=12),
        ExactMatchMeasured(step=0, moment="before", total=12),
    ]
    not_asked = compared("b")
    not_asked.snapshot.exact_matches.clear()
    answer = comparison([asked, not_asked], "time")
    accuracy = answer["figures"]["accuracy"]
    assert [trace["y"] for trace in accuracy["data"]] == [[0, 25]]
    assert not accuracy["is_absent"]
    assert accuracy["data"][0]["mode"] == "markers", "two points make no line"
    rows = {row["name"]: row["texts"] for row in answer["rows"]}
    assert rows["Answers right, last"] == ["25 %", "–"]
    assert len(answer["figures"]["rate"]["data"]) == 2
    assert comparison([not_asked] * 2, "step")["figures"]["accuracy"]["is_absent"]


def test_a_run_whose_settings_cannot_be_read_differs_in_none():
    unread = Compared("x", "x", "finished", fold(run_events(5)), {})
    answer = comparison([compared("a"), compared("b", settings={"train.seed": 7}), unread], "step")
    assert answer["unread"] == ["x"] and [row["texts"][2] for row in answer["settings"]] == ["–"]


def test_runs_of_the_same_name_are_told_apart_by_their_start():
    one, two, other = distinct_names([("Same", 1e9), ("Same", 1e9 + 7), ("Other", 1e9)])
    assert other == "Other" and one != two
    assert one.startswith("Same (Sep ") and one[:-3] == two[:-3]
