"""A run that has done all its steps has finished, whatever its export meets; the model can be
exported again.
"""

from __future__ import annotations

import asyncio
import json

import pytest

import engine.training.loop.disk_space
import engine.training.loop.early_stopping
import engine.training.loop.planning
import launch
from app.pages.run.run_details import run_details
from app.pages.run.run_watch import watch_of
from app.session.session import Session
from app.shared.run_row import Weights, run_row
from engine.errors import RunError
from engine.runs.record.events import ExportWritten, LogLine, StateChanged
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.listing import list_runs
from engine.tools.cli.runs import runs_as_text
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.export.export import export_run
from engine.training.loop.run import start_run
from engine.training.loop.webhook import message
from tests.support.disks import small_file_system
from tests.support.failing import command, fill, plenty, whole_checkpoints
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, execute

KEEPS_NONE = {"output.checkpoint": "none", "output.keep_best": "none"}
WHY = "the export is refused by a test."


@pytest.fixture
def unexported(tmp_path, runs):
    """Returns a function that executes a run whose folder `export` is taken by a file."""

    def executed(**values):
        run = start_run(make_config(tmp_path, **{"output.export": True, **values}), runs)
        run.folder.export_path.write_text("a file is here")
        return run, execute(run)

    return executed


def test_a_whole_run_whose_export_fails_has_finished(unexported, runs):
    run, ended = unexported()
    why = ended.export_failed
    assert ended.state == "finished" and ended.error_type == "RunError"
    assert why.startswith(f"The model cannot be written to {run.folder.export_path}")
    assert ended.reason == (
        f"Finished all 8 steps. But the export failed: {why} The weights of step 8 are saved, and "
        "can be exported again."
    )
    assert not events_of(run, ExportWritten) and whole_checkpoints(run.folder.path) == 8
    assert message(run.id, run.recorder.snapshot, ended) | {
        "text": f"Tiny finished, export failed: {ended.reason}",
        "state": "finished",
        "export_failed": why,
    } == message(run.id, run.recorder.snapshot, ended)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_list_page_and_terminal_say_so_until_it_is_exported(unexported, runs):
    run, ended = unexported()
    (listed,) = list_runs(runs)
    saved = saved_steps(run.folder.checkpoints_path)
    row = run_row(listed, Weights(saved=saved))
    assert (row["word"], row["tone"]) == ("Finished, export failed", "warn")
    assert "export" in row["actions"]
    assert "finished, export failed" in runs_as_text(runs, False)
    assert ended.reason in runs_as_text(runs, False)
    (found,) = json.loads(runs_as_text(runs, True))
    assert (found["state"], found["export_failed"]) == ("finished", ended.export_failed)
    session = Session(runs)
    shown = head_of(session, run.id)
    assert shown["bar"]["word"] == "Finished, export failed" and shown["bar"]["tone"] == "warn"
    assert ended.export_failed in shown["bar"]["sentence"]
    assert "its export failed" in shown["head"]["title"]
    assert shown["head"]["actions"][0] == "export-again"
    assert ended.export_failed in shown["head"]["text"]

    run.folder.export_path.unlink()
    target = run_details(run.folder, RunSnapshot())["export"]["folder"]
    export_run(runs, run.id, target)
    (again,) = list_runs(runs)
    assert again.state_text == "finished" and run_row(again)["word"] == "Finished"
    assert head_of(Session(runs), run.id)["bar"]["word"] == "Finished"
    assert run_details(run.folder, RunSnapshot())["export"]["folder"].endswith(f"exports/{run.id}")


def head_of(session: Session, run_id: str) -> dict:
    answer = asyncio.run(watch_of(session, run_id).answer(0, "step"))
    return json.loads(b"{" + answer + b"}")


def test_the_terminal_names_the_command_and_fails(capsys, tmp_path, runs, monkeypatch):
    monkeypatch.setattr(engine.training.loop.early_stopping, "write_model", refuse)
    make_config(tmp_path, **{"output.export": True}).save(tmp_path / "preset.yaml")
    code, out, sentence = command(capsys, "--runs-dir", runs, "train", tmp_path / "preset.yaml")
    (run,) = list_runs(runs)
    assert code == 1
    assert sentence == run.reason
    assert run.export_failed == WHY
    assert f"export {run.id} FOLDER --runs-dir {runs}" in out
    monkeypatch.undo()
    home = tmp_path / "home"
    assert launch.main(["export", run.id, str(home), "--runs-dir", str(runs)]) == 0
    assert (home / "model.safetensors").is_file()


def refuse(*_):
    raise RunError(WHY)


def test_a_fault_of_the_program_in_the_export_fails_no_run(tmp_path, runs, monkeypatch):
    monkeypatch.setattr(engine.training.loop.early_stopping, "write_model", lambda *_: {}["gone"])
    run = start_run(make_config(tmp_path, **{"output.export": True}), runs)
    ended = execute(run)
    assert ended.state_text == "finished, export failed" and "KeyError" in ended.export_failed
    traces = [line.text for line in events_of(run, LogLine) if line.level == "error"]
    assert len(traces) == 1 and "Traceback" in traces[0]


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_a_run_without_checkpoints_keeps_what_it_could_not_export(unexported, runs, tmp_path):
    run, ended = unexported(**KEEPS_NONE)
    assert ended.state_text == "finished, export failed"
    assert ended.reason.startswith("Finished all 8 steps. But the export failed: ")
    assert saved_steps(run.folder.checkpoints_path).newest == 8
    export_run(runs, run.id, tmp_path / "home")
    whole = start_run(make_config(tmp_path, **{"output.export": True}), tmp_path / "whole")
    execute(whole)
    named = "model.safetensors"
    assert (tmp_path / "home" / named).read_bytes() == (
        whole.folder.export_path / named
    ).read_bytes()


def test_it_waits_for_space_where_the_disk_is_full_and_then_exports(tmp_path, monkeypatch):
    """Nothing else holds what it has trained."""
    monkeypatch.setattr(engine.training.loop.planning, "read_machine", plenty)
    monkeypatch.setattr(engine.training.loop.disk_space, "POLL_SECONDS", 0.05)
    config = make_config(tmp_path, **{"output.export": True} | KEEPS_NONE)
    with small_file_system(tmp_path / "disk", 8) as disk:
        run = start_run(config, disk / "runs")
        waited = []

        def poll(record):
            event = record.event
            if isinstance(event, StateChanged) and event.state == "paused":
                waited.append(event)
                (disk / "ballast").unlink()

        run.recorder.subscribe(poll)
        monkeypatch.setattr(engine.training.loop.early_stopping, "write_model", filling(disk))
        ended = execute(run)
        assert ended.state == "finished" and not ended.export_failed, ended
        assert len(waited) == 1 and (run.folder.export_path / "model.safetensors").is_file()


def filling(disk):
    """Returns `write_model` for a disk that fills up when it is first called."""
    real, calls = engine.training.loop.early_stopping.write_model, []

    def write_model(*given):
        if not calls:
            calls.append(fill(disk, leave=100_000))
        return real(*given)

    return write_model


def test_where_nothing_can_be_kept_that_is_said(unexported, monkeypatch):
    def block(_, path) -> None:
        RunFolder(path.parent).checkpoints_path.write_text("a file is here")
        refuse()

    monkeypatch.setattr(engine.training.loop.early_stopping, "write_model", block)
    _, ended = unexported(**KEEPS_NONE)
    assert ended.state_text == "finished, export failed"
    assert WHY in ended.reason and "Nothing is kept of the run: " in ended.reason
