"""Runs that a stranger made, beside good ones: what is a link, a pipe, a device or damaged in their
folders is told by its name. Nothing hangs, nothing outside is read or written, and every other run
is shown.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.session.session import Session
from engine.errors import RunError
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import DataPrepared, RunEnded, StepFinished, UnitNorms
from engine.runs.record.run_folder import RunFolder, create_run, delete_run, open_run
from engine.runs.summaries.listing import FILES, list_runs
from engine.tools.cli.runs import runs_as_text
from engine.training.loop.run import resume_run
from tests.support.run_folders import CONFIG, record
from tests.support.sessions import finished_run, get
from tests.support.strange_folders import ask_everything, cases, digest, make_runs
from tests.support.synthetic_run import run_events

SEEDS = 19
"""With so many, there are some 2,000 cases."""
MOST_SECONDS = 30


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine\n")
    return folder


def as_a_stranger_makes_it(runs: Path, **files: str) -> RunFolder:
    """A run that was interrupted, with a process of its own that is gone."""
    folder = create_run(runs, CONFIG)
    record(folder, *run_events(4)[:-1])
    (folder.path / "detached.json").write_text(json.dumps({"pid": 999_999, "started": 1.0}))
    for name, content in files.items():
        (folder.path / name.replace("_", ".")).write_text(content)
    return folder


def listed(session: Session, run_id: str) -> dict:
    session._list.forget()
    rows = get(session, "/api/runs").json()["runs"]
    assert get(session, "/api/recent").status_code == 200
    return next(row for row in rows if row["id"] == run_id)


# ---------------------------------------------------------------------- links (number 3)


@pytest.mark.parametrize("name", FILES)
def test_a_look_at_the_list_follows_no_link_and_writes_nothing(session, victim, name):
    good = finished_run(session)
    folder = as_a_stranger_makes_it(session.runs_dir)
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(victim / "notes.txt")
    before = digest(session.runs_dir), digest(victim)
    row = listed(session, folder.id)
    assert row["state"] == "unreadable" and row["reason"].startswith(f"{name} is a link")
    assert listed(session, good.id)["state"] == "finished"
    text, found = runs_as_text(session.runs_dir, False), runs_as_text(session.runs_dir, True)
    assert f"{name} is a link" in text
    assert f"{name} is a link" in found
    assert good.id in text
    assert (digest(session.runs_dir), digest(victim)) == before


def test_a_list_leaves_the_folders_of_runs_as_they_are(session):
    """Also of a run whose process ended before it began, which the list shows as failed."""
    folder = create_run(session.runs_dir, CONFIG)
    (folder.path / "detached.json").write_text(json.dumps({"pid": 999_999, "started": 1.0}))
    (folder.path / "stderr.txt").write_text("ramstream: it cannot begin.\n")
    finished_run(session)
    before = digest(session.runs_dir)
    assert listed(session, folder.id)["state"] == "failed"
    assert listed(session, folder.id)["reason"] == "it cannot begin."
    assert digest(session.runs_dir) == before and not (folder.path / "lock").exists()
    assert get(session, f"/api/live/{folder.id}").json()["bar"]["state"] == "failed"


@pytest.mark.parametrize(
    "name", ["lock", "events.jsonl", "events.torn", "events.reserve", "session.json", "stderr.txt"]
)
def test_a_resume_writes_through_no_link(session, victim, name):
    folder = as_a_stranger_makes_it(session.runs_dir)
    with folder.events_path.open("ab") as file:
        file.write(b'{"kind": "torn')
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(victim / "notes.txt")
    before = digest(victim)
    try:
        resume_run(session.runs_dir, folder.id).close()
    except RunError as error:
        assert f"{name} is a link" in str(error)
    try:
        session._detached.resume(folder)
    except RunError as error:
        assert name in str(error)
    assert digest(victim) == before


@pytest.mark.parametrize("name", ["checkpoints", "best"])
def test_what_links_lead_to_is_not_deleted(tmp_path, victim, name):
    folder = as_a_stranger_makes_it(tmp_path / "runs")
    (folder.path / name).symlink_to(victim)
    folder.delete_weights()
    assert (victim / "notes.txt").exists() and not os.path.lexists(folder.path / name)
    (folder.path / name).symlink_to(victim)
    delete_run(tmp_path / "runs", folder.id)
    assert (victim / "notes.txt").exists() and not folder.path.exists()


def test_a_run_that_is_a_link_is_shown_and_not_followed(session, tmp_path):
    elsewhere = create_run(tmp_path / "elsewhere", CONFIG)
    record(elsewhere, *run_events(4))
    good = finished_run(session)
    (session.runs_dir / "linked").symlink_to(elsewhere.path)
    before = digest(tmp_path / "elsewhere")
    row = listed(session, "linked")
    assert row["state"] == "unreadable" and "linked is a link" in row["reason"]
    assert listed(session, good.id)["state"] == "finished"
    with pytest.raises(RunError, match="linked is a link, which is not followed"):
        open_run(session.runs_dir, "linked")
    assert digest(tmp_path / "elsewhere") == before


def test_a_folder_of_runs_on_another_disk_keeps_working(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    folder = create_run(tmp_path / "runs", CONFIG)
    record(folder, *run_events(4)[:-1])
    assert [run.state for run in list_runs(tmp_path / "runs")] == ["interrupted"]
    resume_run(tmp_path / "runs", folder.id).close()
    delete_run(tmp_path / "runs", folder.id)
    assert not list((tmp_path / "disk").iterdir())


# ---------------------------------------------------------------------- pipes (number 6)


@pytest.mark.parametrize("name", ["lock", "config.yaml", "about.json", "events.jsonl"])
def test_a_pipe_hangs_nothing(session, name):
    good = finished_run(session)
    folder = as_a_stranger_makes_it(session.runs_dir)
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    command = [sys.executable, str(PROGRAM_ROOT / "launch.py"), "runs"]
    # As another process, which can be ended: a thread that waits for a pipe cannot.
    shown = subprocess.run(
        [*command, "--runs-dir", str(session.runs_dir)],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=True,
    )
    assert f"{name} is a pipe" in shown.stdout and good.id in shown.stdout
    row = listed(session, folder.id)
    assert row["state"] == "unreadable" and f"{name} is a pipe" in row["reason"]
    assert listed(session, good.id)["state"] == "finished"
    with pytest.raises(RunError, match="pipe"):
        resume_run(session.runs_dir, folder.id)
    delete_run(session.runs_dir, folder.id)
    assert not folder.path.exists()


# ---------------------------------------------------------------------- damage (numbers 7, 13)


@pytest.mark.parametrize(
    "content",
    [
        '{"pid": -1, "started": 1}',
        '{"pid": 1e400, "started": 1}',
        '{"pid": 1, "started": 1e400}',
        '{"pid": 99999999999999999999, "started": 1}',
        "[" * 100_000,
        '{"pid":' * 100_000,
        "\x00",
    ],
    ids=["negative", "1e400", "started", "large", "brackets", "braces", "zero"],
)
def test_a_damaged_file_about_a_process_takes_no_run_down(session, content):
    good = finished_run(session)
    folder = as_a_stranger_makes_it(session.runs_dir, detached_json=content)
    folder.events_path.unlink()  # otherwise nobody asks whether its process still starts
    assert listed(session, folder.id)["state"] == "failed"
    assert listed(session, good.id)["state"] == "finished"
    for run_id in (folder.id, good.id):
        assert get(session, f"/api/live/{run_id}").status_code == 200
    assert session.why_not_start() is None


ODD = {
    "norms": UnitNorms(60, [5e-324, 1.7e308, 0.0]),
    "deep": DataPrepared({"rows": [[[[{}]]]], "format": {"a": None}}),
    "largest": StepFinished(61, loss=1.7e308, grad_norm=-1.7e308, seconds=5e-324),
}


@pytest.mark.parametrize("odd", [*ODD, "micro_batch", "times"])
def test_lines_that_cannot_be_drawn_are_told_and_passed_over(session, odd):
    folder = finished_run(session)
    lines = folder.events_path.read_bytes().splitlines(keepends=True)
    if odd in ODD:
        folder.events_path.write_bytes(b"".join(lines[:-1]))
        record(folder, ODD[odd], RunEnded())
        expected = 0
    else:
        place = next(at for at, line in enumerate(lines) if b"step_timeline" in line[:30])
        timeline = json.loads(lines[place])
        if odd == "micro_batch":
            timeline["spans"][0]["micro_batch"] = []
        else:
            timeline["spans"][0]["end"] = 2**63 - 1
        lines[place] = json.dumps(timeline, separators=(",", ":")).encode() + b"\n"
        folder.events_path.write_bytes(b"".join(lines))
        expected = 1
    live = get(session, f"/api/live/{folder.id}")
    assert live.status_code == 200 and set(live.json()["parts"]) >= {"loss", "norms", "timeline"}
    log = get(session, f"/api/runs/{folder.id}/log").json()
    found = [entry["text"] for entry in log["entries"] + log["damage"]]
    assert len([text for text in found if "is damaged" in text]) == expected
    assert len(live.json()["bar"]["remarks"]) == expected
    assert get(session, f"/api/runs/{folder.id}/curves.csv").status_code == 200


def test_a_figure_that_fails_is_told_and_the_others_are_drawn(session, monkeypatch, capsys):
    folder = finished_run(session)

    def fails(snapshot, *_):
        if snapshot.last_seq:
            raise OverflowError("too large")
        return []

    monkeypatch.setitem(sys.modules["app.pages.run.run_watch"].FIGURES, "loss", fails)
    monkeypatch.setattr("app.pages.run.run_watch.tiles", fails)
    for _ in range(2):
        answer = get(session, f"/api/live/{folder.id}").json()
        shown = answer["bar"]["remarks"]
        assert [line for line in shown if "in the figure loss (OverflowError: too large)" in line]
        assert [line for line in shown if "in the numbers" in line]
        session.follow(folder.id).has_news = True
    assert "norms" in answer["parts"] and "loss" not in answer["parts"]


def test_a_record_linked_to_itself_is_told_on_its_page(session):
    folder = finished_run(session)
    folder.events_path.unlink()
    folder.events_path.symlink_to("events.jsonl")
    answer = get(session, f"/api/live/{folder.id}")
    assert answer.status_code == 404 and "it is a link" in answer.json()["error"]
    assert listed(session, folder.id)["state"] == "unreadable"


def test_a_modelfile_that_is_no_text_is_shown_as_far_as_it_is(session):
    folder = finished_run(session)
    folder.export_path.mkdir()
    (folder.export_path / "config.json").write_text("{}")
    (folder.export_path / "Modelfile").write_bytes(b"FROM .\n\xff\xfe\nTEMPLATE x\n")
    answer = get(session, f"/api/runs/{folder.id}/details")
    assert answer.status_code == 200
    assert answer.json()["export"]["exports"][0]["template"].startswith(
        "Includes an Ollama Modelfile"
    )
    (folder.export_path / "Modelfile").unlink()
    os.mkfifo(folder.export_path / "Modelfile")
    home = get(session, f"/api/runs/{folder.id}/details").json()["export"]
    assert "Modelfile is a pipe" in home["fault"] and not home["exports"]


# ---------------------------------------------------------------------- who may look (number 8)


def test_a_run_is_its_owners_alone(tmp_path):
    """Its files have the mode that the umask gives, for whoever opens the folder to a group."""
    before = os.umask(0o022)
    try:
        folder = create_run(tmp_path / "runs", CONFIG)
        record(folder, *run_events(4))
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
    assert set(modes.values()) == {0o644}


def test_another_account_reads_nothing_of_a_run(tmp_path):
    if os.geteuid():
        pytest.skip("only root may act as another account")
    folder = create_run(tmp_path / "runs", CONFIG)
    for path in (tmp_path / "runs", *tmp_path.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    read = "import os, sys; os.setuid(65534); open(sys.argv[1]).read()"
    command = [sys.executable, "-c", read]
    seen = tmp_path / "seen.txt"
    seen.write_text("x")
    assert subprocess.run([*command, str(seen)], capture_output=True).returncode == 0
    refused = subprocess.run(
        [*command, str(folder.path / "config.yaml")], capture_output=True, text=True
    )
    assert "PermissionError" in refused.stderr


# ---------------------------------------------------------------------- all small files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of runs with one that has all that a run can have, and its id."""
    return make_runs(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow("sweep")
@pytest.mark.parametrize("case", cases(SEEDS), ids=str)
def test_whatever_is_in_a_folder_everything_is_answered(whole, tmp_path, victim, case, capsys):
    runs, run_id = whole
    for name in ("good", "hurt"):
        shutil.copytree(runs / run_id, tmp_path / "runs" / name)
    (victim / "docs").mkdir()
    (victim / "docs" / "x.csv").write_text("a,b\n")
    draw = random.Random(hashlib.sha256(str(case).encode()).digest())
    case.hurt(tmp_path / "runs" / "hurt" / case.file, draw, victim)
    before = digest(victim)
    asked = ask_everything(tmp_path / "runs", "hurt", "good", tmp_path, case.is_exported)
    assert asked.problems == [] and digest(victim) == before
    assert "Traceback" not in capsys.readouterr().err
