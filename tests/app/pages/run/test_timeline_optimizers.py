"""Optimizers on the device have rows in the timeline, and predicted times are shown next to
measured ones.
"""

from __future__ import annotations

import json
from itertools import pairwise

import plotly.graph_objects as go
import pytest

from app.labels import in_step_time
from app.pages.run.run_figures import summaries
from app.pages.run.run_overview import details
from app.pages.run.spans import MAX_SPANS, lanes_of
from app.pages.run.timeline_bars import LANE_LABELS, OP_COLORS, OP_GROUPS, OP_LABELS
from app.pages.run.timeline_figure import timeline_figure, timeline_legend, timeline_text
from app.shared.theme import DARK, LIGHT
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import DISK_LANES, Lane
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.simulate import simulate
from engine.planning.schedule.stalls import as_records
from engine.runs.record.events import PlanBuilt, RunStarted, StepFinished, StepTimeline
from tests.support import folded
from tests.support.synthetic_run import records, span

ROWS = [Lane.H2D, Lane.STATES_IN, Lane.COMPUTE, Lane.UPDATE, Lane.D2H, Lane.STATES_OUT, Lane.HOST]
ROW_WORDS = [
    "Weights in",
    "States in",
    "Compute",
    "GPU optimizer",
    "Gradients out",
    "States out",
    "CPU optimizer",
]
ON_GPU = {Lane.GRADIENTS_OUT}
"""It has ops only in plans whose gradients are kept on the GPU."""
DISK = set(DISK_LANES)
"""They have ops only in plans with moments on the disk."""
RANKS = {Lane.COLLECTIVE}
"""It has ops only in plans of several ranks."""
STATES_OPS = ("fetch_states", "fetch_gradient", "offload_weights", "offload_states")


def fold(*events):
    return folded.fold(records([RunStarted(), *events]))


def spans_of(homes=("embed", "block 2"), blocks=4, micro_batches=2, **others):
    """Returns a step as the engine records it, for a plan whose ops take a millisecond each."""
    names = [f"block {k}" for k in range(blocks)]
    numel = dict.fromkeys(["embed", *names, "head"], 1000) | {"embed": 2500}
    choices = PlanChoices().changed(
        micro_batches=micro_batches,
        device_updated_units=homes,
        update_buffers=2,
        **others,
    )
    plan = build_step_plan(names, False, choices, PlaneSizes(numel=numel))
    starts = simulate(plan, lambda op: 0.001).starts
    return as_records([Span(op, start, start + 0.001) for op, start in zip(plan.ops, starts)])


@pytest.fixture(scope="module")
def step():
    return StepTimeline(step=1, spans=spans_of())


# ------------------------------------------------------------------ rows, colors, words


def test_every_lane_with_spans_has_a_row(step):
    figure = timeline_figure(step)
    go.Figure(figure)
    json.dumps(figure, allow_nan=False)
    assert set(ROWS) | ON_GPU | DISK | RANKS == set(Lane) == set(LANE_LABELS)
    assert [trace["name"] for trace in figure["data"]] == [*ROWS, "waiting"]
    assert (
        figure["layout"]["yaxis"]["categoryarray"] == ROW_WORDS[::-1]
    )  # Plotly draws the first at the bottom
    for trace, words in zip(figure["data"], [*ROW_WORDS, "Compute"]):
        assert trace["x"] and set(trace["y"]) == {words}


@pytest.mark.parametrize(
    "there",
    [
        dict(disk_offloaded_units=2),
        dict(disk_offloaded_block_inputs=3, offloaded_block_inputs=True),
    ],
    ids=str,
)
def test_the_disk_has_rows_where_something_is_there(there):
    timeline = StepTimeline(step=1, spans=spans_of((), **there))
    figure = timeline_figure(timeline)
    rows = figure["layout"]["yaxis"]["categoryarray"][::-1]
    assert rows == [
        "Weights in",
        "Compute",
        "Gradients out",
        "CPU optimizer",
        "Disk read",
        "Disk write",
    ]
    assert "Disk" in [entry["label"] for entry in timeline_legend(timeline)]


def test_ranks_have_a_row_for_what_they_exchange():
    timeline = StepTimeline(step=1, spans=spans_of((), ranks=2))
    figure = timeline_figure(timeline)
    rows = figure["layout"]["yaxis"]["categoryarray"][::-1]
    assert rows == ["Weights in", "Compute", "Gradients out", "CPU optimizer", "Exchange"]
    assert "Exchange" in [entry["label"] for entry in timeline_legend(timeline)]
    assert all(trace["x"] for trace in figure["data"] if trace["name"] == Lane.COLLECTIVE)


def test_lanes_without_spans_have_no_row():
    without = timeline_figure(StepTimeline(step=1, spans=spans_of(homes=())))
    assert [trace["name"] for trace in without["data"]] == [
        Lane.H2D,
        Lane.COMPUTE,
        Lane.D2H,
        Lane.HOST,
        "waiting",
    ]
    assert without["layout"]["yaxis"]["categoryarray"] == [
        "CPU optimizer",
        "Gradients out",
        "Compute",
        "Weights in",
    ]
    some = timeline_figure(
        StepTimeline(step=1, spans=[span("a", "device_update", Lane.UPDATE, 0, 1)])
    )
    assert some["layout"]["yaxis"]["categoryarray"] == [
        "CPU optimizer",
        "Gradients out",
        "GPU optimizer",
        "Compute",
        "Weights in",
    ]
    assert timeline_figure(None)["layout"]["yaxis"]["categoryarray"] == [
        "CPU optimizer",
        "Gradients out",
        "Compute",
        "Weights in",
    ]


def test_states_have_a_color_of_their_own_and_the_update_the_optimizer_s(step):
    shown = {
        trace["name"]: set(trace["marker"]["color"]) for trace in timeline_figure(step)["data"][:-1]
    }
    states = OP_COLORS["fetch_states"]
    assert shown[Lane.STATES_IN] == shown[Lane.STATES_OUT] == {states}
    assert shown[Lane.UPDATE] == {OP_COLORS["update"]}
    assert states not in {
        color for label, (color, _) in OP_GROUPS.items() if label != "States in and out"
    }
    assert all(_contrast(states, theme["card"]) >= 3 for theme in (LIGHT, DARK))
    legend = colors_of(timeline_legend(step))
    assert legend["States in and out"] == states
    assert legend["Optimizer"] == OP_COLORS["device_update"]
    assert "States in and out" not in colors_of(
        timeline_legend(StepTimeline(step=1, spans=spans_of(())))
    )


def colors_of(legend):
    return {entry["label"]: entry["color"] for entry in legend}


def _contrast(one, other):
    def luminance(color):
        parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_ops_are_named_in_words(step):
    shown = {trace["name"]: trace["customdata"] for trace in timeline_figure(step)["data"][:-1]}
    assert {words.split(": ")[1] for words in shown[Lane.STATES_IN]} == {
        "optimizer states in",
        "gradient in",
    }
    assert set(shown[Lane.UPDATE]) == {
        "embed: optimizer on the GPU",
        "block 2: optimizer on the GPU",
    }
    assert {words.split(": ")[1] for words in shown[Lane.STATES_OUT]} == {
        "updated weights out",
        "optimizer states out",
    }
    assert shown[Lane.HOST][-1] == "step: everything updated is in RAM"
    assert {*STATES_OPS, "device_update", "optimizer_step"} <= set(OP_LABELS)


def test_the_sentence_counts_compute_alone():
    spans = [
        span("a", "forward", Lane.COMPUTE, 0, 6),
        span("a", "fetch_states", Lane.STATES_IN, 0, 3),
        span("a", "device_update", Lane.UPDATE, 6, 7),
        span("a", "offload_states", Lane.STATES_OUT, 7, 8),
    ]
    assert timeline_text(StepTimeline(step=9, spans=spans)) == "Step 9: 8.00 s · busy 75 %"


# ------------------------------------------------------------------ merging


@pytest.mark.parametrize("limit", [MAX_SPANS, 100, 7])
def test_seven_lanes_are_merged_within_the_limit(limit):
    spans = spans_of(
        homes=("embed", *(f"block {k}" for k in range(60)), "head"), blocks=60, micro_batches=20
    )
    assert len(spans) > 2 * MAX_SPANS
    merged = lanes_of(spans, limit)
    assert list(merged) == ROWS and sum(map(len, merged.values())) <= limit
    for lane, own in merged.items():
        before = [s for s in spans if s["lane"] == lane]
        assert own[0]["start"] == min(s["start"] for s in before)
        assert max(s["end"] for s in own) == max(s["end"] for s in before)
        assert sum(s["count"] for s in own) == len(before)
        assert all(a["start"] <= b["start"] for a, b in pairwise(own))


def test_merged_states_say_how_many_ops_they_are():
    spans = [
        span(f"block {k}", "fetch_states", Lane.STATES_IN, 0.001 * k, 0.001 * k + 0.0005)
        for k in range(2 * MAX_SPANS)
    ]
    figure = timeline_figure(StepTimeline(step=1, spans=spans))
    row = {trace["name"]: trace for trace in figure["data"]}[Lane.STATES_IN]
    assert len(row["x"]) <= MAX_SPANS
    first = row["customdata"][0]
    assert first.startswith("block 0 to block ")
    assert first.endswith("ops, mostly optimizer states in")
    assert set(row["marker"]["color"]) == {OP_COLORS["fetch_states"]}


# ------------------------------------------------------------------ predicted and measured


def test_the_prediction_stands_beside_the_measurement():
    steps = [
        StepFinished(step=k, seconds=seconds, tokens_per_second=151_000 / seconds)
        for k, seconds in ((1, 30.0), (2, 11.7), (3, 11.6))
    ]
    rate = f"Median of the run: {151_000 / 11.7:,.0f} tokens/s"
    predicted = fold(PlanBuilt(choices={"predicted_seconds": 11.46}), *steps)
    assert summaries(predicted)["throughput"] == f"{rate} · 11.7 s a step, predicted 11.5 s"
    assert ["Predicted seconds", "11.46"] in details(predicted)["plan"]
    for choices in ({}, {"predicted_seconds": None}):
        assert summaries(fold(PlanBuilt(choices=choices), *steps))["throughput"] == rate
    assert "throughput" not in summaries(fold(PlanBuilt(choices={"predicted_seconds": 11.46})))


def test_step_times_keep_their_fractions():
    assert [in_step_time(s) for s in (0.034, 2.413, 11.7, 99.94, 99.96, 125)] == [
        "0.034 s",
        "2.41 s",
        "11.7 s",
        "99.9 s",
        "1 min 40 s",
        "2 min 5 s",
    ]
