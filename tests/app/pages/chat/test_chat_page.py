"""The chat and its routes are tested: which weights are in memory when, the history
of each side, stopping, and a paused run.
"""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from app.pages.chat.chat import Chat, Choice
from app.pages.chat.chat_routes import chat_routes
from app.session.engine_calls import EngineCalls
from app.session.jobs import Jobs
from app.session.offered_weights import OfferedWeights
from app.session.serving import Serving
from app.session.session import Session
from engine.errors import RunError
from engine.runs.record.events import PromptsAnswered, Record, StateChanged, StepFinished
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import open_run
from engine.runs.record.snapshot import PROMPT_ANSWERS, RunSnapshot
from engine.tools.chat.conversation import Sampling
from engine.tools.serve.answer_request import chat_request
from engine.tools.serve.answer_worker import at_once
from tests.support.fake_chat import FakeChatCalls
from tests.support.folders import make_config, make_model
from tests.support.routes import send, wait_for
from tests.support.trained_runs import execute, planes_on_disk


@pytest.fixture
def fake():
    return FakeChatCalls()


@pytest.fixture
def chat(tmp_path, fake, monkeypatch):
    """Returns a chat over one run with two checkpoints, whose weights are fake."""
    from engine.runs.record.run_folder import create_run

    session = Session(tmp_path / "runs")
    folder = create_run(session.runs_dir, make_config(tmp_path))
    for step in (10, 20):
        (folder.checkpoints_path / f"step-{step}").mkdir(parents=True)
    chat = Chat(session, fake)
    chat.run_id = folder.id
    yield chat
    chat.release()
    session.close()


def say(chat, message, weights="step-20", compare=True, system="", tokens=3, wait=True):
    chat.send(Choice(chat.run_id, weights), message, compare, system, Sampling(tokens))
    if wait:
        wait_for(lambda: not chat.state()["working"])
    return chat.state()


def test_a_run_whose_settings_cannot_be_read_hides_no_other(chat, tmp_path):
    from engine.runs.record.run_folder import create_run

    damaged = create_run(tmp_path / "runs", make_config(tmp_path))
    (damaged.checkpoints_path / "step-5").mkdir(parents=True)
    (damaged.path / "config.yaml").unlink()
    offered = OfferedWeights(chat._session, chat._engine).runs()
    assert [run["id"] for run in offered] == [chat.run_id]


def test_a_new_name_of_the_run_stands_above_its_answers(chat):
    before = say(chat, "first", compare=False)["turns"][-1]["answers"]["tuned"]["weights"]
    chat._session.describe(chat.run_id, "A new name", "")
    after = say(chat, "second", compare=False)["turns"][-1]["answers"]["tuned"]["weights"]
    assert after.startswith("A new name, ") and before.split(", ", 1)[1] == after.split(", ", 1)[1]


def texts(state):
    return [
        {side: answer["text"] for side, answer in turn["answers"].items()}
        for turn in state["turns"]
    ]


def test_both_answer_and_their_weights_stay_while_the_chat_goes_on(chat, fake):
    fake.slow = "Answers are slow."
    first = say(chat, "one")
    assert first["slow"] == "Answers are slow."
    assert texts(first) == [{"base": "abc", "tuned": "abc"}]
    assert fake.loaded == ["base", "checkpoint"]
    answers = first["turns"][0]["answers"]
    assert answers["base"]["weights"].startswith("Base model: ")
    assert answers["tuned"]["weights"] == "Tiny, step 20, the newest"
    assert answers["base"]["state"] == "done"
    assert answers["base"]["rate"].endswith("tokens/s")
    assert first["held"] == "2.00 MiB"
    say(chat, "two", system="be short")
    assert fake.loads == ["base", "checkpoint"]
    assert fake.heard[-1] == (
        "checkpoint",
        [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "abc"},
            {"role": "user", "content": "two"},
        ],
    )
    # Without the comparison, its weights are unloaded, and later its history lacks what only the
    # other side was asked.
    say(chat, "three", compare=False)
    assert fake.loaded == ["checkpoint"]
    say(chat, "four")
    base = next(messages for kind, messages in reversed(fake.heard) if kind == "base")
    assert [m["content"] for m in base if m["role"] == "user"] == ["one", "two", "four"]
    chat.release()
    assert not fake.loaded
    assert not chat.state()["loaded"] and not chat.state()["slow"]
    assert len(chat.state()["turns"]) == 4


def test_other_weights_begin_a_new_chat_and_replace_those_in_memory(chat, fake):
    say(chat, "one")
    state = say(chat, "two", weights="step-10")
    assert len(state["turns"]) == 1 and fake.loads == ["base", "checkpoint", "checkpoint"]
    assert fake.loaded == ["base", "checkpoint"]
    chat.new_chat()
    assert chat.state()["turns"] == [] and fake.loaded == ["base", "checkpoint"]


def test_what_does_not_fit_together_answers_one_after_the_other(chat, fake):
    fake.most = 1
    state = say(chat, "one")
    assert texts(state) == [{"base": "abc", "tuned": "abc"}]
    assert "one after the other" in state["note"]
    assert fake.loaded == ["checkpoint"]
    say(chat, "two")  # with one of them already in memory
    assert fake.loads == ["base", "checkpoint"] * 2
    fake.most = 0
    state = say(chat, "three")
    assert state["error"] == "It needs more RAM than is free." and not fake.loaded
    assert {answer["state"] for answer in state["turns"][-1]["answers"].values()} == {"stopped"}


def test_stop_ends_the_answer_and_keeps_what_was_written(chat, fake):
    fake.gate = threading.Semaphore(4)
    say(chat, "one", tokens=9, wait=False)
    wait_for(lambda: texts(chat.state()) == [{"base": "ab", "tuned": "ab"}])
    with pytest.raises(RunError, match="still running"):
        say(chat, "two")
    chat.stop()
    fake.gate.release()
    wait_for(lambda: not chat.state()["working"])
    answers = chat.state()["turns"][0]["answers"]
    assert {answer["state"] for answer in answers.values()} == {"stopped"}
    assert answers["base"]["text"].startswith("ab")
    assert chat.state()["error"] == ""


def test_a_side_that_cannot_be_asked_says_so_alone(chat, fake):
    answers = say(chat, "too long")["turns"][0]["answers"]
    assert {(answer["state"], answer["problem"]) for answer in answers.values()} == {
        ("failed", "The conversation is too long.")
    }


def test_weights_are_given_back_after_idle_time_and_before_a_run(chat, fake, monkeypatch):
    monkeypatch.setattr("app.pages.chat.chat.IDLE_SECONDS", 0.05)
    say(chat, "one")
    wait_for(lambda: not fake.loaded)
    monkeypatch.setattr("app.pages.chat.chat.IDLE_SECONDS", 600)
    say(chat, "two")
    assert fake.loaded
    chat._session._free_memory()
    assert not fake.loaded


def test_the_run_of_the_chat_stays_in_the_list_when_its_weights_are_gone(chat, tmp_path):
    from engine.runs.record.run_folder import create_run

    other = create_run(chat._session.runs_dir, make_config(tmp_path))
    say(chat, "one")
    for folder in (open_run(chat._session.runs_dir, chat.run_id), other):
        shutil.rmtree(folder.checkpoints_path, ignore_errors=True)
    (run,) = chat.choices()["runs"]
    assert (run["id"], run["weights"]) == (chat.run_id, [])


def test_weights_are_not_loaded_beside_a_run_that_is_being_prepared_elsewhere(chat, fake):
    folder = open_run(chat._session.runs_dir, chat.run_id)
    with folder.lock():
        with pytest.raises(RunError, match="^Tiny is starting and needs the memory. Try again"):
            say(chat, "one")
        choices = chat.choices()
        assert choices["busy"] == "Tiny is starting and needs the memory." and not choices["pause"]
        assert not chat.state()["turns"] and not fake.loads
        recorder = RunRecorder(folder.path, folder.id)
        recorder.emit(StateChanged(state="running"))
        recorder.close()
        chat._session._list.forget()
        assert texts(say(chat, "one")) == [{"base": "abc", "tuned": "abc"}]


def call(chat, method, path, body=None):
    return send(chat_routes(chat), method, path, body)


def test_routes_answer_with_the_chat_or_one_sentence(chat):
    (run,) = call(chat, "GET", "/api/chat/choices").json()["runs"]
    assert [weights["value"] for weights in run["weights"]] == ["step-20", "step-10"]
    choice = {"run_id": chat.run_id, "weights": "step-20"}
    body = {"choice": choice, "message": "one", "system": "", "compare": False, "max_new_tokens": 2}
    assert call(chat, "POST", "/api/chat/send", body).json() == {}
    wait_for(lambda: not chat.state()["working"])
    state = call(chat, "GET", "/api/chat").json()
    assert texts(state) == [{"tuned": "ab"}] and state["choice"] == choice | {"folder": ""}
    assert call(chat, "GET", f"/api/chat?since={state['version']}").json() == {
        "server": state["server"],
        "version": state["version"],
        "working": False,
    }
    # A page that has received a question is not sent the messages before it again.
    assert call(chat, "POST", "/api/chat/send", body | {"message": "two"}).json() == {}
    wait_for(lambda: not chat.state()["working"])
    whole = call(chat, "GET", f"/api/chat?since={state['version']}").json()
    assert whole["first"] == 0 and [turn["message"] for turn in whole["turns"]] == ["one", "two"]
    latest = call(chat, "GET", f"/api/chat?since={whole['version'] - 1}").json()
    assert latest["first"] == 1 and latest["turns"] == whole["turns"][1:]
    for name in ("stop", "new", "unload"):
        assert call(chat, "POST", f"/api/chat/{name}", {}).status_code == 200
    assert call(chat, "GET", "/api/chat").json()["turns"] == []


@pytest.mark.parametrize(
    "change, part",
    [
        ({"message": " "}, "The message is empty"),
        ({"message": "a" * 200_001}, "more than 200,000 characters"),
        ({"choice": {"run_id": "nobody", "weights": "step-1"}}, "This run does not exist"),
        ({"choice": {"folder": " "}}, "No folder is given"),
        ({"choice": {"folder": "/nowhere"}}, "not a folder on this machine"),
        ({"temperature": 9}, "temperature: 9 is not a number from 0 to 5"),
        ({"seed": -1}, "seed"),
        ({"choice": {}}, "run_id"),
        ({"system": None}, "system is missing"),
    ],
)
def test_bad_requests_are_one_sentence(chat, change, part):
    body = {
        "choice": {"run_id": chat.run_id, "weights": "step-20"},
        "message": "one",
        "system": "",
    } | change
    answer = call(chat, "POST", "/api/chat/send", body)
    assert answer.status_code == 409 and part in answer.json()["error"]


def test_weights_that_a_run_does_not_have_are_named(chat):
    with pytest.raises(RunError, match="has no such weights; it has Step 20, the newest, Step 10"):
        say(chat, "one", weights="step-15")


def test_a_job_that_is_cancelled_ends_where_it_looks():
    jobs, begun = Jobs(), threading.Event()

    def work(job):
        begun.set()
        while True:
            job.progress(1, 2)
            time.sleep(0.001)

    job = jobs.start("The work", work)
    assert begun.wait(10)
    job.cancel()
    wait_for(lambda: job.state != "working")
    assert job.to_dict()["state"] == "cancelled" and job.result == "The work was cancelled."
    jobs.start("Another", lambda job: "done")


def test_only_the_latest_answers_to_prompts_are_kept():
    snapshot = RunSnapshot()
    for step in range(PROMPT_ANSWERS + 30):
        snapshot.apply(Record("run", step + 1, 1.0, PromptsAnswered(step, [])))
    assert [event.step for event in snapshot.prompt_answers] == list(range(30, PROMPT_ANSWERS + 30))


# ---------------------------------------------------------------------- with the engine


def served_answer(model):
    return model.prompt_builder.text(
        list(model.answer([{"role": "user", "content": "say after one"}], Sampling(5)))
    )


def ask_beside(model, take):
    """Begins an answer, for whose end nobody waits."""
    message = {"role": "user", "content": "say after one"}
    asked = chat_request({"model": "Tiny", "messages": [message], "temperature": 0})
    model.ask(asked, model.prompts(asked), lambda place, drawn: take(drawn), at_once)


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_a_paused_run_is_chatted_with_beside_its_base_and_trains_on_with_the_same_bits(tmp_path):
    from engine.training.loop.run import start_run

    model = make_model(tmp_path / "model", "gpt2", resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.1)
    config = make_config(tmp_path, **{"model.source": str(model), "model.init": "random"})
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    started = []

    def start(config, runs_dir):
        run = start_run(config, runs_dir)
        run.recorder.subscribe(
            lambda record: (
                run.request("pause")
                if isinstance(record.event, StepFinished) and record.event.step == 3
                else None
            )
        )
        run.recorder.subscribe(
            lambda record: (
                states.append(record.event.state)
                if isinstance(record.event, StateChanged)
                else None
            )
        )
        started.append(run)
        return run

    states: list[str] = []
    session = Session(tmp_path / "runs", EngineCalls(start_run=start))
    serving = Serving(session)
    chat = Chat(session, serving=serving)
    chat.run_id = session.start(config)
    choices = chat.choices()
    assert choices["pause"] == chat.run_id  # it is still being prepared
    assert (chat.run_id, []) in [(run["id"], run["weights"]) for run in choices["runs"]]
    with pytest.raises(RunError, match="is training. Pause it first"):
        say(chat, "too early", weights="current")
    with pytest.raises(RunError, match="is training. Pause it first"):
        serving.start(chat.run_id)
    wait_for(lambda: "paused" in states, 60)
    label = chat.choices()["runs"][0]["weights"][0]
    assert (
        not chat.choices()["busy"]
        and label["value"] == "current"
        and label["label"].startswith("Now, paused after step ")
    )
    state = say(chat, "say after one", weights="current", tokens=5)
    assert not state["error"] and len(state["loaded"]) == 2
    assert {answer["state"] for answer in state["turns"][0]["answers"].values()} == {"done"}

    # Programs are answered by the same weights, and Chat has theirs from then on.
    job = serving.start(chat.run_id)
    wait_for(lambda: job.state != "working", 60)
    assert job.state == "done" and not chat.state()["loaded"]
    name = serving.served().name
    wait_for(lambda: serving.model(f"{name}-base") is not None, 60)
    assert served_answer(serving.model(name)) == state["turns"][0]["answers"]["tuned"]["text"]
    lent = say(chat, "say after one", weights="current", tokens=5)
    assert lent["held"] == "" and len(lent["loaded"]) == 2
    assert texts(lent)[-1] == texts(state)[0]

    model, drawn = serving.model(name), []
    ask_beside(model, drawn.append)
    say(chat, "say after two", weights="current", tokens=60, wait=False)
    session.request(chat.run_id, "resume")
    wait_for(lambda: session.active_id is None, 60)
    assert not chat.state()["loaded"] and not chat.state()["working"]
    assert isinstance(drawn[-1], RunError) or drawn[-1].finish is not None
    with pytest.raises(RunError, match="no longer served"):
        served_answer(model)
    assert serving.served() is None
    assert serving.state()["note"].startswith(f"{name} is no longer served")
    assert session.runs() and started[0].recorder.snapshot.state == "finished"
    assert planes_on_disk(started[0]) == planes_on_disk(whole)
    ours, theirs = started[0].recorder.snapshot.steps, whole.recorder.snapshot.steps
    assert ours.loss == theirs.loss and ours.grad_norm == theirs.grad_norm
    session.close()
