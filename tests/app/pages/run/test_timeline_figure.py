"""The timeline of a step is drawn with a bounded number of spans, with its phases, its waits by
cause, and the prediction.
"""

from __future__ import annotations

import json
from itertools import pairwise

import plotly.graph_objects as go
import pytest

from app.pages.run.rank_figure import timeline_part
from app.pages.run.spans import MAX_PHASES, MAX_SPANS, gaps_of, lanes_of, phases_of
from app.pages.run.timeline_bars import MAX_WAITS, OP_GROUPS
from app.pages.run.timeline_figure import (
    MAX_BOXES,
    timeline_figure,
    timeline_legend,
    timeline_phases,
    timeline_text,
)
from app.pages.run.timeline_routes import timeline_routes
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.planning.schedule.ops import Lane, OpKind
from engine.runs.record.events import PlanSimulated, StepTimeline
from engine.runs.record.run_folder import create_run
from tests.support.routes import send
from tests.support.synthetic_run import records, span, timeline, write_events


def traces(figure):
    return {trace["name"]: trace for trace in figure["data"]}


def ghosts(figure):
    return [shape for shape in figure["layout"]["shapes"] if shape["name"] == "predicted"]


@pytest.fixture(scope="module")
def step():
    return timeline(120)


# ------------------------------------------------------------------ lanes


def test_a_trace_a_lane(step):
    figure = timeline_figure(step)
    go.Figure(figure)
    json.dumps(figure, allow_nan=False)
    assert [trace["name"] for trace in figure["data"]] == [
        Lane.H2D,
        Lane.COMPUTE,
        Lane.D2H,
        Lane.HOST,
        "waiting: h2d",
    ]
    compute = figure["data"][1]
    assert compute["base"][0] == 4 and compute["x"][0] == pytest.approx(6)
    assert compute["customdata"][0] == "block 0: forward"
    assert compute["text"][0] == "0" and compute["textposition"] == "none"
    # A recompute has the color of backward.
    assert len(set(compute["marker"]["color"])) == 2
    assert figure["layout"]["yaxis"]["categoryarray"] == [
        "CPU optimizer",
        "Gradients out",
        "Compute",
        "Weights in",
    ]


def test_nothing_sampled_is_said_in_place():
    part = timeline_part(None)
    go.Figure({name: part[name] for name in ("data", "layout")})
    assert part["step"] is None
    assert part["legend"] == []
    assert part["caption"] == ""
    assert ghosts(part) == []
    assert "first sampled step" in part["layout"]["annotations"][0]["text"]


def test_neighbors_of_one_op_differ_in_tone():
    spans = [
        span("a", op, Lane.COMPUTE, k, k + 1)
        for k, op in enumerate(["forward", "forward", "forward", "backward"])
    ]
    assert timeline_figure(StepTimeline(1, spans))["data"][1]["marker"]["opacity"] == [
        1,
        pytest.approx(0.74),
        1,
        1,
    ]


def test_a_unit_name_is_text():
    figure = timeline_figure(StepTimeline(1, [span("<b>x", "forward", Lane.COMPUTE, 0, 1)]))
    assert figure["data"][1]["customdata"] == ["&lt;b&gt;x: forward"]


def test_micro_batches_are_counted_where_there_are_several():
    spans = [span("a", "forward", Lane.COMPUTE, k, k + 1, micro_batch=k) for k in range(3)]
    assert (
        timeline_figure(StepTimeline(1, spans))["data"][1]["customdata"][1]
        == "a: forward, micro-batch 2 of 3"
    )
    assert timeline_figure(StepTimeline(1, spans[:1]))["data"][1]["customdata"] == ["a: forward"]


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
        assert all(a["start"] <= b["start"] for a, b in pairwise(own))


def test_few_spans_stay_as_they_are():
    spans = timeline(1, blocks=10).spans
    assert sum(len(own) for own in lanes_of(spans).values()) == len(spans)


def test_every_op_of_a_plan_has_a_color():
    assert set(OpKind) <= {op for _, ops in OP_GROUPS.values() for op in ops}


# ------------------------------------------------------------------ a stretch of the step


@pytest.fixture(scope="module")
def many():
    """Returns a timeline with 9,800 spans and one wait."""
    return timeline(1, blocks=400, micro_batches=7)


def bars(figure, lanes=(Lane.H2D, Lane.COMPUTE, Lane.D2H, Lane.HOST)):
    return sum(len(trace["x"]) for trace in figure["data"] if trace["name"] in lanes)


def test_a_step_of_many_spans_says_how_many_of_them_are_shown(many, step):
    figure = timeline_figure(many)
    assert not figure["is_whole"] and bars(figure) <= MAX_SPANS < len(many.spans)
    assert (
        figure["count"]
        == f"Showing {bars(figure):,} of {len(many.spans):,} spans; zoom in for all."
    )
    assert timeline_figure(step)["is_whole"] and timeline_figure(step)["count"] == ""
    assert timeline_figure(None)["is_whole"]


def test_a_stretch_has_every_one_of_its_spans_on_the_same_axes(many):
    simulated = PlanSimulated(1.0, many.spans)
    whole, (begin, end) = timeline_figure(many, simulated), (3.0, 3.4)
    shown = [s for s in many.spans if s["end"] >= begin and s["start"] <= end]
    figure = timeline_figure(many, simulated, (begin, end))
    go.Figure({name: figure[name] for name in ("data", "layout")})
    assert figure["is_whole"] and bars(figure) == len(shown) < MAX_SPANS
    assert figure["count"] == f"Showing all {len(shown):,} spans of this stretch."
    for axis in ("xaxis", "yaxis"):
        assert figure["layout"][axis] == whole["layout"][axis]
    compute = traces(figure)[Lane.COMPUTE]
    assert compute["base"] == [
        pytest.approx(1000 * s["start"]) for s in shown if s["lane"] == Lane.COMPUTE
    ]
    assert all(words.endswith("predicted") for words in compute["customdata"])
    assert [shape["name"] for shape in figure["layout"]["shapes"]].count("phase") == [
        shape["name"] for shape in whole["layout"]["shapes"]
    ].count("phase")


def test_a_stretch_of_too_many_spans_is_merged_more_finely_than_the_step(many):
    half = max(s["end"] for s in many.spans) / 2
    figure, whole = timeline_figure(many, None, (0.0, half)), timeline_figure(many)
    assert not figure["is_whole"] and bars(figure) <= MAX_SPANS
    in_half = sum(base <= 1000 * half for trace in whole["data"][:4] for base in trace["base"])
    assert bars(figure) > 1.2 * in_half
    assert "of 4," in figure["count"] or "of 5," in figure["count"]


def test_a_stretch_keeps_lanes_and_waits_that_reach_into_it():
    spans = [
        span("a", "forward", Lane.COMPUTE, 0, 1),
        span("a", "device_update", Lane.UPDATE, 6, 7),
        span("b", "forward", Lane.COMPUTE, 3, 4),
    ]
    waits = [
        {"start": 1.0, "end": 3.0, "cause": "h2d"},
        {"start": 5, "end": 6, "cause": "optimizer"},
    ]
    figure = timeline_figure(StepTimeline(1, spans, waits), None, (2.0, 2.5))
    assert figure["layout"]["yaxis"]["categoryarray"] == [
        "CPU optimizer",
        "Gradients out",
        "GPU optimizer",
        "Compute",
        "Weights in",
    ]
    assert bars(figure) == 0
    assert [trace["name"] for trace in figure["data"] if trace["x"]] == ["waiting: h2d"]
    unknown = timeline_figure(StepTimeline(1, spans), None, (0.5, 3.5))
    assert (traces(unknown)["waiting"]["base"], traces(unknown)["waiting"]["x"]) == ([1000], [2000])


def test_the_routes_of_a_step_and_of_a_stretch(tmp_path, many):
    session = Session(tmp_path)
    folder = create_run(
        tmp_path,
        TrainConfig.from_dict({"name": "a", "model": {"source": "m"}, "data": {"source": "d"}}),
    )
    write_events(folder.events_path, records([many, timeline(2)], folder.id))

    def get(path):
        return send(timeline_routes(session), "GET", f"/api/runs/{folder.id}/{path}")

    assert get("timeline").json()["step"] == 2
    assert get("timeline?step=1").json()["count"].startswith("Showing")
    figure = get("stretch?step=1&from=3000000&to=3400000").json()
    assert figure == json.loads(json.dumps(timeline_figure(many, None, (3.0, 3.4))))
    assert get("stretch?step=2&from=-5000&to=5000").json()["is_whole"]
    for query, shown in (
        ("", "from: '' is not a number"),
        ("&from=1", "to: '' is not"),
        ("&from=x&to=2", "from: 'x'"),
        ("&from=1.5&to=2", "1.5"),
        ("&from=2&to=2", "ends before it begins"),
    ):
        answer = get(f"stretch?step=1{query}")
        assert answer.status_code == 404 and shown in answer.json()["error"]
    assert "nearest one" in get("stretch?step=9&from=1&to=2").json()["error"]


# ------------------------------------------------------------------ waits


def test_waits_are_drawn_by_cause_and_added_up_in_the_legend():
    waits = [
        {"start": -0.5, "end": 0.0, "cause": "optimizer"},
        {"start": 1.0, "end": 1.25, "cause": "h2d"},
        {"start": 2.0, "end": 2.5, "cause": "optimizer"},
        {"start": 3, "end": 3.125, "cause": "of a newer version"},
    ]
    step = StepTimeline(
        1,
        [span("a", "forward", Lane.COMPUTE, 0, 1), span("b", "forward", Lane.COMPUTE, 1.25, 4)],
        waits,
    )
    figure = timeline_figure(step)
    go.Figure(figure)
    found = {
        name: list(zip(trace["base"], trace["x"]))
        for name, trace in traces(figure).items()
        if name.startswith("waiting")
    }
    assert found == {
        "waiting: h2d": [(1000, 250)],
        "waiting: optimizer": [(-500, 500), (2000, 500)],
        "waiting: other": [(3000, 125)],
    }
    assert figure["layout"]["xaxis"]["range"][0] < -500, (
        "what was waited for before the step's first op is seen"
    )
    waits_named = [entry for entry in timeline_legend(step) if entry["kind"] == "wait"]
    assert {entry["label"]: entry["about"] for entry in waits_named} == {
        "Wait: optimizer": "Compute waits 1.00 s for the optimizer",
        "Wait: weights": "Compute waits 250 ms for weights",
        "Wait: other": "Compute waits 125 ms for other work",
    }
    shown = [entry for entry in timeline_legend(step) if entry["is_main"]]
    assert [(entry["label"], entry["about"]) for entry in shown] == [
        ("Compute: forward", ""),
        ("Wait", "Compute waits 1.38 s in all"),
    ], "the rows name the other colors"
    assert timeline_text(step) == "Step 1: 4.00 s · busy 94 %"


def test_an_older_record_shows_gaps_without_a_cause(step):
    figure = timeline_figure(StepTimeline(step.step, step.spans))
    waiting = traces(figure)["waiting"]
    assert waiting["base"] == [0]
    assert waiting["x"] == [4]
    assert "pattern" not in waiting["marker"]
    assert "Wait" in [
        entry["label"] for entry in timeline_legend(StepTimeline(step.step, step.spans))
    ]


def test_the_longest_waits_are_drawn_of_very_many():
    waits = [
        {"start": float(k), "end": k + (0.5 if k % 2 else 0.1), "cause": "h2d"}
        for k in range(2 * MAX_WAITS)
    ]
    shown = traces(
        timeline_figure(StepTimeline(1, [span("a", "forward", Lane.COMPUTE, 0, 1)], waits))
    )["waiting: h2d"]
    assert shown["x"] == [500] * MAX_WAITS and shown["base"] == sorted(shown["base"])


def test_gaps_are_between_the_spans_of_compute():
    busy = [
        span("a", "forward", Lane.COMPUTE, 1, 2),
        span("b", "forward", Lane.COMPUTE, 2.001, 3),
        span("c", "x", "", 5, 6),
    ]
    assert gaps_of(busy, 6) == [(0.0, 1), (3, 5)]


# ------------------------------------------------------------------ phases


def of_ops(*ops):
    return [span("a", op, Lane.COMPUTE, k, k + 0.5) for k, op in enumerate(ops)]


def test_phases_follow_the_ops_of_compute():
    spans = of_ops("embed", "forward", "loss", "backward", "reduce", "embed_backward", "summary")
    spans.append(span("a", "update", Lane.HOST, 6, 8))
    assert [(p.name, p.label, p.start, p.end) for p in phases_of(spans)] == [
        ("Forward", "Forward", 0, 2),
        ("Loss", "Loss", 2, 3),
        ("Backward", "Backward", 3, 6.5),
        ("Updates", "Updates", 6.5, 8),
    ]


def test_rounds_are_counted():
    labels = [p.label for p in phases_of(2 * of_ops("forward"))]
    assert labels == ["Forward"]
    ops = ["embed", "forward", "loss", "backward", "reduce"] * 3
    phases = phases_of(of_ops(*ops))
    assert [p.label for p in phases][:4] == [
        "Forward, round 1 of 3",
        "Loss, round 1 of 3",
        "Backward, round 1 of 3",
        "Forward, round 2 of 3",
    ]
    assert all(a.end == b.start for a, b in pairwise(phases))
    band = timeline_phases(StepTimeline(1, of_ops(*ops)))
    assert band[3] == {
        "label": "Forward, round 2 of 3: 2.00 s",
        "short": "Forward 2/3",
        "color": "#2f9e6e",
        "start": 5000,
        "end": 7000,
    }


def test_phases_are_bounded_and_none_without_compute():
    many = phases_of(of_ops(*["forward", "loss", "backward"] * MAX_PHASES))
    assert len(many) == MAX_PHASES and many == sorted(many, key=lambda phase: phase.start)
    assert phases_of([span("a", "prefetch", Lane.H2D, 0, 1)]) == [] and phases_of([]) == []


# ------------------------------------------------------------------ the prediction


def test_the_prediction_is_one_path_a_lane_and_in_the_words_of_each_span(step):
    simulated = PlanSimulated(
        0.1, [dict(s, end=s["start"] + 0.5 * (s["end"] - s["start"])) for s in step.spans]
    )
    figure = timeline_figure(step, simulated)
    go.Figure(figure)
    assert len(ghosts(figure)) == 4 and all(shape["type"] == "path" for shape in ghosts(figure))
    compute = ghosts(figure)[1]["path"]
    boxes = [box.split("H") for box in compute.split("Z")[:-1]]
    assert boxes[0][0].startswith("M4,0.") or boxes[0][0].startswith("M4,1."), (
        "begins with the first forward, at 4 ms"
    )
    assert len(boxes) == sum(s["lane"] == Lane.COMPUTE for s in step.spans)
    assert boxes[0][1].split("V")[0] == "7"
    rows = figure["layout"]["yaxis"]["categoryarray"]
    heights = [float(shape["path"].split(",")[1].split("H")[0]) for shape in ghosts(figure)]
    assert all(
        abs(height - rows.index(row)) < 0.5
        for height, row in zip(heights, ["Weights in", "Compute", "Gradients out", "CPU optimizer"])
    )
    assert traces(figure)[Lane.COMPUTE]["customdata"][0] == "block 0: forward<br>3 ms predicted"
    assert timeline_legend(step, simulated)[-1] == {
        "label": "Predicted",
        "color": "#8a93a3",
        "kind": "predicted",
        "about": "",
        "is_main": True,
    }
    assert ghosts(timeline_figure(step)) == []


def test_a_prediction_of_another_plan_names_no_span(step):
    simulated = PlanSimulated(0.1, step.spans[:-1])
    figure = timeline_figure(step, simulated)
    assert len(ghosts(figure)) == 4
    assert not any(
        "predicted" in words for trace in figure["data"] for words in trace.get("customdata", [])
    )


def test_the_prediction_is_bounded():
    spans = timeline(1, blocks=100, micro_batches=20).spans
    figure = timeline_figure(timeline(1), PlanSimulated(1.0, spans))
    assert sum(shape["path"].count("M") for shape in ghosts(figure)) <= MAX_BOXES
