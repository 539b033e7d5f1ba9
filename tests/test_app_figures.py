from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from app.figures import FIGURES, summaries
from app.timeline import MAX_SPANS, OP_GROUPS, lanes_of, timeline_figure, waits_of
from app.view import ACTIONS, MAX_POINTS, details, diagnosis, downsample, run_bar, sentence, smooth, tiles
from app.words import STATE_TONES, STATE_WORDS, in_bytes, in_count, in_digits, in_share, in_time
from engine.events import RUN_STATES, JobProgressed, RunStarted, StateChanged, StepFinished, StepTimeline
from engine.plan import COMPUTE, D2H, H2D, HOST
from engine.snapshot import RunSnapshot
from tests.synthetic_run import GIB, records, run_events, span, timeline


def fold(events):
    snapshot = RunSnapshot()
    for record in records(events):
        snapshot.apply(record)
    return snapshot


@pytest.fixture(scope="module")
def finished():
    return fold(run_events(120))


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize("axis", ["step", "time"])
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("gpu", [True, False])
def test_figures_are_what_plotly_draws(name, axis, gpu):
    for snapshot in (RunSnapshot(), fold(run_events(3, gpu=gpu)), fold(run_events(3000, gpu=gpu))):
        figure = FIGURES[name](snapshot, axis)
        go.Figure(figure)
        json.dumps(figure, allow_nan=False)
        assert all(len(trace["x"]) == len(trace["y"]) <= MAX_POINTS for trace in figure["data"])
        assert figure["layout"]["uirevision"] == "kept"


def test_curves_carry_the_recorded_numbers(finished):
    loss = FIGURES["loss"](finished, "step")["data"]
    assert loss[0]["x"] == list(finished.steps.step)
    assert loss[0]["y"] == pytest.approx(list(finished.steps.loss), rel=1e-4)
    assert loss[2]["x"] == [40, 80, 120]
    memory = {trace["name"]: trace for trace in FIGURES["memory"](finished, "step")["data"]}
    assert memory["allocated"]["y"][-1] == 40 and memory["limit"]["y"][-1] == 139
    assert "allocated" not in str(FIGURES["memory"](fold(run_events(5, gpu=False)), "step"))


def test_the_time_axis_starts_with_the_run(finished):
    x = FIGURES["loss"](finished, "time")["data"][0]["x"]
    assert x == sorted(x) and 0 < x[0] < 2000
    assert x[-1] == pytest.approx(1000 * (finished.steps.time[-1] - finished.started_time), abs=1)


def test_all_curves_share_one_axis(finished):
    for axis in ("step", "time"):
        axes = [FIGURES[name](finished, axis)["layout"]["xaxis"] for name in FIGURES]
        assert all(a.get("type") == axes[0].get("type") and a["title"] == axes[0]["title"] for a in axes)


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


# ------------------------------------------------------------------ timeline


def test_the_timeline_has_a_trace_a_lane_and_shows_waits(finished):
    figure = timeline_figure(finished)
    go.Figure(figure)
    json.dumps(figure, allow_nan=False)
    assert [trace["name"] for trace in figure["data"]] == [H2D, COMPUTE, D2H, HOST, "waiting"]
    compute = figure["data"][1]
    assert compute["base"][0] == 4 and compute["x"][0] == pytest.approx(6)
    assert compute["customdata"][0] == "block.0: forward"
    assert len(set(compute["marker"]["color"])) == 3
    waiting = figure["data"][-1]
    assert waiting["base"] == [0] and waiting["x"] == [4]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["Host", "D2H", "Compute", "H2D"]
    assert timeline_figure(RunSnapshot())["data"][0]["x"] == []


def test_a_unit_name_is_text_in_the_timeline():
    snapshot = fold([RunStarted(), StepTimeline(step=1, spans=[span("<b>x", "forward", "COMPUTE", 0, 1)])])
    assert timeline_figure(snapshot)["data"][1]["customdata"] == ["&lt;b&gt;x: forward"]


def test_many_spans_are_merged_without_moving_time():
    spans = timeline(1, blocks=100, micro_batches=20).spans
    assert len(spans) > 2 * MAX_SPANS
    merged = lanes_of(spans)
    assert sum(map(len, merged.values())) <= MAX_SPANS
    for lane, own in merged.items():
        before = [s for s in spans if s["lane"] == lane]
        assert min(s["start"] for s in own) == min(s["start"] for s in before)
        assert max(s["end"] for s in own) == max(s["end"] for s in before)
        assert sum(s["count"] for s in own) == len(before)
        assert all(a["start"] <= b["start"] for a, b in zip(own, own[1:]))


def test_few_spans_stay_as_they_are():
    spans = timeline(1, blocks=10).spans
    assert sum(len(own) for own in lanes_of(spans).values()) == len(spans)


def test_waits_are_the_gaps_of_the_compute_lane():
    busy = [span("a", "forward", "COMPUTE", 1, 2), span("b", "forward", "COMPUTE", 2.001, 3), span("c", "x", "", 5, 6)]
    assert waits_of(busy, 6) == [(0.0, 1), (3, 5)]


def test_every_op_of_a_plan_has_a_colour():
    from engine.plan import Op

    kinds = [line.split()[0] for line in Op.__doc__.splitlines() if line.startswith("      ")]
    assert len(kinds) > 10
    assert set(kinds) <= {op for _, ops in OP_GROUPS.values() for op in ops}


# ------------------------------------------------------------------ the run bar and the words


def test_every_state_has_words_a_tone_and_a_sentence(finished):
    for state in (*RUN_STATES, "interrupted", "unreadable"):
        assert STATE_WORDS[state] and STATE_TONES[state]
    for state in (*RUN_STATES, "interrupted"):
        assert sentence(finished, state).endswith(".") and sentence(RunSnapshot(), state).endswith(".")
    assert set(ACTIONS) <= {*RUN_STATES, "interrupted"}


def test_the_bar_of_a_running_run():
    bar = run_bar(fold(run_events(30, total=120, ended=None)), "run-1", "Synthetic", is_running=True)
    assert (bar["state"], bar["step"], bar["progress"]) == ("running", "30 of 120", 0.25)
    assert bar["left"] == "22 s"
    assert bar["actions"] == ["pause", "save", "stop", "discard"]
    assert bar["title"] == "25 % Synthetic · Ramstream"
    assert bar["sentence"] == "Compute waits 12 % of the time: 8 % for the optimizer, 4 % for weights coming in (H2D)."


def test_a_run_whose_process_is_gone_is_interrupted():
    snapshot = fold(run_events(50, total=120, ended=None))
    bar = run_bar(snapshot, "run-1", "Synthetic", is_running=False)
    assert bar["state"] == "interrupted" and bar["actions"] == ["resume"] and "Resume continues from step 40." in bar["sentence"]
    assert run_bar(fold(run_events(5)), "run-1", "Synthetic", is_running=False)["state"] == "finished"


def test_a_request_is_shown_until_it_is_taken():
    bar = run_bar(fold(run_events(5, total=9, ended=None)), "run-1", "x", is_running=True, pending="stop")
    assert bar["actions"] == [] and bar["sentence"] == "Stop requested: finishing the step, then saving."


def test_the_ends_of_runs_are_told(finished):
    assert sentence(finished, "finished") == "Finished 120 steps in 27 s; held-out exact match 2 % → 96 %."
    failed = fold(run_events(5, ended="failed"))
    assert sentence(failed, "failed") == "The disk is full: free 91 GiB and resume."


def test_preparing_tells_what_goes_on():
    snapshot = fold([RunStarted(name="x"), StateChanged("preparing"), JobProgressed(job="load_model", done=1, total=4)])
    assert sentence(snapshot, "preparing") == "Loading the model 25 %."


def test_compute_bound_is_said():
    quick = StepFinished(step=1, seconds=1.0, exposed={"h2d": 0.03})
    assert diagnosis(fold([quick])) == "Compute-bound: only 3 % of the time is spent waiting."
    assert diagnosis(RunSnapshot()) == "The first step is under way."


def test_tiles_and_details(finished):
    shown = {tile["label"]: tile for tile in tiles(finished)}
    assert shown["Host memory"]["value"] == in_bytes(100 * GIB + 120_000)
    assert shown["GPU memory"]["value"] == "43.0 GiB"
    assert "GPU memory" not in {tile["label"] for tile in tiles(fold(run_events(5, gpu=False)))}
    assert all(tile["value"] == "–" for tile in tiles(RunSnapshot()))
    known = details(finished)
    assert known["answers"]["scores"] == {"before": "1 of 50 (2 %)", "after": "48 of 50 (96 %)"}
    assert known["answers"]["rows"] == [{"prompt": "2+2=", "expected": "4", "before": "q", "after": "4"}]
    assert ["Rows", "1,200"] in known["data"] and ["Save level", "boundary"] in known["plan"]
    assert known["facts"][0] == ["Model", "7.62B parameters in 3 units"]
    assert len(known["files"]) == 4
    assert details(RunSnapshot())["answers"] is None


def test_figures_are_said_in_words(finished):
    said = summaries(finished)
    assert set(said) == {*FIGURES, "timeline"}
    assert said["timeline"].startswith("step 120, ")
    assert summaries(RunSnapshot()) == {}


def test_numbers_in_words():
    assert [in_bytes(v) for v in (0, 1536, 312 << 20, 1.5 * GIB, 200 * GIB)] == ["0 bytes", "1.50 KiB", "312 MiB",
                                                                              "1.50 GiB", "200 GiB"]
    assert [in_time(v) for v in (-1, 45.4, 200, 7500, 270000)] == ["0 s", "45 s", "3 min 20 s", "2 h 5 min", "3 d 3 h"]
    assert [in_count(v) for v in (948, 12345, 7.6156e9)] == ["948", "12.3k", "7.62B"]
    assert [in_share(v) for v in (0, 0.00001, 0.004, 0.031, 1)] == ["0 %", "< 0.1 %", "0.4 %", "3 %", "100 %"]
    assert [in_digits(v) for v in (None, float("nan"), 0.0, 1.2345678, 1.2e-5, 123456.0)] == ["–", "–", "0", "1.235",
                                                                                            "1.2e-5", "1.23e5"]
