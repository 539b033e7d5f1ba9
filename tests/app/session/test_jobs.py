"""Long work reports its progress in words and can be ended at each stage without leaving anything
half done.
"""

from __future__ import annotations

import threading
import time

import pytest

from app.pages.chat.chat import Chat, Choice
from app.pages.frame.job_routes import job_routes
from app.session.jobs import BYTES, Cancelled, Job, Jobs
from app.session.session import Session
from engine.errors import RunError
from engine.runtime.host.host_states import HostStates
from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import Sampling, checkpoint_of
from engine.training.export.export import export_run
from engine.training.loop.run import start_run
from tests.support.fake_chat import FakeChatCalls
from tests.support.folders import make_config
from tests.support.routes import send, wait_for

GIB = 1 << 30


def endless(job):
    while True:
        job.progress(1, 4, "Working")
        time.sleep(0.002)


def ask(jobs, method, path, body=None):
    return send(job_routes(jobs), method, path, body)


# ---------------------------------------------------------------------- what is told


def test_progress_in_words_and_the_time_that_is_left():
    job = Job(1, "The export of x", unit=BYTES)
    assert (job.to_dict()["amount"], job.to_dict()["left"]) == ("", "")
    job.progress(GIB, 4 * GIB, "Reading the checkpoint")
    assert job.to_dict()["amount"] == "1.00 GiB of 4.00 GiB" and job.to_dict()["left"] == "", (
        "it has only begun"
    )
    job._begun -= 20
    assert 59 <= job.seconds_left() <= 61 and job.to_dict()["left"].startswith("about ")
    job.progress(0, 2 * GIB, "Writing the model")
    assert job.seconds_left() is None and job.text == "Writing the model", (
        "another stage has a time of its own"
    )
    plain = Job(2, "The work")
    plain.progress(1, 3)
    assert plain.to_dict()["amount"] == "33 %"


def test_jobs_are_listed_asked_for_and_cancelled_by_requests():
    jobs = Jobs()
    job = jobs.start("The work", endless, about="run-1")
    wait_for(lambda: job.text)
    (listed,) = ask(jobs, "GET", "/api/jobs").json()["jobs"]
    assert (listed["title"], listed["about"], listed["amount"], listed["cancelling"]) == (
        "The work",
        "run-1",
        "25 %",
        False,
    )
    assert ask(jobs, "POST", f"/api/jobs/{job.id}/cancel", {}).status_code == 200
    wait_for(lambda: job.state != "working")
    found = ask(jobs, "GET", f"/api/jobs/{job.id}").json()
    assert (found["state"], found["result"], found["error"]) == (
        "cancelled",
        "The work was cancelled.",
        "",
    )
    assert ask(jobs, "GET", "/api/jobs").json()["jobs"] == []
    assert ask(jobs, "POST", f"/api/jobs/{job.id}/cancel", {}).json()["state"] == "cancelled", (
        "twice is once"
    )
    for method, path in (
        ("GET", "/api/jobs/99"),
        ("POST", "/api/jobs/99/cancel"),
        ("POST", "/api/jobs/x/cancel"),
    ):
        answer = ask(jobs, method, path, {})
        assert answer.status_code in (404, 409) and "There is no such job" in answer.json()["error"]


def test_a_failure_is_one_sentence_and_the_next_job_may_begin():
    jobs = Jobs()

    def work(job):
        raise RunError("There is no room.")

    job = jobs.start("The work", work)
    wait_for(lambda: job.state == "failed")
    assert job.to_dict()["error"] == "There is no room."
    jobs.start("Another", lambda job: "Done.")


def test_work_that_gets_no_thread_is_refused_and_the_next_may_begin(monkeypatch):
    jobs = Jobs()

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RunError, match="The work cannot be started"):
            jobs.start("The work", lambda job: "")
    assert not jobs.working()
    jobs.close()
    job = jobs.start("Another", lambda job: "Done.")
    wait_for(lambda: job.state == "done")


def test_a_server_that_ends_cancels_what_is_under_way():
    jobs, cleaned = Jobs(), threading.Event()

    def work(job):
        try:
            endless(job)
        finally:
            cleaned.set()

    job = jobs.start("The work", work)
    jobs.close()
    assert cleaned.is_set() and job.state == "cancelled"


# ---------------------------------------------------------------------- cancelled at each stage


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of runs and a run with checkpoints."""
    folder = tmp_path_factory.mktemp("jobs")
    run = start_run(make_config(folder), folder / "runs")
    assert run.execute().state == "finished"
    return folder / "runs", run.id


def stages_of(run, target):
    """Returns every progress call of an export."""
    calls = []
    export_run(
        run[0], run[1], target, progress=lambda done, total, text: calls.append((text, done, total))
    )
    return calls


def test_an_export_tells_what_it_reads_and_writes(run, tmp_path):
    calls = stages_of(run, tmp_path / "model")
    assert list(dict.fromkeys(text for text, _, _ in calls)) == [
        "Reading the checkpoint",
        "Writing the model",
    ]
    assert all(done <= total for _, done, total in calls) and calls[-1][1] == calls[-1][2] > 0


def test_an_export_that_is_cancelled_at_any_moment_leaves_nothing(run, tmp_path):
    for last in range(len(stages_of(run, tmp_path / "whole"))):
        calls = iter(range(last))

        def progress(*_):
            if next(calls, None) is None:
                raise Cancelled

        place = tmp_path / f"cancelled-{last}"
        with pytest.raises(Cancelled):
            export_run(run[0], run[1], place / "deep" / "model", progress=progress)
        assert not place.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


def test_an_export_into_an_empty_folder_leaves_that_folder_when_it_is_cancelled(run, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()

    def progress(done, total, text):
        if (
            text == "Writing the model" and done == total
        ):  # everything is written but not yet moved into place
            raise Cancelled

    with pytest.raises(Cancelled):
        export_run(run[0], run[1], target, progress=progress)
    assert list(tmp_path.iterdir()) == [target] and not any(target.iterdir())


def test_loading_that_is_cancelled_gives_its_memory_back(run, tmp_path, monkeypatch):
    closed, close = [], HostStates.close

    def noted(store):
        close(store)
        closed.append(store.ram.nbytes)

    monkeypatch.setattr(HostStates, "close", noted)
    config = make_config(run[0].parent)

    def progress(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        load(checkpoint_of(run[0], run[1], config, None, "Its weights"), progress)
    assert closed == [0]


class SlowChatCalls(FakeChatCalls):
    """A `SlowChatCalls` loads the second model until it is cancelled."""

    def load(self, source, progress):
        while self.loaded:
            progress(1, 4)
            time.sleep(0.002)
        return super().load(source, progress)


def test_a_chat_that_is_cancelled_while_it_loads_keeps_no_weights(tmp_path):
    from engine.runs.record.run_folder import create_run

    session, fake = Session(tmp_path / "runs"), SlowChatCalls()
    folder = create_run(session.runs_dir, make_config(tmp_path))
    (folder.checkpoints_path / "step-10").mkdir(parents=True)
    chat = Chat(session, fake)
    chat.send(Choice(folder.id, "step-10"), "hello", True, "", Sampling(3))
    wait_for(lambda: (chat.state()["job"] or {}).get("amount") == "25 %")
    state = chat.state()
    assert state["loaded"] and state["job"]["text"].startswith("Loading the weights: ")
    assert state["job_id"] == state["job"]["id"]
    assert ask(session.jobs, "POST", f"/api/jobs/{state['job_id']}/cancel", {}).status_code == 200
    wait_for(lambda: not chat.state()["working"])
    state = chat.state()
    assert not fake.loaded
    assert not state["loaded"]
    assert state["job"] is None
    assert not state["error"]
    assert {answer["state"] for answer in state["turns"][0]["answers"].values()} == {"stopped"}
    assert session.jobs.find(1).state == "cancelled"
    session.close()
