"""Which checkpoints a folder keeps, and what a disk without space does to them."""

from __future__ import annotations

import errno
import shutil
from types import SimpleNamespace

import pytest
import torch

from engine import safe_files
from engine.errors import CheckpointError
from engine.training.checkpoints.checkpoint import Contents, checkpoint_bytes, write_checkpoint
from engine.training.checkpoints.restore import (
    load_checkpoint,
    load_newest_checkpoint,
    newest_checkpoint,
)
from tests.support.filled_states import content, names

pytestmark = pytest.mark.usefixtures("small_chunks")


# ---------------------------------------------------------------------- space on the disk


def test_a_full_disk_is_seen_before_anything_is_written(two, new_states, monkeypatch):
    root, _ = two
    states = new_states()
    needed = checkpoint_bytes(states)
    (root / ".step-9.partial").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    says = rf"^The checkpoint of step 3 needs [\d,]+ bytes in .* and {needed - 1:,} are free; "
    with pytest.raises(CheckpointError, match=says):
        write_checkpoint(root, 3, Contents(states, {}), keep=1)
    assert names(root) == ["step-1", "step-2"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * needed + 2**21))
    write_checkpoint(root, 3, Contents(states, {}), keep=1)
    assert names(root) == ["step-3"]


def test_the_space_for_buffers_is_counted(tmp_path, new_states, monkeypatch):
    states, buffers = new_states(), {"router.bias": torch.zeros(1 << 20)}
    free = checkpoint_bytes(states) + 2 * (1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(CheckpointError, match="The checkpoint of step 3 needs"):
        write_checkpoint(tmp_path, 3, Contents(states, {}, buffers), keep=1)
    write_checkpoint(tmp_path, 3, Contents(states, {}), keep=1)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, new_states, keep):
    states = new_states()
    for step in (2, 9, 10, 100):
        write_checkpoint(tmp_path, step, Contents(states, {}), keep=keep)
    assert names(tmp_path) == sorted(f"step-{step}" for step in (2, 9, 10, 100)[-keep:])


def test_one_that_was_being_replaced_by_a_killed_writer_gets_its_name_back(two, new_states):
    root, _ = two
    (root / "step-2").rename(root / ".step-2.old")
    write_checkpoint(root, 3, Contents(new_states(), {}), keep=3)
    assert names(root) == ["step-1", "step-2", "step-3"]


def test_older_ones_go_only_after_the_new_one_is_there(two, new_states, monkeypatch):
    root, _ = two
    rename = safe_files.rename

    def failing(path, other, within):
        if path.suffix == ".partial":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, other, within)

    monkeypatch.setattr(safe_files, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_checkpoint(root, 3, Contents(new_states(), {}), keep=1)
    assert names(root) == ["step-1", "step-2"]


def test_after_a_resume_of_an_older_step_the_later_ones_go(two, new_states):
    root, _ = two
    states = new_states(seed=5)
    write_checkpoint(root, 40, Contents(states, {}), keep=5)
    (root / "step-40" / "manifest.json").unlink()
    write_checkpoint(root, 5, Contents(states, {}), keep=5)
    assert names(root) == ["step-1", "step-2", "step-5"] and newest_checkpoint(root).step == 5


def test_the_same_step_again_replaces_it(two, new_states):
    root, held = two
    states = new_states(seed=9)
    write_checkpoint(root, 2, Contents(states, {"again": True}), keep=5)
    assert names(root) == ["step-1", "step-2"]
    other = new_states()
    assert load_newest_checkpoint(root, other, {}).state == {"again": True}
    assert content(other) == content(states) != held[2]


def test_a_replacement_that_was_killed_between_its_two_renames_loses_nothing(two, new_states):
    root, held = two
    (root / "step-2").rename(root / ".step-2.old")
    (root / ".step-2.partial").mkdir()
    states = new_states()
    assert load_newest_checkpoint(root, states, {}).step == 2 and content(states) == held[2]
    write_checkpoint(root, 3, Contents(states, {}), keep=5)
    assert names(root) == ["step-1", "step-2", "step-3"]
    assert load_checkpoint(root / "step-2", states, {}).state == {"step": 2}


def test_the_folder_cannot_be_made(tmp_path, new_states):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written in .*file"):
        write_checkpoint(tmp_path / "file", 1, Contents(new_states(), {}), keep=1)
