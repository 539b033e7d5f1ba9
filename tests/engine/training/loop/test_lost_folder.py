"""A run whose folder is deleted or renamed, or whose disk is unmounted, ends with one sentence."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import (
    EvalFinished,
    JobProgressed,
    RunEnded,
    StateChanged,
    StepFinished,
)
from engine.runs.record.following import replay
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from engine.training.checkpoints import staging, unit_files
from engine.training.loop.run import start_run
from tests.support.disks import small_file_system
from tests.support.failing import MOMENTS, at_event, at_step, command, equals, plenty
from tests.support.folders import make_config
from tests.support.trained_runs import execute

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")

SECONDS = 60


def only_run(runs: Path) -> Path:
    (path,) = (path for path in runs.iterdir() if path.is_dir())
    return path


def delete(runs: Path) -> None:
    folder = only_run(runs)
    while folder.exists():
        # The run may delete a file of its own at the same moment, which ends rmtree.
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def rename(runs: Path) -> None:
    only_run(runs).rename(runs.parent / "renamed")


def rename_all(runs: Path) -> None:
    runs.rename(runs.parent / "renamed")


def replace(runs: Path) -> None:
    """What stands there after an unmount: an empty folder."""
    path = only_run(runs)
    path.rename(runs.parent / "renamed")
    path.mkdir()


def files_below(path: Path) -> list[Path]:
    return [found for found in path.rglob("*") if not found.is_dir()]


ALL_MOMENTS = MOMENTS | {
    "after an evaluation": lambda e: isinstance(e, EvalFinished),
    "in the export": lambda e: isinstance(e, JobProgressed) and e.job == "export",
    "at the last record": lambda e: isinstance(e, RunEnded),
}


@pytest.mark.parametrize(
    "moment, lose",
    [
        *((moment, delete) for moment in ALL_MOMENTS),
        *(("in a step", lose) for lose in (rename, rename_all, replace)),
        *(("in a checkpoint", lose) for lose in (rename, replace)),
        ("at the last record", rename),
    ],
)
def test_a_folder_that_vanishes_ends_the_run(capsys, tmp_path, runs, monkeypatch, moment, lose):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **{"output.export": True}).save(preset)
    path = []

    def lose_it():
        path.append(only_run(runs))
        lose(runs)

    with monkeypatch.context() as losing:
        at_event(losing, ALL_MOMENTS[moment], lose_it)
        code, _, sentence = command(capsys, "--runs-dir", runs, "train", preset)
    assert code == 1
    assert sentence == (
        f"The run's folder {path[0]} is gone: it was deleted or renamed, or its disk was "
        "unmounted; put it back and resume the run, or start a new one."
    )
    # Nothing is made anew in its place.
    assert files_below(runs) == []
    assert path[0].is_dir() == (lose is replace)
    moved = tmp_path / "renamed"
    if lose is rename_all:
        moved = only_run(moved)
    if lose is not delete:
        ended = list(replay(moved / "events.jsonl"))[-1].event
        assert ended == RunEnded("failed", sentence, "RunError")
        assert not RunFolder(moved).is_running()


def test_a_folder_that_is_put_back_goes_on(capsys, preset, runs, tmp_path, monkeypatch, whole):
    with monkeypatch.context() as losing:
        at_event(losing, at_step(5), lambda: rename(runs))
        assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 1
    assert list_runs(runs) == []
    run_id = next(replay(tmp_path / "renamed" / "events.jsonl")).run_id
    (tmp_path / "renamed").rename(runs / run_id)
    assert list_runs(runs)[0].state == "failed"
    assert command(capsys, "--runs-dir", runs, "train", "--resume", run_id)[0] == 0
    equals(RunFolder(runs / run_id), whole)


def test_a_disk_that_is_unmounted_ends_the_run(capsys, tmp_path, preset, monkeypatch):
    monkeypatch.setattr("engine.training.loop.planning.read_machine", plenty, raising=False)
    with small_file_system(tmp_path / "disk", 60) as disk:
        with monkeypatch.context() as losing:
            unmount = ["umount", "--lazy", disk]
            at_event(losing, at_step(4), lambda: subprocess.run(unmount, check=True))
            code, _, sentence = command(capsys, "--runs-dir", disk, "train", preset)
        assert code == 1 and "or its disk was unmounted" in sentence
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)  # for the end of this


@pytest.mark.parametrize("lose", [delete, rename, replace])
def test_a_paused_run_notices_it_too(tmp_path, runs, lose):
    run = start_run(make_config(tmp_path), runs)
    paused = threading.Event()
    run.recorder.subscribe(
        lambda r: (
            paused.set()
            if isinstance(r.event, StateChanged) and r.event.state == "paused"
            else None
        )
    )
    ended = []
    thread = threading.Thread(target=lambda: ended.append(execute(run, {4: "pause"})))
    thread.start()
    assert paused.wait(SECONDS)
    lose(runs)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert ended[0].state == "failed"
    assert "is gone" in ended[0].reason


@pytest.mark.parametrize("lose", [delete, rename])
def test_so_does_one_that_writes_a_checkpoint_beside_training(tmp_path, runs, monkeypatch, lose):
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    for place, name in ((checkpoint_sizes, "STAGING_CHUNK_BYTES"), (staging, "CHUNK_BYTES")):
        monkeypatch.setattr(place, name, 4096)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 4096)
    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 1}), runs)
    write, begun = unit_files.ChunkFile.write, []

    def write_and_lose(self, piece, offset):
        write(self, piece, offset)
        if not begun:
            begun.append(offset)
            lose(runs)

    monkeypatch.setattr(unit_files.ChunkFile, "write", write_and_lose)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run.execute()))
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert ended[0].state == "failed" and "is gone" in ended[0].reason
    assert begun and files_below(runs) == []


def test_a_disk_that_does_not_answer_ends_no_run(tmp_path, monkeypatch):
    """Only the next write tells whether it is still there."""
    recorder = RunRecorder(tmp_path, "r")

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as silent:
        silent.setattr(Path, "stat", refuse)
        recorder.emit(StepFinished(1))
    recorder.emit(RunEnded())
    recorder.close()
    assert recorder.snapshot.step == 1 and recorder.snapshot.is_over
