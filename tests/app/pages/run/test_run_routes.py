"""The Runs tab is tested through its routes: the list, a run's name and details, deletion and
export.
"""

from __future__ import annotations

import csv
import io
import shlex
import shutil
import threading
import time
import zipfile
from pathlib import Path
from urllib.parse import urlencode

import pytest

from app.pages.run.export_details import export_details
from app.pages.run.settings_in_words import settings_in_words
from app.session import run_list as run_list_module
from app.session.session import Session
from app.shared.run_table import Asked
from engine.config.export_choice import ExportChoice
from engine.errors import RunError
from engine.runs.record.events import ExactMatchMeasured, StateChanged
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run, open_run
from engine.runs.summaries.about import write_about
from engine.runs.summaries.exports import EXPORTS_FILE, NotedExport, note_export
from tests.support.folded import fold, fold_of
from tests.support.routes import wait_for
from tests.support.sessions import CONFIG, at_once, finished_run, get, post
from tests.support.synthetic_run import run_events

# ------------------------------------------------------------------ the list


def test_the_list_of_runs(session):
    folder = finished_run(session, name="<b>bold</b>")
    listed = get(session, "/api/runs").json()["runs"]
    assert [run["id"] for run in listed] == [folder.id]
    assert listed[0]["name"] == "<b>bold</b>" and listed[0]["state"] == "finished"


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_row_knows_the_export_that_is_deleted_with_its_run(session, file):
    plain, exported = finished_run(session), finished_run(session)
    exported.export_path.mkdir()
    (exported.export_path / file).write_text("{}", encoding="utf-8")
    rows = get(session, "/api/runs").json()["runs"]
    assert {row["id"]: row["has_export"] for row in rows} == {plain.id: False, exported.id: True}


@pytest.mark.parametrize("body", [[], {"command": 3}, {}, {"command": "explode"}])
def test_wrong_requests_are_refused_in_a_sentence(session, body):
    folder = finished_run(session)
    answer = post(session, f"/api/runs/{folder.id}/control", body)
    assert answer.status_code == 409 and answer.json()["error"]


def test_many_who_ask_at_once_have_the_runs_read_once(session, monkeypatch):
    finished_run(session)
    reads, read = [], run_list_module.summarize

    def slowly(folder):
        reads.append(folder.id)
        time.sleep(0.05)
        return read(folder)

    monkeypatch.setattr(run_list_module, "summarize", slowly)
    monkeypatch.setattr(run_list_module, "LIST_SECONDS", 60.0)
    answers = at_once(10, lambda number: session.runs_to_show(Asked()))
    assert {len(answer.shown) for answer in answers} == {1} and len(reads) == 1
    monkeypatch.setattr(run_list_module, "saved_steps", None)
    assert session.runs_to_show(Asked()).shown[0].weights.can_chat is False, (
        "nothing of a run is looked up outside the list that is kept"
    )
    session._list.forget()
    monkeypatch.undo()
    finished_run(session)
    assert len(session.runs()) == 2


def test_a_run_is_read_again_only_if_its_folder_has_changed(session, monkeypatch):
    one, two = (finished_run(session) for _ in range(2))
    reads, read = [], run_list_module.summarize

    def counted(folder):
        reads.append(folder.id)
        return read(folder)

    monkeypatch.setattr(run_list_module, "summarize", counted)

    def read_now():
        reads.clear()
        session._list.forget()
        session.runs()
        return set(reads)

    assert read_now() == {one.id, two.id} and read_now() == set()
    write_about(one, "Another name", "")
    assert read_now() == {one.id} and read_now() == set()
    (two.checkpoints_path / "step-40").mkdir(parents=True)
    assert read_now() == {two.id}
    with one.lock():
        assert read_now() == {one.id}, "it is under way now"
    assert read_now() == {one.id} and read_now() == set()


def test_runs_are_searched_filtered_and_sorted(session):
    first, second, third = (
        finished_run(session, name=name) for name in ("Alpha one", "Beta", "Alpha two")
    )
    write_about(second, "Beta", "the good one", ["keep", "rank 8"])
    (third.path / "events.jsonl").unlink()

    def asked(**query):
        answer = get(session, f"/api/runs?{urlencode(query)}").json()
        assert answer["total"] == 3 and answer["found"] >= len(answer["runs"])
        return [row["name"] for row in answer["runs"]]

    session._list.forget()
    assert asked() == asked(sort="no order") == asked(limit=0)
    assert sorted(asked(search="ALPHA")) == ["Alpha one", "Alpha two"]
    assert asked(search="good beta") == asked(tag="keep") == asked(search="rank") == ["Beta"]
    assert asked(search="nothing like it") == [] and asked(tag="no tag") == []
    assert set(asked(state="finished")) == {"Alpha one", "Beta"}
    assert asked(sort="name") == ["Alpha one", "Alpha two", "Beta"]
    assert asked(sort="name", turned="true") == ["Beta", "Alpha two", "Alpha one"]
    pinned = asked(sort="name", pinned=f"nobody,{third.id},{second.id}")
    assert pinned == ["Alpha two", "Beta", "Alpha one"]
    assert asked(sort="name", pinned=third.id, search="beta") == ["Beta"]
    assert len(asked(limit=2)) == 2
    answer = get(session, "/api/runs?sort=size").json()
    assert [tag["value"] for tag in answer["tags"]] == ["keep", "rank 8"]
    assert {state["value"] for state in answer["states"]} == {"finished", "interrupted"}
    assert {row["id"] for row in answer["runs"]} == {first.id, second.id, third.id}
    (row,) = (row for row in answer["runs"] if row["id"] == first.id)
    assert len(row["curve"]) == 40
    assert row["validation"]
    assert row["size"].endswith(("KiB", "MiB"))


def test_curves_are_given_as_csv(session):
    folder = finished_run(session)
    answer = get(session, f"/api/runs/{folder.id}/curves.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert f"{folder.id}-curves.csv" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    snapshot = fold(replay(folder.events_path))
    found = [row for row in rows if row["loss"]]
    assert [int(row["step"]) for row in found] == list(snapshot.steps.step)
    assert [float(row["loss"]) for row in found] == list(snapshot.steps.loss)
    validation = [float(row["validation_loss"]) for row in rows if row["validation_loss"]]
    assert validation == list(snapshot.evals.loss) and validation
    assert get(session, "/api/runs/none/curves.csv").status_code == 404


def test_the_resume_of_a_stopped_run_waits_in_the_queue(session, engine):
    folder = finished_run(session, run_events(60, ended="stopped"))
    (folder.checkpoints_path / "step-40").mkdir(parents=True)
    finished = finished_run(session)
    active = session.start(CONFIG)
    session._list.forget()
    rows = {row["id"]: row["actions"] for row in get(session, "/api/runs").json()["runs"]}
    assert "queue" in rows[folder.id] and "resume" not in rows[folder.id]
    assert "queue" not in rows[finished.id]
    answer = post(session, "/api/queue/resume", {"run": folder.id})
    (row,) = answer.json()["queue"]["rows"]
    assert row["resumes"] == folder.id and row["differs"] == ""
    again = post(session, "/api/queue/resume", {"run": folder.id})
    assert again.status_code == 409 and "already" in again.json()["error"]
    for run_id in (finished.id, active, "none"):
        assert post(session, "/api/queue/resume", {"run": run_id}).status_code == 409
    engine.runs[0].request("stop")
    wait_for(lambda: len(engine.runs) == 2 and engine.runs[1].id == folder.id)
    wait_for(lambda: not session.queue.listed())


def test_a_row_offers_to_chat_where_there_are_weights(session, engine):
    _, saved, exported = (finished_run(session) for _ in range(3))  # the first has no weights
    (saved.checkpoints_path / "step-40").mkdir(parents=True)
    exported.export_path.mkdir()
    (exported.export_path / "config.json").write_text("{}")

    def chats():
        session._list.forget()
        return {
            row["id"]
            for row in get(session, "/api/runs").json()["runs"]
            if "chat" in row["actions"]
        }

    assert chats() == {saved.id, exported.id}
    (saved.path / "config.yaml").write_text("{")
    paused = session.start(CONFIG)
    wait_for(open_run(session.runs_dir, paused).events_path.exists)
    assert chats() == {exported.id}
    recorder = RunRecorder(engine.runs[0].folder.path, paused)
    recorder.emit(StateChanged(state="paused"))
    recorder.close()
    assert chats() == {exported.id, paused}


def test_a_run_is_deleted_unless_it_is_going_on(session):
    folder = finished_run(session)
    assert (
        "delete"
        in next(row for row in get(session, "/api/runs").json()["runs"] if row["id"] == folder.id)[
            "actions"
        ]
    )
    with folder.lock():
        answer = post(session, f"/api/runs/{folder.id}/delete", {})
        assert answer.status_code == 409 and folder.path.exists()
    assert post(session, f"/api/runs/{folder.id}/delete", {}).status_code == 200
    assert not folder.path.exists() and get(session, "/api/runs").json()["runs"] == []
    assert get(session, f"/api/live/{folder.id}").status_code == 404


def test_damaged_runs_are_listed_beside_the_others(session):
    good, damaged, gone = (finished_run(session) for _ in range(3))
    (damaged.path / "config.yaml").write_bytes(b"\xff{")
    (damaged.path / "about.json").write_text("{")
    (gone.path / "config.yaml").unlink()
    rows = {row["id"]: row for row in get(session, "/api/runs").json()["runs"]}
    assert rows[good.id]["state"] == "finished"
    for folder in (damaged, gone):
        assert rows[folder.id]["state"] == "unreadable"
        assert rows[folder.id]["actions"] == ["details", "delete"]
        found = get(session, f"/api/runs/{folder.id}/details").json()
        assert found["commands"] == [] and bool(found["config_problem"]) == (folder is gone)


def test_an_interrupted_run_can_be_resumed_from_the_list(session):
    folder = finished_run(session, run_events(5, total=10, ended=None))
    (row,) = get(session, "/api/runs").json()["runs"]
    assert row["state"] == "interrupted"
    assert "resume" in row["actions"]
    assert folder.id == row["id"]


# ------------------------------------------------------------------ names and details


def test_a_run_is_renamed_in_the_list_and_in_the_bar(session):
    folder = finished_run(session)
    get(session, f"/api/live/{folder.id}")
    about = {"name": " Better ", "note": "as it <i>was</i>", "tags": ["<b>", " a ", "", "a"]}
    answer = post(session, f"/api/runs/{folder.id}/describe", about)
    found = {"name": "Better", "note": "as it <i>was</i>", "tags": ["<b>", "a"]}
    assert answer.json() == found
    without_tags = {"name": "Better", "note": "as it <i>was</i>"}
    assert post(session, f"/api/runs/{folder.id}/describe", without_tags).json() == found
    (row,) = get(session, "/api/runs").json()["runs"]
    assert {name: row[name] for name in found} == found and row["id"] == folder.id
    details = get(session, f"/api/runs/{folder.id}/details").json()
    assert details["tags"] == "<b>, a"
    wait_for(lambda: get(session, f"/api/live/{folder.id}").json()["bar"]["name"] == "Better")
    bar = get(session, f"/api/live/{folder.id}").json()["bar"]
    assert bar["note"] == "as it <i>was</i>" and "Better" in bar["title"]
    assert post(session, f"/api/runs/{folder.id}/describe", {"name": " Best "}).json() == {
        **found,
        "name": "Best",
    }
    for wrong in (
        {"name": " "},
        {"name": 1, "note": ""},
        {"name": "a\nb", "note": ""},
        {"name": "a", "note": "", "tags": "a"},
        {"name": "a", "note": "", "tags": ["x" * 41]},
        {"name": "a", "note": "", "tags": [str(number) for number in range(13)]},
    ):
        assert post(session, f"/api/runs/{folder.id}/describe", wrong).status_code == 409
    assert post(session, "/api/runs/none/describe", {"name": "a"}).status_code == 409


def test_the_details_of_a_run_are_its_exact_settings_and_commands(session):
    folder = finished_run(session, run_events(5, total=10, ended="stopped"))
    (folder.path / "stderr.txt").write_text("a warning\n")
    found = get(session, f"/api/runs/{folder.id}/details").json()
    assert found["config"] == (folder.path / "config.yaml").read_text()
    assert found["config_name"] == "Fake"
    runs = str(session.runs_dir)
    assert [command["text"] for command in found["commands"]] == [
        f"python launch.py train --resume {folder.id} --runs-dir {runs}",
        f"python launch.py train {runs}/{folder.id}/config.yaml --runs-dir {runs}",
    ]
    assert found["printed"] == ["a warning"]
    finished = get(session, f"/api/runs/{finished_run(session).id}/details").json()
    assert [command["label"] for command in finished["commands"]] == [
        "A new run with the same settings"
    ]
    assert get(session, "/api/runs/none/details").status_code == 404


def test_the_commands_are_quoted_for_a_shell(tmp_path, engine):
    session = Session(tmp_path / "my runs; $HOME", engine.calls())
    folder = finished_run(session)
    (command,) = get(session, f"/api/runs/{folder.id}/details").json()["commands"]
    assert shlex.split(command["text"])[3:] == [
        str(folder.path / "config.yaml"),
        "--runs-dir",
        str(session.runs_dir),
    ]


# ------------------------------------------------------------------ export


def test_export_is_a_job(session, engine, tmp_path):
    folder = finished_run(session)
    job = post(session, f"/api/runs/{folder.id}/export", {"folder": str(tmp_path / "model")}).json()
    wait_for(lambda: get(session, f"/api/jobs/{job['id']}").json()["state"] == "done")
    done = get(session, f"/api/jobs/{job['id']}").json()
    assert done["result"] == f"Exported the model of step 7 to {tmp_path / 'model'}."
    assert (done["done"], done["total"]) == (1, 2)
    assert engine.asked == [(folder.id, tmp_path / "model", ExportChoice())]
    assert post(session, f"/api/runs/{folder.id}/export", {"folder": " "}).status_code == 409


@pytest.mark.parametrize(
    ("given", "private"),
    [({}, True), ({"seen_by": "owner"}, True), ({"seen_by": "everyone"}, False)],
)
def test_a_push_is_a_job_and_private_unless_asked(session, engine, tmp_path, given, private):
    folder = finished_run(session)
    wanted = {"folder": str(tmp_path / "model"), "repository": " me/tiny ", **given}
    job = post(session, f"/api/runs/{folder.id}/push", wanted).json()
    wait_for(lambda: get(session, f"/api/jobs/{job['id']}").json()["state"] == "done")
    done = get(session, f"/api/jobs/{job['id']}").json()
    assert done["result"] == f"Pushed {tmp_path / 'model'} to https://hub.example/me/tiny."
    assert (done["title"], done["done"], done["total"]) == ("The push to me/tiny", 1, 2)
    assert engine.asked == [(tmp_path / "model", "me/tiny", private)]
    for lacks in ({"folder": " "}, {"repository": ""}):
        assert post(session, f"/api/runs/{folder.id}/push", wanted | lacks).status_code == 409


def test_export_says_what_to_type_and_whether_the_template_was_checked(session):
    folder = finished_run(session, name="Roman Numerals!")
    home = get(session, f"/api/runs/{folder.id}/details").json()["export"]
    assert home["exports"] == [], "there is nothing to use yet"
    assert home["question"] == "Hello!", "the run was asked nothing"
    texts = ("1 + 1?", "And 3?", "How many?\nAnswer:", "long " * 40)
    asked = ExactMatchMeasured(1, "after", 0, 4, [{"prompt": text} for text in texts])
    assert export_details(folder, fold_of(asked), False)["question"] == "1 + 1?"
    target = session.runs_dir.parent / "exports" / folder.id
    assert home["folder"] == str(target)
    folder.export_path.mkdir()
    (folder.export_path / "config.json").write_text("{}")
    for content, words in (
        (None, "Its Modelfile is gone"),
        ('FROM .\nTEMPLATE """x"""\n', "checked against the chat template"),
        ("FROM .\n# There is no TEMPLATE here: it has none.\n", "no TEMPLATE: it has none."),
    ):
        if content is not None:
            (folder.export_path / "Modelfile").write_text(content)
        (own,) = get(session, f"/api/runs/{folder.id}/details").json()["export"]["exports"]
        assert words in own["template"] and own["path"] == str(folder.export_path.resolve())
    texts = "\n".join(row["text"] for row in own["uses"])
    for words in (
        "from transformers import",
        'tokenizer("Hello!", return_tensors="pt")',
        f"vllm serve {folder.export_path.resolve()}",
        "llama-cli",
        "ollama run roman-numerals",
    ):
        assert words in texts


def test_export_says_what_to_type_for_an_adapter(session):
    folder = finished_run(session)
    details = get(session, f"/api/runs/{folder.id}/details").json()
    assert not details["export"]["has_adapters"]
    folder.export_path.mkdir()
    (folder.export_path / "adapter_config.json").write_text("{}")
    (own,) = get(session, f"/api/runs/{folder.id}/details").json()["export"]["exports"]
    texts = "\n".join(row["text"] for row in own["uses"])
    assert "AutoPeftModelForCausalLM" in texts and "--enable-lora --lora-modules" in texts
    assert "ollama" not in texts and own["label"] == "Adapters"
    assert own["template"] == "An adapter has no Modelfile; export the whole model for Ollama."


def test_an_export_to_another_folder_is_known_and_used(session):
    folder, runs = finished_run(session, name="Roman Numerals"), session.runs_dir
    folder.export_path.mkdir()
    (folder.export_path / "config.json").write_text("{}")

    def home():
        return get(session, f"/api/runs/{folder.id}/details").json()["export"]

    # The offered folder is a new one each time.
    for number in (1, 2):
        target = Path(home()["folder"])
        target.mkdir(parents=True)
        note_export(runs, NotedExport(folder.id, str(target), 7, "bfloat16", False, float(number)))
        newest = home()["exports"][0]
        assert (newest["path"], newest["label"]) == (str(target), "Folder, bfloat16, step 7")
        assert newest["files"] == [] and newest["check"] == "" and not newest["is_other"]
        assert f"vllm serve {target}" in [row["text"] for row in newest["uses"]]
    assert [Path(each["path"]).name for each in home()["exports"]] == [
        f"{folder.id}-2",
        folder.id,
        "export",
    ]
    own = str(folder.export_path.resolve())  # it is shown once, with what was found of it
    says = "Not read as it was trained: line 1 differs."
    note_export(runs, NotedExport(folder.id, own, 7, "bfloat16", False, 9.0, check=says))
    shown = [(each["path"], each["check"]) for each in home()["exports"] if each["is_other"]]
    assert shown == [(own, says)] and len(home()["exports"]) == 3
    content = bytes(range(256)) * 5000
    (target / "model é.gguf").write_bytes(content)
    (target / "link").symlink_to(EXPORTS_FILE)
    assert home()["exports"][0]["files"] == [{"name": "model é.gguf", "bytes": len(content)}]
    # Each export keeps its own lines and its own warning.
    (target / "Modelfile").write_text("FROM .\n# There is no TEMPLATE here: it has none.\n")
    noted = NotedExport(folder.id, str(target), 7, "q8_0", False, 3.0, "model é.gguf")
    note_export(runs, noted)
    file, other = home()["exports"][:2]
    assert (file["label"], other["label"]) == (
        "GGUF file, Q8_0, step 7",
        "Folder, bfloat16, step 7",
    )
    assert file["shown_path"] == str(target / noted.file) and other["shown_path"] == other["path"]
    assert "no TEMPLATE: it has none." in file["template"] and "is gone" in other["template"]
    assert "lms import" in str(file["uses"]) and "vllm serve" in str(other["uses"])

    def download(place, name):
        asked = urlencode({"folder": str(place), "name": name})
        return get(session, f"/api/runs/{folder.id}/file?{asked}")

    answer = download(target, "model é.gguf")
    assert answer.content == content and answer.headers["content-length"] == str(len(content))
    assert answer.headers["content-disposition"].startswith("attachment")
    # Nothing else is given away: no other file, no link, and no folder that was not exported to.
    for place, name in ((target, "link"), (target, "../x"), (target, ""), (runs, EXPORTS_FILE)):
        assert download(place, name).status_code == 404, name
    archive = f"/api/runs/{folder.id}/archive?"
    answer = get(session, archive + urlencode({"folder": str(target)}))
    with zipfile.ZipFile(io.BytesIO(answer.content)) as files:
        assert files.namelist() == [
            f"Roman-Numerals/{name}" for name in ("Modelfile", "model é.gguf")
        ]
        assert files.testzip() is None and files.read(files.namelist()[1]) == content
    assert answer.headers["content-disposition"].endswith("''Roman-Numerals.zip")
    for place in (runs, "", target / ".."):
        assert get(session, archive + urlencode({"folder": str(place)})).status_code == 404, place
    assert get(session, f"/api/runs/{folder.id}/room?folder={target}").json()["free"] > 0
    shutil.rmtree(target)  # one that is gone, one of another run and damage are left out
    note_export(runs, NotedExport("another", str(runs), 7, "float32", True, 3.0))
    with (runs / EXPORTS_FILE).open("ab") as file:
        file.write(b"\xff{}\n")
    assert [Path(each["path"]).name for each in home()["exports"]] == [folder.id, "export"]


def test_the_state_of_the_login_is_known_without_asking_the_hub(session, monkeypatch):
    folder = finished_run(session)
    for token in ("hf_of_nobody", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")
        details = get(session, f"/api/runs/{folder.id}/details").json()
        assert details["export"]["login"] is bool(token)


def test_the_settings_that_matter_come_first_and_then_what_was_changed(session):
    config = CONFIG.with_values(
        {"train.method": "lora", "train.epochs": 3, "train.warmup_steps": 5}
    )
    folder = create_run(session.runs_dir, config)
    shown = get(session, f"/api/runs/{folder.id}/details").json()["settings"]
    main = dict(shown["main"])
    assert len(main) == 9 and main["Trained"].startswith("LoRA, rank ")
    assert main["Length"] == "3 passes"
    assert main["Schedule"] == "Cosine"
    (row,) = shown["changed"]
    assert (row["title"], row["value"]) == ("train.warmup_steps", "5") and row["default"] != "5"
    (folder.path / "config.yaml").unlink()
    shown = get(session, f"/api/runs/{folder.id}/details").json()["settings"]
    assert shown == {"main": [], "changed": []}

    counted = create_run(
        session.runs_dir,
        CONFIG.with_values({"train.epochs": None, "train.steps": 3, "train.batch_size": 19}),
    )
    data = {"train_rows": 38, "train_examples": 38, "eval_examples": 2}
    main = dict(settings_in_words(counted, 3, data)["main"])
    assert main["Rows"] == "38 to train on, 2 for validation"
    assert main["Length"] == "3 steps · 1.5 passes"


def test_a_failed_job_says_why_and_jobs_take_turns(session):
    folder = finished_run(session)
    gate = threading.Event()
    session.jobs.start("The export of x", lambda job: gate.wait(5) and "")
    with pytest.raises(RunError, match="The export of x is still running"):
        session.export(folder.id, "somewhere")
    gate.set()
    wait_for(lambda: session.jobs.find(1).state == "done")
    job = session.export(folder.id, "full")
    wait_for(lambda: job.state == "failed")
    assert job.error == "The disk is full."
    assert get(session, "/api/jobs/99").status_code == 404
