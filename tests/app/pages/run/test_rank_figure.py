"""The timeline of a step that several ranks computed is drawn rank by rank, or for all of them."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest

from app.pages.run.rank_figure import ALL_RANKS, stretch_figure, timeline_part
from app.pages.run.spans import MAX_SPANS
from app.pages.run.step_time import PARTS
from app.pages.run.timeline_bars import WAITS
from app.pages.run.timeline_routes import timeline_routes
from app.session.session import Session
from app.verdict.step_shares import PART_LABELS, step_parts
from engine.config.settings import TrainConfig
from engine.planning.schedule.stalls import CAUSES
from engine.runs.record.event_tables import StepTable
from engine.runs.record.events import StepFinished, StepTimeline
from engine.runs.record.run_folder import create_run
from tests.support.routes import send
from tests.support.several_ranks import timeline_of_ranks
from tests.support.synthetic_run import records, span, timeline, write_events


@pytest.fixture(scope="module")
def step():
    return timeline_of_ranks(8, ranks=2)


def rows_of(part):
    return part["layout"]["yaxis"]["categoryarray"][::-1]


def starts_in(part, row):
    return [base for trace in part["data"] if trace["y"][:1] == [row] for base in trace["base"]]


def test_one_rank_is_drawn_with_its_own_times_alone(step):
    first, second = timeline_part(step), timeline_part(step, rank=1)
    assert (first["rank"], first["ranks"]) == (0, 2) and second["rank"] == 1
    assert (
        rows_of(first)
        == rows_of(second)
        == ["Weights in", "Compute", "Gradients out", "CPU optimizer", "Exchange"]
    )
    assert starts_in(first, "Exchange") == [1.0] and starts_in(second, "Exchange") == [-1.0]
    assert second["layout"]["xaxis"]["range"][0] < -2  # it began before rank 0
    for part in (first, second):
        legend = {entry["label"]: entry["about"] for entry in part["legend"]}
        assert legend["Wait: GPUs"] == "Compute waits 3 ms for the other GPUs"
        assert "Exchange" in legend
        assert part["caption"].startswith("Step 8: ")


def test_a_record_of_one_rank_is_drawn_as_ever():
    alone = timeline(8)
    assert timeline_part(alone, rank=5) == timeline_part(alone, rank=ALL_RANKS)
    part = timeline_part(alone)
    assert (part["rank"], part["ranks"]) == (0, 1)
    assert rows_of(part) == ["Weights in", "Compute", "Gradients out", "CPU optimizer"]
    assert timeline_part(None, rank=1)["ranks"] == 1


def test_all_ranks_share_an_axis(step):
    part = timeline_part(step, rank=ALL_RANKS)
    go.Figure({name: part[name] for name in ("data", "layout")})
    json.dumps(part, allow_nan=False)
    assert (part["rank"], part["ranks"]) == (ALL_RANKS, 2)
    assert rows_of(part) == ["0 Compute", "0 Exchange", "1 Compute", "1 Exchange"]
    assert starts_in(part, "0 Exchange") == [1.0] and starts_in(part, "1 Exchange") == [-1.0]
    for rank, begin in enumerate((1.0, -1.0)):
        (waits,) = [
            trace
            for trace in part["data"]
            if trace["name"] == "waiting: exchange" and trace["y"] == [f"{rank} Compute"]
        ]
        assert waits["base"] == [begin] and waits["x"] == [3.0]
    legend = {entry["label"]: entry["about"] for entry in part["legend"]}
    about = "Compute waits 6 ms for the other GPUs, on all ranks together"
    assert legend["Wait: GPUs"] == about
    assert "on 2 ranks" in part["caption"]
    assert part["is_whole"]
    assert not part["count"]


def test_many_ranks_have_as_many_bars_as_one_and_the_rest_in_a_stretch():
    spans = [
        span("a", "forward", "COMPUTE", k, k + 0.9) | ({"rank": rank} if rank else {})
        for rank in range(4)
        for k in range(MAX_SPANS)
    ]
    many = StepTimeline(1, spans)
    part = timeline_part(many, rank=ALL_RANKS)
    assert sum(len(trace["x"]) for trace in part["data"]) <= MAX_SPANS
    assert not part["is_whole"] and "zoom in for all" in part["count"]
    stretch = stretch_figure(many, None, (10.0, 15.5), ALL_RANKS)
    assert stretch["is_whole"] and rows_of(stretch) == rows_of(part)
    assert len(starts_in(stretch, "3 Compute")) == 6
    of_one = stretch_figure(many, None, (10.0, 15.5), 2)
    assert [len(trace["x"]) for trace in of_one["data"] if trace["name"] == "COMPUTE"] == [6]


def test_the_routes_take_a_rank(tmp_path, step):
    folder = create_run(
        tmp_path, TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})
    )
    write_events(folder.events_path, records([timeline(3), step], folder.id))
    routes = timeline_routes(Session(tmp_path))

    def asked(query):
        return send(routes, "GET", f"/api/runs/{folder.id}/timeline?{query}")

    for query, rank in (("step=8", 0), ("step=8&rank=1", 1), ("rank=all", -1), ("rank=7", 0)):
        answer = asked(query)
        assert answer.status_code == 200 and answer.json()["rank"] == rank, query
    assert asked("step=3&rank=1").json()["ranks"] == 1
    wrong = asked("rank=first")
    assert wrong.status_code == 404 and "neither the number of a rank nor all" in wrong.text
    stretch = send(routes, "GET", f"/api/runs/{folder.id}/stretch?step=8&rank=1&from=-1500&to=2000")
    assert starts_in(stretch.json(), "Exchange") == [-1.0]


def test_every_cause_of_a_wait_has_words_and_a_color():
    assert set(CAUSES.values()) | {"other"} == set(WAITS)
    assert set(WAITS) <= set(PART_LABELS) == set(PARTS)


def test_waits_for_other_ranks_are_a_part_of_the_step():
    table = StepTable()
    table.append(0.0, StepFinished(1, seconds=4.0, exposed={"exchange": 1.0, "h2d": 0.5}))
    parts = {name: float(values[0]) for name, values in step_parts(table).items()}
    assert parts["exchange"] == 1.0
    assert parts["compute"] == 2.5
    assert parts["other"] == 0
