"""The curves of a run are drawn with a bounded number of points, on each axis, with a text for
each.
"""

from __future__ import annotations

import json
from typing import get_args

import numpy as np
import plotly.graph_objects as go
import pytest

from app.labels import STATE_LABELS, STATE_TONES, in_bytes, in_count, in_digits, in_share, in_time
from app.pages.run.learning_figures import MAP_CELLS, MAP_COLUMNS
from app.pages.run.machine_figures import AREA_POINTS
from app.pages.run.run_figures import FIGURES, alarms, machine_text, summaries
from app.pages.run.run_overview import details, tiles
from app.pages.run.step_time import PARTS
from app.shared.charts.axes import AXES, Line, curve, x_ticks
from app.shared.charts.curve_points import MAX_POINTS, downsample, smooth
from app.shared.run_bar import ACTIONS, ShownRun, run_bar, sentence
from app.verdict.step_shares import recent_shares
from engine.runs.record.events import (
    FitReported,
    JobProgressed,
    MemorySampled,
    RunStarted,
    RunState,
    StateChanged,
    StepFinished,
    UnitNorms,
)
from engine.runs.record.snapshot import RunSnapshot
from engine.training.checkpoints.saved_on_disk import SavedSteps
from tests.support import folded
from tests.support.synthetic_run import GIB, records, run_events


def fold(events):
    return folded.fold(records(events))


@pytest.fixture(scope="module")
def finished():
    return fold(run_events(120))


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("gpu", [True, False])
def test_figures_are_what_plotly_draws(name, axis, gpu):
    for snapshot in (RunSnapshot(), fold(run_events(3, gpu=gpu)), fold(run_events(3000, gpu=gpu))):
        figure = FIGURES[name](snapshot, axis)
        go.Figure(data=figure["data"], layout=figure["layout"])
        json.dumps(figure, allow_nan=False)
        assert all(len(trace["x"]) <= MAX_POINTS for trace in figure["data"])
        assert all(
            len(trace["x"]) == len(trace["y"])
            for trace in figure["data"]
            if trace["type"] == "scatter"
        )
        assert figure["layout"]["uirevision"] == "kept"


def test_curves_carry_the_recorded_numbers(finished):
    loss = FIGURES["loss"](finished, "step")["data"]
    assert loss[0]["x"] == list(finished.steps.step)
    assert loss[0]["y"] == pytest.approx(list(finished.steps.loss), rel=1e-4)
    assert loss[2]["x"] == [40, 80, 120]
    memory = {trace["name"]: trace for trace in FIGURES["memory"](finished, "step")["data"]}
    assert memory["GPU allocated"]["y"][-1] == 40 and memory["GPU limit"]["y"] == [139, 139]
    assert memory["RAM limit"]["y"] == [128, 128] and memory["GPU peak"]["y"][-1] == 43
    assert [name for name, trace in memory.items() if trace.get("showlegend", True)] == [
        *("RAM in use", "RAM limit", "GPU peak", "GPU limit")
    ], "the tooltip names the others"
    assert "GPU" not in str(FIGURES["memory"](fold(run_events(5, gpu=False)), "step"))


def test_the_time_axis_starts_with_the_run(finished):
    x = FIGURES["loss"](finished, "time")["data"][0]["x"]
    assert x == sorted(x) and 0 < x[0] < 2000
    assert x[-1] == pytest.approx(1000 * (finished.steps.time[-1] - finished.started_time), abs=1)


def test_all_curves_share_one_axis(finished):
    for axis in AXES:
        axes = [FIGURES[name](finished, axis)["layout"]["xaxis"] for name in FIGURES]
        assert all(each.get("type") == axes[0].get("type") for each in axes)
        titles = {each["title"]["text"] for each in axes} - {""}  # small figures have none
        assert titles == {axes[0]["title"]["text"]}


def test_the_token_axis_counts_the_tokens_of_all_steps(finished):
    assert FIGURES["loss"](finished, "tokens")["data"][0]["x"] == [
        4096 * step for step in range(1, 121)
    ]
    assert FIGURES["loss"](finished, "tokens")["data"][2]["x"] == [
        4096 * step for step in (40, 80, 120)
    ]
    assert FIGURES["memory"](finished, "tokens")["data"][0]["x"][:2] == [4096, 8192]


def test_tokens_are_counted_on_from_the_step_that_a_resume_begins_at():
    snapshot = fold(
        [
            *run_events(50, total=100, ended="stopped"),
            RunStarted(resumed_step=40),
            *(StepFinished(step=step, tokens=1000, seconds=1.0) for step in (41, 42)),
        ]
    )
    assert list(snapshot.steps.tokens_so_far[-3:]) == [
        40 * 4096,
        40 * 4096 + 1000,
        40 * 4096 + 2000,
    ]


def test_the_areas_of_a_step_add_up_to_its_seconds():
    events = [
        StepFinished(
            step=step,
            seconds=2.0,
            data_seconds=0.3,
            exposed={"h2d": 0.1 * (step % 3), "other": 0.4, "late": 0.1},
        )
        for step in range(1, 1000)
    ]
    snapshot = fold(events)
    traces = FIGURES["step_time"](snapshot, "step")["data"]
    assert [trace["name"] for trace in traces] == [
        PARTS[name][0] for name in ("compute", "data", "h2d", "other")
    ]
    assert len({tuple(trace["x"]) for trace in traces}) == 1 and len(traces[0]["x"]) <= AREA_POINTS
    assert np.sum([trace["y"] for trace in traces], axis=0) == pytest.approx(2.0, rel=1e-3)
    shares = recent_shares(snapshot)
    assert shares["data"] == pytest.approx(0.15) and shares["other"] == pytest.approx(0.1)
    assert sum(shares.values()) == pytest.approx(1)


def test_a_slow_first_step_does_not_press_the_others_flat():
    steps = [StepFinished(step=k, seconds=60.0 if k == 1 else 0.5) for k in range(1, 101)]
    assert FIGURES["step_time"](fold(steps), "step")["layout"]["yaxis"]["range"] == [0, 0.75]
    assert "range" not in FIGURES["step_time"](fold(steps[1:]), "step")["layout"]["yaxis"]


def test_the_ceiling_is_drawn_where_it_can_be_seen_and_said_always(finished):
    def names(ceiling):
        snapshot = fold(
            [RunStarted(ceiling_tflops=ceiling), StepFinished(step=1, seconds=1.0, tflops=1.0)]
        )
        return [
            trace["name"] for trace in FIGURES["throughput"](snapshot, "step")["data"]
        ], summaries(snapshot)["throughput"]

    assert names(0) == (["tokens/s", "TFLOPS"], "Median of the run: 0 tokens/s")
    drawn, shown = names(4)
    assert drawn[-1] == "ceiling"
    assert shown == "Median of the run: 0 tokens/s · 1.00 of 4.00 TFLOPS, 25 % of the top speed"
    drawn, shown = names(700)
    assert drawn[-1] == "TFLOPS" and "of 700 TFLOPS, 0.1 % of the top speed" in shown


def test_the_speed_is_a_share_of_the_peak_where_one_was_measured():
    def shown(ceiling):
        steps = [StepFinished(step=1, seconds=0.5, tokens_per_second=2e4, tflops=1.0)]
        snapshot = fold([RunStarted(ceiling_tflops=ceiling), *steps])
        drawn = FIGURES["tflops"](snapshot, "step")
        assert machine_text(snapshot).endswith(summaries(snapshot)["tflops"].split(" · ")[0])
        return drawn["data"][0]["y"], summaries(snapshot)["tflops"]

    assert shown(4) == (
        [25.0],
        "25 % of this machine’s top speed · 20.0k tokens/s · 0.50 s a step, latest steps",
    )
    unknown = [1.0], "1.00 TFLOPS · 20.0k tokens/s · 0.50 s a step, latest steps"
    assert shown(0) == unknown
    assert shown(0.5) == unknown, "no step is faster than a peak: that one was measured wrongly"


def test_power_and_energy_are_shown_where_the_driver_tells(finished):
    watts, energy = FIGURES["power"](finished, "step")["data"]
    assert watts["y"][0] == pytest.approx(540 + 20 * np.sin(0.2), rel=1e-4)
    hours = (finished.memory.time[-1] - finished.memory.time[0]) / 3600
    assert energy["y"][0] == 0 and energy["y"][-1] == pytest.approx(540 * hours, rel=0.02)
    assert FIGURES["power"](fold(run_events(5, gpu=False)), "step")["is_absent"] is True


def test_the_map_of_norms_has_a_row_a_unit_and_a_bounded_size():
    snapshot = fold(run_events(60, blocks=4))
    trace = FIGURES["norms"](snapshot, "step")["data"][0]
    assert trace["x"] == [10, 20, 30, 40, 50, 60] and trace["y"] == snapshot.units
    assert np.shape(trace["z"]) == np.shape(trace["customdata"]) == (6, 6)
    assert 10 ** np.array(trace["z"]) == pytest.approx(np.array(trace["customdata"]), rel=0.01)
    many = fold(
        [
            RunStarted(units=[f"u{k}" for k in range(100)]),
            *(UnitNorms(step, [0.0] + [1.5] * 99) for step in range(1, 501)),
        ]
    )
    trace = FIGURES["norms"](many, "tokens")["data"][0]
    assert len(trace["x"]) == MAP_CELLS // 100 <= MAP_COLUMNS and trace["x"] == sorted(trace["x"])
    assert set(trace["z"][0]) == {None}
    hostile = fold([RunStarted(units=["<b>x"]), UnitNorms(1, [1.0])])
    assert FIGURES["norms"](hostile, "step")["data"][0]["y"] == ["&lt;b&gt;x"]


@pytest.mark.parametrize(
    "norms, text",
    [
        ([0.2, 0.5, 4.0, 0.0], {"0.2": 0.0, "0.5": 0.306, "1": 0.537, "2": 0.769, "4": 1.0}),
        (
            [1e-4, 3.0, 2e-4],
            {"0.0001": 0.0, "0.001": 0.223, "0.01": 0.447, "0.1": 0.67, "1": 0.893, "3": 1.0},
        ),
        (
            [7.2e-7, 22.0],
            {
                "7.2×10⁻⁷": 0.0,
                "1×10⁻⁵": 0.153,
                "0.0001": 0.286,
                "0.001": 0.42,
                "0.01": 0.553,
                "0.1": 0.687,
                "1": 0.821,
                "22": 1.0,
            },
        ),
        ([20.0, 150.0], {"20": 0.0, "50": 0.455, "100": 0.799, "150": 1.0}),
        ([1.6, 1.8], {"1.6": 0.0, "1.8": 1.0}),
        ([1.5, 1.5], {"1.5": 0.0}),
        ([0.0], {}),
    ],
)
def test_the_colors_of_norms_are_told_by_values_at_their_places(norms, text):
    drawn = FIGURES["norms"](
        fold([RunStarted(units=[f"u{k}" for k in range(len(norms))]), UnitNorms(1, norms)]), "step"
    )
    assert {value["text"]: value["at"] for value in drawn["scale"]} == pytest.approx(text, abs=1e-3)
    if text:
        trace, seen = drawn["data"][0], [norm for norm in norms if norm]
        assert [10 ** trace["zmin"], 10 ** trace["zmax"]] == pytest.approx(
            [min(seen), max(seen)], rel=1e-3
        )


def test_log_axes_are_those_of_loss_and_gradient_norm(finished):
    assert {
        name: build(finished, "step").get("log_axes")
        for name, build in FIGURES.items()
        if "log_axes" in build(finished, "step")
    } == {"loss": ["yaxis"], "optimizer": ["yaxis2"]}


def test_memory_is_called_flat_or_growing(finished):
    assert summaries(finished)["memory"] == (
        "RAM 100 GiB, flat since step 1 (± 0.1 %) · GPU 43.0 GiB, flat since step 1 (± 0 %)"
    )
    assert alarms(finished) == alarms(RunSnapshot()) == set()
    samples = [
        MemorySampled(step=step, host_rss=GIB * (10 + step), host_total=200 * GIB)
        for step in range(1, 101)
    ]
    growing = fold([RunStarted(total_steps=1000), *samples])
    assert summaries(growing)["memory"] == "RAM 110 GiB, growing: 50.0 GiB more since step 51"
    assert alarms(growing) == {"memory"}


def test_a_run_that_is_slower_than_predicted_says_so_over_its_speed():
    steps = [StepFinished(step=step, seconds=1.4, tokens_per_second=1e4) for step in range(1, 41)]
    others = MemorySampled(step=30, cpu_others=0.3)
    fit = {"time": {"step_seconds": 1.0}}
    slow = fold([RunStarted(total_steps=99), FitReported(fit), *steps[:30], others, *steps[30:]])
    assert summaries(slow)["tflops"] == (
        "1.4× slower than predicted: 30 % of the CPU went to other programs"
    )
    assert alarms(slow) == {"tflops"}


def test_downsampling_keeps_ends_and_spikes():
    x = np.arange(250_000.0)
    y = np.sin(x / 1000)
    y[123_457], y[200_001] = 50, -50
    kept_x, kept_y = downsample(x, y)
    assert len(kept_x) <= MAX_POINTS
    assert kept_x[0] == 0 and kept_x[-1] == 249_999
    assert 50 in kept_y and -50 in kept_y
    assert (np.diff(kept_x) > 0).all()
    assert np.array_equal(y[kept_x.astype(int)], kept_y)
    for count in (0, 1, MAX_POINTS, MAX_POINTS + 1, 2 * MAX_POINTS - 1):
        kept_x, _ = downsample(x[:count], y[:count])
        assert len(kept_x) <= MAX_POINTS and list(kept_x[-1:]) == list(x[:count][-1:])


def test_smoothing_is_the_mean_around_each_value():
    values = np.arange(100.0) ** 2
    assert smooth(values, 10)[50] == pytest.approx(np.mean(values[45:55]))
    assert smooth(values, 10)[0] == pytest.approx(np.mean(values[:5]))
    assert smooth(values, 10)[99] == pytest.approx(np.mean(values[94:]))
    assert np.array_equal(smooth(values, 1), values)
    assert len(smooth(np.array([]), 10)) == 0


# ------------------------------------------------------------------ the run bar and the words


def test_every_state_has_words_a_tone_and_a_sentence(finished):
    for state in (*get_args(RunState), "interrupted", "unreadable"):
        assert STATE_LABELS[state] and STATE_TONES[state]
    for state in (*get_args(RunState), "interrupted"):
        assert sentence(finished, state).endswith(".")
        assert sentence(RunSnapshot(), state).endswith(".")
    assert set(ACTIONS) <= {*get_args(RunState), "interrupted"}


def test_the_bar_of_a_running_run():
    bar = run_bar(
        fold(run_events(30, total=120, ended=None)), ShownRun("run-1", "Synthetic", is_running=True)
    )
    assert (bar["state"], bar["step"], bar["progress"]) == ("running", "30 of 120", 0.25)
    assert bar["left"] == "25 s"
    assert bar["actions"] == ["pause", "save", "change", "stop", "discard"]
    assert bar["title"] == "25 % Synthetic · Ramstream"
    assert bar["sentence"] == (
        "The GPU waits 8 % of the time for the CPU optimizer; other waits: weights in 4 %."
    )


def test_a_run_whose_process_is_gone_is_interrupted():
    snapshot = fold(run_events(50, total=120, ended=None))
    bar = run_bar(
        snapshot, ShownRun("run-1", "Synthetic", is_running=False, saved=SavedSteps(40, 40))
    )
    assert bar["state"] == "interrupted"
    assert bar["actions"] == ["resume"]
    assert "Resume continues from step 40." in bar["sentence"]
    assert (
        run_bar(fold(run_events(5)), ShownRun("run-1", "Synthetic", is_running=False))["state"]
        == "finished"
    )


def test_a_request_is_shown_until_it_is_taken():
    bar = run_bar(
        fold(run_events(5, total=9, ended=None)),
        ShownRun("run-1", "x", is_running=True, pending="stop"),
    )
    assert bar["actions"] == []
    assert bar["sentence"] == "Stop requested: finishing the step, then saving."


def test_the_ends_of_runs_are_told(finished):
    assert sentence(finished, "finished") == "Finished 120 steps in 29 s; answers right 2 % → 96 %."
    failed = fold(run_events(5, ended="failed"))
    assert sentence(failed, "failed") == "The disk is full: free 91 GiB and resume."


def test_preparing_tells_what_goes_on():
    snapshot = fold(
        [
            RunStarted(name="x"),
            StateChanged("preparing"),
            JobProgressed(job="load_model", done=1, total=4),
        ]
    )
    assert sentence(snapshot, "preparing") == "Loading the model 25 %."


def test_tiles_and_details(finished):
    shown = {tile["label"]: tile for tile in tiles(finished)}
    assert shown["RAM"]["value"] == in_bytes(100 * GIB + 120_000)
    assert shown["GPU memory"]["value"] == "43.0 GiB"
    assert "GPU memory" not in {tile["label"] for tile in tiles(fold(run_events(5, gpu=False)))}
    assert all(tile["value"] == "–" for tile in tiles(RunSnapshot()))
    assert shown["Compute, latest steps"]["note"].endswith(" of this machine’s top speed")
    assert "Loss" not in shown, "the curves say it"
    assert shown["Power"]["value"].endswith(" W")
    known = details(finished)
    assert ["Rows", "1,200"] in known["data"]
    assert ["Activation checkpointing", "full"] in known["plan"]
    assert known["facts"][0] == ["Model", "7.62B parameters in 3 units"]


def test_figures_are_said_in_words(finished):
    shown = summaries(finished)
    assert set(shown) == {*FIGURES} - {"preference"}  # which is for runs of pairs
    assert summaries(RunSnapshot()) == {}


def test_numbers_in_words():
    assert [in_bytes(v) for v in (0, 1536, 312 << 20, 1.5 * GIB, 200 * GIB)] == [
        "0 bytes",
        "1.50 KiB",
        "312 MiB",
        "1.50 GiB",
        "200 GiB",
    ]
    assert [in_time(v) for v in (-1, 45.4, 200, 7500, 270000)] == [
        "0 s",
        "45 s",
        "3 min 20 s",
        "2 h 5 min",
        "3 d 3 h",
    ]
    assert [in_count(v) for v in (948, 12345, 7.6156e9)] == ["948", "12.3k", "7.62B"]
    assert [in_share(v) for v in (0, 0.00001, 0.004, 0.031, 1)] == [
        "0 %",
        "< 0.1 %",
        "0.4 %",
        "3 %",
        "100 %",
    ]
    values = (None, float("nan"), 0.0, 1.2345678, 1.2e-5, 12345.6, 123456.0)
    assert [in_digits(value) for value in values] == [
        "–",
        "–",
        "0",
        "1.235",
        "1.2×10⁻⁵",
        "12346",
        "1.23×10⁵",
    ]


def test_one_or_two_points_have_no_line_through_them():
    modes = [
        curve("x", np.arange(count), np.arange(count), Line("#000", markers=True))["mode"]
        for count in (1, 2, 3)
    ]
    assert modes == ["markers", "markers", "lines+markers"]
    assert x_ticks("step", [{"x": [1, 3]}])["dtick"] == 1, "there is no half a step"
    assert "dtick" not in x_ticks("step", [{"x": [1, 300]}])
