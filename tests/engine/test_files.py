"""Files that are written whole: in which order the system is asked, and what is left when it
refuses.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.files import bytes_in
from engine.runs.record.run_folder import create_run
from engine.safe_files import write_whole
from tests.support.run_folders import CONFIG, named


@pytest.fixture
def asked(monkeypatch):
    """What the system is asked to do with files, in order: (fsync, name, bytes there by then) and
    (rename, from, to).
    """
    calls = []
    fsync, replace = os.fsync, os.replace

    def noting_sync(descriptor):
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(
            ("fsync", place.name, None if place.is_dir() else os.fstat(descriptor).st_size)
        )
        fsync(descriptor)

    def noting_rename(old, new, **folders):
        calls.append(("rename", Path(old).name, Path(new).name))
        replace(old, new, **folders)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_rename)
    return calls


def durably(calls: list[tuple], path: Path) -> None:
    """`path` was written, synced, renamed into place, and its name was synced."""
    written, renamed, named_there = calls
    assert written == ("fsync", renamed[1], path.stat().st_size) and path.stat().st_size
    assert renamed[0] == "rename" and renamed[2] == path.name != renamed[1]
    assert named_there == ("fsync", path.parent.name, None)


def test_the_settings_of_a_new_run_survive_a_power_failure(tmp_path, asked):
    folder = create_run(tmp_path / "runs", CONFIG)
    durably(asked[:-1], folder.path / "config.yaml")
    assert asked[-1] == ("fsync", "runs", None)


def test_changed_settings_of_a_run_survive_a_power_failure(tmp_path, asked):
    folder = create_run(tmp_path, CONFIG)
    asked.clear()
    folder.save_config(named("other"))
    durably(asked, folder.path / "config.yaml")
    assert folder.config.name == "other"


def test_a_file_that_may_be_lost_waits_for_no_disk(tmp_path, asked):
    write_whole(tmp_path / "file", "ä", tmp_path, durable=False)
    assert [call[0] for call in asked] == ["rename"]
    assert (tmp_path / "file").read_bytes() == "ä".encode()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_refusal_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", "new", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_the_longest_name_that_a_folder_takes(tmp_path):
    write_whole(tmp_path / ("ü" * 127), b"content", tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"content"]


def test_a_file_with_several_names_takes_its_bytes_once(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run / "step-1", run / "step-2", other):
        folder.mkdir(parents=True)
    (run / "step-1" / "weights").write_bytes(bytes(3000))
    (run / "step-2" / "moments").write_bytes(bytes(700))
    os.link(run / "step-1" / "weights", run / "step-2" / "weights")
    os.symlink(run / "step-1", run / "newest")
    assert bytes_in(run) == 3700 + (run / "newest").lstat().st_size
    assert bytes_in(run / "step-1") == 1500 and bytes_in(run / "step-2") == 2200
    assert bytes_in(other) == bytes_in(tmp_path / "none") == 0
