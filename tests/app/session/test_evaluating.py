"""Evaluate as the page asks for it: the job, what is kept when it is cancelled, votes on answers
whose side nobody is told, and the rows that the page shows. The run is small and really trained.
"""

from __future__ import annotations

import threading
import time

import pytest

from app.session.jobs import Cancelled, Job
from app.session.session import Session
from engine.runs.summaries.benchmark_results import append_benchmarks
from engine.runs.summaries.evaluation_results import (
    EVALUATIONS_FILE,
    Began,
    LossMeasured,
    Wanted,
    append_evaluation,
    read_evaluations,
)
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.measured import SEVERAL, measured
from tests.support.routes import wait_for
from tests.support.sessions import FakeEngine, finished_run, get, post

ASKED = {
    "validation": True,
    "answers": 3,
    "blind": True,
    "tasks": [],
    "own": "",
    "limit": 0,
    "chat": False,
    "programs": False,
    "weights": "",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with 16 validation rows."""
    place = tmp_path_factory.mktemp("evaluating")
    run = start_run(make_config(place, **{"data.eval_fraction": 0.4}), place / "runs")
    assert run.execute().state == "finished"
    return run.folder


@pytest.fixture
def session(trained):
    session = Session(trained.path.parent)
    yield session
    session.close()
    session.jobs.close()
    (trained.path / EVALUATIONS_FILE).unlink(missing_ok=True)


def evaluation_of(session, folder):
    return get(session, f"/api/runs/{folder.id}/evaluation").json()


def start(session, folder, **changed):
    """Starts the job by its route, and returns it once it is over."""
    answer = post(session, f"/api/runs/{folder.id}/evaluate", ASKED | changed)
    assert answer.status_code == 200, answer.text
    job = session.jobs.find(answer.json()["id"])
    wait_for(lambda: job.state != "working", 60)
    return job


def test_what_is_done_is_kept_when_it_is_cancelled_and_the_rest_is_done_then(
    session, trained, monkeypatch
):
    before = evaluation_of(session, trained)
    assert before["figures"] == [] and before["answers"] is None
    form = before["form"]
    assert (form["rows"], form["goes_on"], form["chosen"]["validation"]) == (16, False, True)
    assert [one["value"] for one in form["weights"]] == ["best"]  # the newest are the same

    progress = Job.progress

    def cancelled(job, done, total, text=""):
        if text.startswith("Trained"):
            raise Cancelled
        progress(job, done, total, text)

    freed = []
    session.call_for_memory(lambda: freed.append(True))  # as Chat does
    with monkeypatch.context() as patch:
        patch.setattr(Job, "progress", cancelled)
        job = start(session, trained)
    assert freed == [True]
    assert (job.state, job.result) == ("cancelled", "The evaluation of Tiny was cancelled.")
    shown = evaluation_of(session, trained)
    assert shown["unfinished"].startswith("3 of 6 parts are done.")
    assert shown["form"]["goes_on"] and shown["form"]["chosen"]["count"] == 3
    assert [(row["name"], row["trained"]) for row in shown["figures"]] == [
        ("Validation loss", "–"),
        ("Answers right", "–"),
    ]

    assert start(session, trained).result == "Evaluated Tiny."
    (found,) = read_evaluations(trained.path).found
    assert found.is_over
    shown = evaluation_of(session, trained)
    loss = shown["figures"][0]
    assert (loss["tone"], loss["word"], loss["about"]) == ("good", "better", "16 rows")
    assert loss["difference"].startswith("−") and loss["interval"].startswith("−")
    assert shown["unfinished"] == "" and shown["caption"].startswith("Best model, step ")

    def row():
        return get(session, "/api/runs?sort=evaluated_loss").json()["runs"][0]["evaluated"]

    wait_for(lambda: "→" in row()["loss"])  # a thread reads it
    assert row()["loss"].split(" → ") == [loss["base"], loss["trained"]]


def test_votes_are_counted_and_the_sides_are_told_after_the_last(session, trained):
    start(session, trained, validation=False)
    found = read_evaluations(trained.path).latest
    answers = {side: one.answers for side, one in found.answered.items()}
    shown = evaluation_of(session, trained)["answers"]
    assert shown["is_hidden"] and "base" not in shown["rows"][0]
    votes = {"base": 0, "trained": 0}
    for number, row in enumerate(shown["rows"]):
        assert {row["left"], row["right"]} == {side[number].answer for side in answers.values()}
        assert row["is_open"]
        side = "trained" if row["left"] == answers["trained"][number].answer else "base"
        votes[side] += 1
        vote = {"evaluation": shown["id"], "prompt": number, "place": "left"}
        now = post(session, f"/api/runs/{trained.id}/evaluation/vote", vote).json()["answers"]
        assert now["is_hidden"] == (number < 2)
    sentence = now["sentence"]
    for side, words in (("trained", "the trained model"), ("base", "the base model")):
        times = {1: "once", 2: "twice"}.get(votes[side], f"{votes[side]} times")
        assert f"{words} {times}" in sentence
    assert "neither 0 times" in sentence
    assert {row["preferred"] for row in now["rows"]} <= {"base", "trained"}
    again = post(session, f"/api/runs/{trained.id}/evaluation/vote", vote)
    assert again.status_code == 409 and "not voted on any more" in again.json()["error"]


def test_a_run_that_begins_ends_the_evaluation(session, trained, monkeypatch):
    def endless(job, *_):
        while not job.is_cancelled:
            time.sleep(0.002)
        raise Cancelled

    monkeypatch.setattr(Job, "progress", endless)
    answer = post(session, f"/api/runs/{trained.id}/evaluate", ASKED)
    job = session.jobs.find(answer.json()["id"])
    shown = evaluation_of(session, trained)
    assert shown["job"]["id"] == job.id and not shown["form"]["goes_on"]
    session._free_memory()
    assert job.state == "cancelled"


def test_a_paused_run_lends_its_weights_and_goes_on_at_once(tmp_path, monkeypatch):
    """Resume ends the evaluation, whichever side is asked, and what is done is kept."""
    session = Session(tmp_path / "runs")
    steps = {"train.steps": 2000, "train.warmup_steps": 1, "output.eval_every": 0}
    run_id = session.start(make_config(tmp_path, **steps, **{"data.eval_fraction": 0.4}))
    followed = session.follow(run_id)

    def is_in(state):
        followed.read()
        return followed.snapshot.state == state

    wait_for(lambda: is_in("running") and followed.snapshot.step > 0, 60)
    session.request(run_id, "pause")
    wait_for(lambda: is_in("paused"))
    shown = evaluation_of(session, followed.folder)
    assert shown["form"]["can_evaluate"] and not shown["form"]["weights"] and not shown["why_not"]
    assert start(session, followed.folder, answers=1).state == "done"
    found = read_evaluations(followed.folder.path).latest
    assert (found.began.weights, found.began.step) == ("last", followed.snapshot.step)

    progress = Job.progress
    for side in ("Base model: answers", "Trained: validation"):
        reached = threading.Event()

        def slow(job, done, total, text="", side=side, reached=reached):
            if text.startswith(side):
                reached.set()
                time.sleep(0.02)
            progress(job, done, total, text)

        with monkeypatch.context() as patch:
            patch.setattr(Job, "progress", slow)
            answer = post(session, f"/api/runs/{run_id}/evaluate", ASKED | {"answers": 0})
            job = session.jobs.find(answer.json()["id"])
            assert reached.wait(30)
            session.request(run_id, "resume")
            wait_for(lambda: is_in("running"))
            assert job.state in ("cancelled", "failed"), "its memory is free before the run goes on"
        session.request(run_id, "pause")
        wait_for(lambda: is_in("paused"))
    session.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"validation": False, "answers": 0}, "Nothing is chosen"),
        ({"answers": "3"}, "is not a number"),
        ({"weights": "worst"}, "There are no such weights"),
        ({"own": "/nowhere/task.yaml"}, "There is no task file /nowhere/task.yaml"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(session, trained, changed, words):
    answer = post(session, f"/api/runs/{trained.id}/evaluate", ASKED | changed)
    assert answer.status_code == 409 and words in answer.json()["error"]


def test_a_run_that_trains_here_is_not_disturbed(tmp_path):
    engine = FakeEngine()
    session = Session(tmp_path / "runs", engine.calls())
    other = finished_run(session)
    session.start(make_config(tmp_path))
    shown = evaluation_of(session, other)
    assert shown["why_not"] == "Tiny is training. Pause it first, or wait until it ends."
    answer = post(session, f"/api/runs/{other.id}/evaluate", ASKED)
    assert answer.status_code == 409 and shown["why_not"] in answer.json()["error"]
    session.close()


def test_results_of_tasks_are_rows_with_how_they_were_asked(tmp_path):
    session = Session(tmp_path / "runs", FakeEngine().calls())
    folder = finished_run(session)
    append_benchmarks(folder.path, SEVERAL)
    shown = evaluation_of(session, folder)
    names = [f"{one.task}: {one.metric}" for one in SEVERAL]
    assert sorted(row["name"] for row in shown["figures"]) == sorted(names)
    assert shown["caption"] == ""  # each row says of which weights it is
    huge = [1e308, -1e308] * 8
    odd = {"time": 1e300, "step": -(10**18), "weights": "base"}
    values = {"values": tuple(huge), "value": 1e308, "error": None}
    append_benchmarks(folder.path, [measured("odd", **values)])
    append_benchmarks(folder.path, [measured("odd", weights="base", step=None, **values)])
    append_evaluation(
        folder.path,
        Began("one", Wanted(answers=-3), dtype="", rows="", **odd),
        *(
            LossMeasured("one", side, loss, [loss / 2, *huge], [10**18] * 17)
            for side, loss in (("base", 1e308), ("trained", -1e308))
        ),
    )
    shown = evaluation_of(session, folder)
    assert [row["name"] for row in shown["figures"]][:2] == ["Validation loss", "arc_easy: acc"]
    assert "odd: acc" in [row["name"] for row in shown["figures"]]
    (folder.path / EVALUATIONS_FILE).write_bytes(b"\xff\n{}\n")
    shown = evaluation_of(session, folder)
    assert shown["problem"] == f"2 lines of {EVALUATIONS_FILE} are damaged and left out."
    assert shown["form"]["can_evaluate"] is False
    session.close()
