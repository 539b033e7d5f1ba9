"""A run that another version wrote in a format of its own is in the list by its name and date with
one sentence. Whatever is asked of it is answered with that sentence, and its files stay as they
are.
"""

from __future__ import annotations

import shutil

import pytest

import launch
from app.pages.chat.chat import Choice
from app.pages.new.draft import settings_of_run
from app.pages.runs.compare_routes import compare_routes
from app.session import engine_calls
from app.session.offered_weights import OfferedWeights
from engine.config.settings import FORMAT, TrainConfig
from engine.errors import ConfigError, RunError
from engine.runs.record.run_folder import OtherFormat, create_run
from tests.support.routes import send_all
from tests.support.sessions import CONFIG, finished_run, get, post

EARLIER = (
    "was written by Ramstream 0.1 in an earlier format, and only the version that wrote it reads"
)


def files_of(folder) -> dict:
    """Name, content and times of everything in a folder."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.stat()
        content = path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder)] = (content, status.st_mtime_ns, status.st_mode)
    return found


def write_format(folder, value: str | None) -> None:
    """Give a run's settings another format, or none, as they were before format 2."""
    path = folder.path / "config.yaml"
    first, rest = path.read_text(encoding="utf-8").split("\n", 1)
    assert first == f"format: {FORMAT}"
    path.write_text(rest if value is None else f"format: {value}\n{rest}", encoding="utf-8")


@pytest.fixture
def older(session):
    """A finished run of before, with a checkpoint and an export."""
    made = finished_run(session, name="Before: <b>1</b>")
    path = made.path.with_name("20260102-030405-before")
    made.path.rename(path)
    folder = type(made)(path)
    write_format(folder, None)
    (folder.checkpoints_path / "step-10").mkdir(parents=True)
    (folder.checkpoints_path / "step-10" / "manifest.json").write_text('{"format": 2}')
    folder.export_path.mkdir()
    (folder.export_path / "config.json").write_text("{}")
    before = files_of(folder.path)
    yield folder
    assert files_of(folder.path) == before, "nothing is written to it"


def sentence_of(folder) -> str:
    return f"Run {folder.id} {EARLIER} it; its export is in {folder.export_path}."


def test_it_is_listed_by_name_and_date_with_one_sentence(session, older):
    newer = finished_run(session)
    (row,) = [row for row in get(session, "/api/runs").json()["runs"] if row["id"] == older.id]
    assert (row["name"], row["state"]) == ("Before: <b>1</b>", "unreadable")
    assert row["actions"] == ["details", "delete"]
    assert row["reason"] == sentence_of(older)
    runs = session.runs()
    assert [run.id for run in runs] == [newer.id, older.id]
    assert runs[1].created == 1_767_323_045  # 2026-01-02 03:04:05 UTC, from its id


def test_the_terminal_lists_it(session, older, capsys):
    assert launch.main(["runs", "--runs-dir", str(session.runs_dir)]) == 0
    out = capsys.readouterr().out
    assert "Before: <b>1</b>" in out and f"{older.id}: {sentence_of(older)}" in out


def test_its_page_says_so(session, older):
    for path in ("live/{}", "runs/{}/details", "runs/{}/log", "runs/{}/curves.csv"):
        answer = get(session, "/api/" + path.format(older.id))
        assert answer.status_code == 404 or answer.json()["error"] == sentence_of(older), path
    for path in ("live/{}", "runs/{}/details"):
        assert get(session, "/api/" + path.format(older.id)).json()["error"] == sentence_of(older)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("control", {"command": "resume"}),
        ("control", {"command": "stop"}),
        ("change", {"values": {"train.steps": 99}}),
        ("export", {"folder": "export"}),
        ("push", {"folder": "export", "repository": "one/two"}),
        ("describe", {"name": "Another", "note": ""}),
    ],
)
def test_what_is_asked_of_it_is_refused(session, older, path, body):
    answer = post(session, f"/api/runs/{older.id}/{path}", body)
    assert answer.status_code >= 400 and answer.json()["error"] == sentence_of(older)


def test_no_new_run_is_made_of_it(session, older):
    for act in (
        lambda: settings_of_run(session.runs_dir, older.id, {}),
        lambda: settings_of_run(session.runs_dir, older.id, {}, trains_on=True),
        lambda: session.queue_resume(older.id),
    ):
        with pytest.raises(OtherFormat, match=EARLIER):
            act()


def test_it_is_not_compared(session, older):
    newer = finished_run(session)
    path = f"/api/compare?runs={older.id},{newer.id}"
    (answer,) = send_all(compare_routes(session), ("GET", path, None))
    assert answer.json()["error"] == sentence_of(older)


def test_nobody_chats_with_it(session, older):
    offered = OfferedWeights(session, engine_calls)
    assert offered.runs() == []
    with pytest.raises(RunError, match=EARLIER):
        offered.sides(Choice(older.id, "newest"), compare=False)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "RUN"],
        ["export", "RUN"],
        ["trace", "RUN"],
        ["track", "RUN"],
    ],
    ids=lambda words: words[0],
)
def test_commands_refuse_it(session, older, capsys, words, tmp_path):
    command = [older.id if word == "RUN" else word for word in words]
    command += [str(tmp_path / "out")] if "export" in words else []
    code = launch.main([*command, "--runs-dir", str(session.runs_dir)])
    assert code != 0 and sentence_of(older) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_person_may_delete_it(session):
    folder = finished_run(session)
    write_format(folder, None)
    assert post(session, f"/api/runs/{folder.id}/delete", {}).status_code == 200
    assert not folder.path.exists()


def test_a_run_of_a_later_version_is_told_likewise(session):
    folder = finished_run(session)
    write_format(folder, "3")
    (run,) = session.runs()
    assert run.reason == (
        f"Run {folder.id} was written by a later Ramstream, and only the version that wrote it "
        "reads it."
    )


def test_settings_without_a_format_are_a_preset(tmp_path):
    """A person writes them by hand; what is saved names the format."""
    folder = create_run(tmp_path, CONFIG)
    text = (folder.path / "config.yaml").read_text()
    assert text.startswith(f"format: {FORMAT}\nname: ")
    preset = tmp_path / "preset.yaml"
    preset.write_text(text.split("\n", 1)[1])
    assert TrainConfig.load(preset) == CONFIG
    for value in ("1", "3", "two", "true"):
        preset.write_text(f"format: {value}\n{text.split(chr(10), 1)[1]}")
        with pytest.raises(ConfigError, match="^format: .* leave the line out"):
            TrainConfig.load(preset)
    shutil.rmtree(folder.path)
