"""Runs in which moments are on the disk: what they write is what a run with all moments in RAM
writes, the border may move when they are resumed, and nothing of theirs stays in the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.paths import PROGRAM_ROOT
from engine.planning.schedule.ops import OpKind
from engine.runs.record.events import LogLine, PlanBuilt, PlannedAnew, RunEnded, StepFinished
from engine.runtime.host.disk_planes import DiskPlanes
from engine.runtime.step import copy_ops
from engine.training.loop.run import resume_run
from tests.support.disk_offloading import UNITS, offload_to_disk, train
from tests.support.disks import small_file_system
from tests.support.failing import full_at
from tests.support.forked_processes import ForkedProcess
from tests.support.gpu_resident_runs import Written
from tests.support.killed import ONE_THREAD, die
from tests.support.optimizers import IN_CHUNKS
from tests.support.trained_runs import events_of, execute, files_of

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("optimizer", IN_CHUNKS)
@pytest.mark.parametrize("count", [1, 3, UNITS])
def test_a_run_writes_what_a_run_with_moments_in_ram_writes(
    tmp_path, in_ram, monkeypatch, optimizer, count
):
    values = {
        "model.dtype": "bfloat16",
        "train.optimizer": optimizer,
        "output.eval_every": 2,
        "output.export": True,
    }
    expected = in_ram(**values)
    offload_to_disk(count, monkeypatch)
    run = train(tmp_path, "disk-offload", **values)
    assert events_of(run, PlanBuilt)[0].choices["disk_offloaded_units"] == count
    assert Written.by(run) == expected
    assert expected.files
    assert expected.exported
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("before, after", [(0, 3), (UNITS, 2), (2, 0)])
def test_the_border_moves_at_a_resume(tmp_path, in_ram, monkeypatch, before, after):
    expected = in_ram()
    offload_to_disk(before, monkeypatch)
    run = train(tmp_path, "moves", at_step={3: "stop"})
    offload_to_disk(after, monkeypatch)
    again = resume_run(tmp_path / "moves", run.folder.id)
    execute(again)
    assert events_of(again, PlanBuilt)[-1].choices["disk_offloaded_units"] == after
    assert files_of(again)[8] == expected.files[8]


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_moments_go_to_the_disk_in_another_kind(tmp_path, monkeypatch):
    """A resume with smaller moments converts those of the checkpoint, wherever they go."""
    run = train(tmp_path, "in-ram", at_step={3: "stop"})
    offloading = train(tmp_path, "disk-offload", at_step={3: "stop"})
    found = []
    for folder, one, count in (("in-ram", run, 0), ("disk-offload", offloading, 3)):
        offload_to_disk(count, monkeypatch)
        again = resume_run(tmp_path / folder, one.folder.id, ["train.optimizer=adamw_8bit"])
        execute(again)
        found.append(files_of(again)[8])
    assert found[0] == found[1]


def test_a_step_is_planned_anew_with_moments_where_they_are(tmp_path, in_ram, monkeypatch):
    expected = in_ram()
    offload_to_disk(3, monkeypatch)
    failed = full_at(monkeypatch, 4, OpKind.LOSS, times=1)
    run = train(tmp_path, "runs-out")
    (anew,) = events_of(run, PlannedAnew)
    assert anew.step == 4 and failed
    assert events_of(run, RunEnded)[-1].state == "finished"
    assert files_of(run)[8] == expected.files[8]


# ---------------------------------------------------------------------- faults


def failing_at(step: int, call: str, monkeypatch) -> None:
    """Makes reads or writes of chunks fail from this update of AdamW on."""
    seen, plain = [], getattr(DiskPlanes, call)

    def fail(self, unit, start, ring):
        seen.append(unit)
        if seen.count("head") > (step - 1) * len(self._chunks["head"]):
            monkeypatch.setattr(os, "preadv" if call == "read_chunk" else "pwritev", refused)
        plain(self, unit, start, ring)

    def refused(*_):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(DiskPlanes, call, fail)


@pytest.mark.parametrize("call", ["read_chunk", "write_chunk"])
def test_the_newest_checkpoint_counts_where_the_disk_fails(tmp_path, in_ram, monkeypatch, call):
    expected = in_ram()
    offload_to_disk(2, monkeypatch)
    with monkeypatch.context() as broken:
        failing_at(5, call, broken)
        run = train(tmp_path, "fails", **{"output.checkpoint_every": 3})
    ended = events_of(run, RunEnded)[-1]
    assert ended.state == "failed" and ended.error_type == "DiskOffloadError"
    what = "read" if call == "read_chunk" else "written"
    assert f"cannot be {what} (Input/output error); check that disk" in ended.reason
    assert "step 3" in ended.reason
    assert "\n" not in ended.reason
    assert list((tmp_path / "disk").iterdir()) == []
    again = resume_run(tmp_path / "fails", run.folder.id)
    execute(again)
    assert files_of(again)[8] == expected.files[8]


def test_a_folder_that_is_removed_changes_nothing(tmp_path, in_ram, monkeypatch):
    """The files have no names, so nobody can remove them."""
    expected = in_ram()
    offload_to_disk(2, monkeypatch)
    update = copy_ops.WORK[OpKind.CLIP]

    def removes(context, op, step):
        if step.inputs.number == 3:
            (tmp_path / "disk").rmdir()
        update(context, op, step)

    monkeypatch.setitem(copy_ops.WORK, OpKind.CLIP, removes)
    run = train(tmp_path, "removed")
    assert events_of(run, RunEnded)[-1].state == "finished"
    assert not (tmp_path / "disk").exists()
    assert files_of(run)[8] == expected.files[8]


def test_a_disk_that_is_too_small_is_told_before_training(tmp_path, monkeypatch):
    offload_to_disk(UNITS, monkeypatch)
    monkeypatch.setattr("engine.machine.offload_folder._IN_RAM", ())
    with small_file_system(tmp_path / "small", 1) as place:
        (place / "full").write_bytes(b"x" * 900_000)
        run = train(tmp_path, "full", **{"engine.disk": str(place)})
        ended = events_of(run, RunEnded)[-1]
        assert ended.state == "failed"
        assert ended.reason.startswith("The disk is full: moments that engine.disk keeps in ")
        assert [path.name for path in place.iterdir()] == ["full"]


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_wrong_folder_is_refused_at_once(tmp_path, name):
    (tmp_path / "file").touch()
    run = train(tmp_path, "refused", **{"engine.disk": str(tmp_path / name)})
    ended = events_of(run, RunEnded)[-1]
    assert ended.state == "failed" and ended.reason.startswith("engine.disk: ")
    assert str(tmp_path / name) in ended.reason


def test_the_log_tells_what_is_on_the_disk(tmp_path, monkeypatch):
    offload_to_disk(2, monkeypatch)
    run = train(tmp_path, "told")
    lines = [event.text for event in events_of(run, LogLine)]
    assert any("Moments of 2 of 5 units" in line and "no checkpoint" in line for line in lines)


# ---------------------------------------------------------------------- kill -9


def killed_run(folder: Path) -> None:
    """Trains with all moments on the disk, and dies while those of step 5 are written."""
    patch = SimpleNamespace(setattr=setattr)
    offload_to_disk(UNITS, patch)
    plain, seen = DiskPlanes.write_chunk, []

    def write(self, unit, start, ring):
        seen.append(unit)
        if seen.count("head") == 4 * len(self._chunks["head"]) + 2:
            die()
        plain(self, unit, start, ring)

    DiskPlanes.write_chunk = write
    train(folder, "killed", **{"output.checkpoint_every": 2})


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Returns the runs of a process that died, which left nothing on the disk."""
    folder = tmp_path_factory.mktemp("killed")
    process = ForkedProcess(
        [sys.executable, "-m", "tests.engine.training.loop.test_disk_offload_runs", str(folder)],
        cwd=PROGRAM_ROOT,
        env=os.environ | ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, said
    assert list((folder / "disk").iterdir()) == []
    return folder / "killed"


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("after", [0, 2, UNITS])
def test_a_killed_run_is_resumed_bit_for_bit_and_leaves_nothing(
    tmp_path, in_ram, killed, monkeypatch, after
):
    expected = in_ram()
    shutil.copytree(killed, tmp_path / "killed")
    (folder,) = (tmp_path / "killed").iterdir()
    offload_to_disk(after, monkeypatch)
    again = resume_run(tmp_path / "killed", folder.name)
    execute(again)
    assert [event.step for event in events_of(again, StepFinished)][-4:] == [5, 6, 7, 8]
    assert again.folder.checkpoints_path.is_relative_to(tmp_path)
    assert files_of(again)[8] == expected.files[8]
    assert list((killed.parent / "disk").iterdir()) == []


if __name__ == "__main__":
    killed_run(Path(sys.argv[1]))
