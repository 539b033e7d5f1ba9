"""Which weights are served when: names, memory, other jobs, and runs that need the machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.session.serving import Serving, UnknownModel
from app.session.session import Session
from engine.errors import FitError, RunError
from engine.runs.record.run_folder import create_run
from tests.support.fake_chat import FakeChatCalls
from tests.support.folders import make_config
from tests.support.routes import wait_for


@pytest.fixture
def fake():
    return FakeChatCalls()


@pytest.fixture
def serving(tmp_path, fake):
    """Serving of a run with a checkpoint, whose weights are fake."""
    session = Session(tmp_path / "runs")
    folder = create_run(session.runs_dir, make_config(tmp_path))
    (folder.checkpoints_path / "step-10").mkdir(parents=True)
    serving = Serving(session, fake)
    yield SimpleNamespace(all=serving, session=session, run_id=folder.id)
    serving.stop()
    session.close()


def start(serving):
    job = serving.all.start(serving.run_id)
    wait_for(lambda: job.state != "working")
    return job


def loaded(serving, name):
    """The weights of a name, once they are in memory."""
    wait_for(lambda: serving.all.model(name) is not None)
    return serving.all.model(name)


def test_a_run_is_served_under_its_name_and_its_base_is_loaded_when_it_is_asked_for(serving, fake):
    with pytest.raises(UnknownModel, match="No model is served here"):
        serving.all.model("Tiny")
    fake.slow = "Answers are slow."
    assert start(serving).state == "done"
    assert serving.all.state()["slow"] == "Answers are slow."
    assert serving.all.state()["models"] == ["Tiny", "Tiny-base"]
    assert fake.loads == ["checkpoint"]
    with pytest.raises(RunError, match="Tiny is served; stop serving it first"):
        serving.session.delete(serving.run_id)
    trained = serving.all.model("Tiny")
    assert trained is serving.all.model(serving.run_id)
    base = loaded(serving, "Tiny-base")
    assert base is not trained and fake.loads == ["checkpoint", "base"]
    assert base is loaded(serving, f"{serving.run_id}-base")
    with pytest.raises(UnknownModel, match="there are Tiny and Tiny-base"):
        serving.all.model("tiny")
    serving.all.stop()
    assert fake.loaded == [] and serving.all.state()["run_id"] is None


def test_weights_that_do_not_fit_together_take_turns_once_answers_are_over(serving, fake):
    fake.most = 1
    start(serving)
    trained = serving.all.model("Tiny")
    trained.asked = 1
    assert serving.all.model("Tiny-base") is None
    wait_for(lambda: serving.all.model("Tiny") is None)  # it takes no further answers
    assert fake.loaded == ["checkpoint"] and not trained.is_closed
    trained.asked = 0
    loaded(serving, "Tiny-base")
    assert trained.is_closed and fake.loaded == ["base"]
    loaded(serving, "Tiny")
    assert fake.loaded == ["checkpoint"]


def test_weights_that_fit_not_even_alone_are_refused_and_the_next_request_tries_again(
    serving, fake
):
    start(serving)
    room, fake.fit_together = fake.fit_together, refuse
    with pytest.raises(RunError, match="too large"):
        wait_for(lambda: serving.all.model("Tiny-base"))
    fake.fit_together = room
    loaded(serving, "Tiny-base")


def refuse(sources):
    raise FitError("It is too large.")


def test_a_run_without_weights_is_refused(serving, tmp_path):
    folder = create_run(serving.session.runs_dir, make_config(tmp_path))
    with pytest.raises(RunError, match="has no saved weights yet; save a checkpoint first"):
        serving.all.start(folder.id)


def test_whether_any_can_be_served_is_known_before_it_is_asked_for(serving, monkeypatch):
    assert serving.all.state()["refused"] == ""
    monkeypatch.setattr(Session, "active_id", property(lambda _: serving.run_id))
    refused = "Tiny is training. Pause it first, or wait until it ends."
    assert serving.all.state()["refused"] == refused
    with pytest.raises(RunError, match=refused):
        serving.all.start(serving.run_id)


def test_a_load_that_fails_serves_nothing(serving, fake):
    fake.fit_together = refuse
    assert start(serving).error == "It is too large." and serving.all.served() is None


def test_another_job_goes_first(serving, fake):
    start(serving)
    going = serving.session.jobs.start("An export", lambda job: wait_for(lambda: fake.most == 8))
    assert serving.all.model("Tiny-base") is None and fake.loads == ["checkpoint"]
    fake.most = 8
    wait_for(lambda: going.state != "working")
    loaded(serving, "Tiny-base")


def test_a_run_that_begins_has_the_memory(serving, fake):
    freed = []
    serving.all.call_before_changes(lambda: freed.append(list(fake.loaded)))
    start(serving)
    serving.session._free_memory()
    assert fake.loaded == [] and freed[-1] == ["checkpoint"]
    state = serving.all.state()
    assert state["run_id"] is None
    assert state["note"] == "Tiny is no longer served, since a run needs the memory."


def test_chat_is_lent_what_is_served(serving):
    start(serving)
    served = serving.all.served()
    lent = serving.all.lend(served.sources["tuned"])
    lent.close()
    assert lent.held_bytes == 0 and not serving.all.model("Tiny").is_closed
    assert serving.all.lend(served.sources["base"]) is None
    serving.all.stop()
    assert serving.all.lend(served.sources["tuned"]) is None
