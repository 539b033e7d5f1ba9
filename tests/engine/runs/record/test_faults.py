"""Each fault of the disk and of the files on it is provoked. The run ends with one sentence and a
complete record, and loses at most the steps since the last checkpoint. Runs that wait for space are
in test_full_disk.py.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import engine.training.loop.memory_watch
import engine.training.loop.planning
from app.form.settings_form import shown_values
from app.pages.new.draft import NO_TAB, Drafts
from engine.errors import RunError
from engine.paths import PROGRAM_ROOT
from engine.runs.record.control import CommandReader, send_command
from engine.runs.record.events import ControlReceived, JobProgressed, LogLine, RunEnded, RunStarted
from engine.runs.record.following import replay
from engine.runs.record.run_folder import RunFolder, create_run
from engine.runs.summaries.listing import list_runs
from tests.support.disks import small_file_system
from tests.support.failing import (
    at_event,
    at_step,
    command,
    failed,
    fill,
    intact,
    plenty,
    refused,
    resumes_to_the_end,
    whole_checkpoints,
)
from tests.support.folders import make_config
from tests.support.forked_processes import ForkedProcess
from tests.support.rows import write_rows

ROOT = PROGRAM_ROOT


# ---------------------------------------------------------------------- the disk


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of 4 MiB."""
    with small_file_system(tmp_path / "small", 4) as place:
        yield place


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_a_disk_that_is_full_for_the_export(capsys, preset, small_disk, monkeypatch):
    monkeypatch.setattr(engine.training.loop.planning, "read_machine", plenty)
    at_event(
        monkeypatch,
        lambda e: isinstance(e, JobProgressed) and e.job == "export",
        lambda: fill(small_disk, 120_000),
    )
    monkeypatch.setattr("engine.training.export.export.disk_free", lambda path: 1 << 40)
    arguments = ("--runs-dir", small_disk, "train", preset, "--set", "output.export=true")
    code, _, sentence = command(capsys, *arguments)
    assert code == 1 and "model cannot be written" in sentence
    (small_disk / "ballast").unlink()
    run = list_runs(small_disk)[0]
    assert run.state == "finished" and run.export_failed
    assert whole_checkpoints(Path(run.path)) == 8
    target = Path(run.path) / "export"
    assert command(capsys, "--runs-dir", small_disk, "export", run.id, target)[0] == 0
    assert (target / "model.safetensors").exists()
    assert not list_runs(small_disk)[0].export_failed


def test_what_is_asked_on_a_full_disk_is_refused_whole_or_taken_whole(small_disk, tmp_path):
    folder = create_run(small_disk, make_config(tmp_path))
    with folder.lock():
        reader, ballast, taken = CommandReader(folder), fill(small_disk), 0
        with pytest.raises(
            RunError, match="cannot be written.*No space left on device.*free some disk space"
        ):
            while taken < 10_000:
                send_command(folder, "save")
                taken += 1
        ballast.unlink()
        with open(folder.control_path, "ab") as file:  # some systems write half of it
            file.write(b'{"command": "pau')
        send_command(folder, "stop")
        assert reader.read_new() == ["save"] * taken + ["stop"]


def test_a_run_that_cannot_be_made_leaves_no_folder(small_disk, tmp_path):
    ballast = fill(small_disk)
    with pytest.raises(
        RunError, match="No space left on device.*free some disk space or choose another folder"
    ):
        create_run(small_disk, make_config(tmp_path))
    assert list(small_disk.iterdir()) == [ballast]


def test_a_form_is_kept_once_there_is_space_again(small_disk, tmp_path):
    draft, shown = Drafts(small_disk), shown_values(make_config(tmp_path))
    ballast = fill(small_disk)
    draft.remember(NO_TAB, None, shown)
    assert draft.recall() == (None, shown) and Drafts(small_disk).recall() is None
    assert list(small_disk.iterdir()) == [ballast]
    ballast.unlink()
    draft.remember(NO_TAB, None, shown)
    assert Drafts(small_disk).recall() == (None, shown)


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_files_that_may_not_grow(tmp_path, preset, runs):
    """A quota is imitated by RLIMIT_FSIZE, in a separate process, since the limit holds for a
    process.
    """
    limit = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, "
        f"{resource.RLIM_INFINITY})); sys.path.insert(0, {str(ROOT)!r}); import launch; "
        "sys.exit(launch.main(sys.argv[1:]))"
    )
    process = ForkedProcess(
        [
            sys.executable,
            "-c",
            limit,
            "--runs-dir",
            runs,
            "train",
            preset,
            "--set",
            "data.packing=false",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in out + err, err
    assert "File too large" in err.splitlines()[-1]
    intact(Path(list_runs(runs)[0].path))


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_disk_that_fails_to_sync(capsys, preset, runs, monkeypatch, call, whole):
    from engine.training.checkpoints import chunk_files

    if call == "fdatasync":  # without direct writes, every piece is synced by itself
        monkeypatch.setattr(chunk_files.ChunkFile, "_write_direct", lambda *_: 0)
    with monkeypatch.context() as broken:

        def fail(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        at_event(broken, at_step(4), lambda: broken.setattr(os, call, fail))
        sentence = failed(capsys, runs, preset, code=1)
    assert "checkpoint of step 6 cannot be written" in sentence and "Input/output error" in sentence
    assert whole_checkpoints(Path(list_runs(runs)[0].path)) == 3
    resumes_to_the_end(capsys, runs, whole)


def test_a_runs_folder_that_cannot_be_written(capsys, preset, tmp_path):
    assert "run folder cannot be made" in refused(capsys, Path("/proc/runs"), "train", preset)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "run folder cannot be made" in refused(capsys, tmp_path / "file", "train", preset)


# ---------------------------------------------------------------------- what is on the disk


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "cut":
        del content[-1]
    elif kind == "flipped":
        content[len(content) // 2] ^= 1
    elif kind == "emptied":
        content.clear()
    path.write_bytes(bytes(content)) if kind != "removed" else path.unlink()


@pytest.mark.parametrize("file", ["manifest.json", "0001-*.planes"])
@pytest.mark.parametrize("kind", ["cut", "flipped", "emptied", "removed"])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    capsys, runs, stopped_run, whole, file, kind
):
    newest = max(stopped_run.folder.checkpoints_path.iterdir(), key=lambda path: int(path.name[5:]))
    damage(next(newest.glob(file)), kind)
    resumes_to_the_end(capsys, runs, whole)
    records = intact(stopped_run.folder.path)
    assert [r.event.resumed_step for r in records if isinstance(r.event, RunStarted)] == [None, 3]


def test_when_every_checkpoint_is_damaged(capsys, runs, stopped_run):
    for path in stopped_run.folder.checkpoints_path.glob("*/0001-*.planes"):
        damage(path, "flipped")
    sentence = failed(capsys, runs, "--resume", stopped_run.id, code=1)
    assert "No checkpoint" in sentence and "start a new run" in sentence
    assert len(list(stopped_run.folder.checkpoints_path.iterdir())) == 2, "nothing is deleted"


def test_a_run_folder_of_a_newer_version_is_left_as_it_is(capsys, runs, stopped_run):
    path = stopped_run.folder.path / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(tree | {"swarm": {"nodes": 4}}), encoding="utf-8")
    sentence = refused(capsys, runs, "train", "--resume", stopped_run.id)
    assert "swarm" in sentence and "use the version that wrote it" in sentence


def test_a_run_folder_of_an_older_version_goes_on(capsys, runs, stopped_run, whole):
    """Settings, events and fields from later versions are missing, and so is the file with the
    session's time.
    """
    path = stopped_run.folder.path / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree["output"]["timeline_every"], tree["train"]["max_grad_norm"], tree["engine"]["rounds"]
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    lines = [json.loads(line) for line in stopped_run.folder.events_path.read_text().splitlines()]
    for line in lines:
        for late in ("exposed", "loss_tokens", "program_version", "error_type"):
            line.pop(late, None)
    write_rows(stopped_run.folder.events_path, lines)
    (stopped_run.folder.path / "session.json").unlink(missing_ok=True)
    resumes_to_the_end(capsys, runs, whole)


def test_a_record_cut_in_the_middle_of_a_line(capsys, runs, stopped_run, whole):
    content = stopped_run.folder.events_path.read_bytes()
    stopped_run.folder.events_path.write_bytes(content[:-25])
    resumes_to_the_end(capsys, runs, whole)
    assert (stopped_run.folder.path / "events.torn").exists()


def test_a_record_with_a_damaged_line_says_which_and_goes_on(capsys, runs, stopped_run, whole):
    content = bytearray(stopped_run.folder.events_path.read_bytes())
    content[content.index(b"\n") + 5] = 0
    stopped_run.folder.events_path.write_bytes(content)
    resumes_to_the_end(capsys, runs, whole)
    logged = [
        r.event.text for r in replay(stopped_run.folder.events_path) if isinstance(r.event, LogLine)
    ]
    assert any(text.startswith("Line 2 of") for text in logged)


def test_settings_that_are_damaged(capsys, runs, stopped_run):
    (stopped_run.folder.path / "config.yaml").write_bytes(b"train: [\x00")
    assert "config.yaml" in refused(capsys, runs, "train", "--resume", stopped_run.id)
    (stopped_run.folder.path / "config.yaml").unlink()
    assert "config.yaml" in refused(capsys, runs, "train", "--resume", stopped_run.id)


def test_fewer_steps_than_are_done(capsys, runs, stopped_run):
    stopped_run.folder.config.with_values({"train.steps": 5}).save(
        stopped_run.folder.path / "config.yaml"
    )
    assert "has done 6 steps, more than the 5" in failed(
        capsys, runs, "--resume", stopped_run.id, code=1
    )


def test_other_settings_may_change_between_sessions_and_are_told(capsys, runs, stopped_run):
    changed = stopped_run.folder.config.with_values({"train.learning_rate": 1e-4, "train.steps": 9})
    changed.save(stopped_run.folder.path / "config.yaml")
    assert command(capsys, "--runs-dir", runs, "train", "--resume", stopped_run.id)[0] == 0
    found = [
        r.event.text
        for r in replay(stopped_run.folder.events_path)
        if isinstance(r.event, LogLine) and r.event.level == "warning"
    ]
    assert any(
        "train.learning_rate was" in text and "up to step 6 and is 0.0001 from here on" in text
        for text in found
    )
    assert any("was to have 8 steps and has 9 now" in text for text in found)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("commands", [("stop",), ("stop", "pause", "resume", "save")])
def test_twenty_who_stop_a_run_of_another_process_at_once_end_it_once(
    capsys, runs, preset, monkeypatch, whole, commands
):
    def ask():
        folder = RunFolder(Path(list_runs(runs)[0].path))
        askers = [
            threading.Thread(target=send_command, args=(folder, commands[number % len(commands)]))
            for number in range(20)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()

    at_event(monkeypatch, at_step(4), ask)
    assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 0
    records = intact(Path(list_runs(runs)[0].path))
    assert [r.event.state for r in records if isinstance(r.event, RunEnded)] == ["stopped"]
    assert [r.event.command for r in records if isinstance(r.event, ControlReceived)].count(
        "stop"
    ) == 1
    resumes_to_the_end(capsys, runs, whole)
