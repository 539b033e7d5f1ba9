"""Files in folders that others may have written: what is a link, a pipe, a device, a folder, too
large or of another form is told and neither followed nor waited for.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from engine import safe_files
from engine.errors import RunError
from engine.safe_files import FileFault


class Noted(msgspec.Struct):
    """A small typed file."""

    pid: int
    started: float


@pytest.fixture
def run(tmp_path):
    """A run folder in a runs folder to which its owner has made a link."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    return tmp_path / "runs" / "run"


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    return folder


def a_link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "victim" / "notes.txt")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def a_device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may make a device")
    os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero


ODD = {
    "is a link": a_link,
    "link, which is not followed": a_link_to_itself,
    "is a pipe": os.mkfifo,
    "is a folder": os.mkdir,
    "is a socket": a_socket,
    "is a device": a_device,
}


@pytest.mark.parametrize("text", ODD)
def test_what_is_no_file_is_neither_read_nor_written(run, victim, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, runs = run / "lock", run.parent
    ODD[text](path)
    for call in (
        lambda: safe_files.read_bytes(path, runs),
        lambda: safe_files.read_json(path, runs, Noted),
        lambda: safe_files.open_to_append(path, runs),
        lambda: safe_files.open_lock(path, runs, makes=True),
        lambda: safe_files.open_lock(path, runs, makes=False),
        lambda: safe_files.size_of(path, runs),
    ):
        with pytest.raises(FileFault, match=text) as found:
            call()
        assert str(path) in str(found.value) and found.value.filename == str(path)
    assert (victim / "notes.txt").read_text() == "mine"


def test_a_whole_file_takes_the_place_of_a_link(run, victim):
    path = run / "about.json"
    path.symlink_to(victim / "notes.txt")
    safe_files.write_whole(path, "new", run.parent)
    assert path.read_text() == "new" and not path.is_symlink()
    assert [file.name for file in run.iterdir()] == ["about.json"]
    assert (victim / "notes.txt").read_text() == "mine"


def test_no_folder_below_the_trusted_one_is_a_link(run, victim):
    (run / "best").symlink_to(victim)
    path, runs = run / "best" / "notes.txt", run.parent
    for call in (
        lambda: safe_files.read_bytes(path, runs),
        lambda: safe_files.write_whole(path, "new", runs),
        lambda: safe_files.make_folder(run / "best" / "made", runs),
        lambda: safe_files.make_folder(run / "best", runs, exist_ok=True),
        lambda: safe_files.entries(run / "best", runs),
        lambda: safe_files.remove_tree(path, runs),
        lambda: safe_files.rename(path, run / "here", runs),
    ):
        with pytest.raises(FileFault, match="best is a link"):
            call()
    safe_files.remove_tree(run / "best", runs)
    assert not os.path.lexists(run / "best")
    assert [file.read_text() for file in victim.iterdir()] == ["mine"]


@pytest.mark.parametrize("outside", ["../victim/notes.txt", "run/../../victim/notes.txt", ""])
def test_a_path_leads_to_nothing_outside(run, victim, outside):
    with pytest.raises(FileFault, match="is not inside"):
        safe_files.read_bytes(run.parent / outside, run.parent)


def test_a_tree_goes_without_what_its_links_lead_to(run, victim):
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-2").symlink_to(victim)
    (run / "checkpoints" / "step-1" / "weights").symlink_to(victim / "notes.txt")
    safe_files.remove_tree(run / "checkpoints", run.parent)
    safe_files.remove_tree(run / "none", run.parent)
    assert not list(run.iterdir()) and (victim / "notes.txt").read_text() == "mine"


def test_what_has_a_second_name_is_copied_before_it_is_appended_to(run, victim):
    path = run / "events.jsonl"
    os.link(victim / "notes.txt", path)
    descriptor = safe_files.open_to_append(path, run.parent)
    os.write(descriptor, b" and more")
    os.close(descriptor)
    assert path.read_text() == "mine and more" and len(list(run.iterdir())) == 1
    assert (victim / "notes.txt").read_text() == "mine"
    os.link(victim / "notes.txt", run / "lock")
    descriptor = safe_files.open_lock(run / "lock", run.parent, makes=True)
    safe_files.write_over(descriptor, b"17\n")
    os.close(descriptor)
    assert (victim / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"pid": 1, "started": 1e400}', "started"),
        (b'{"pid": "1", "started": 1}', "Expected `int`, got `str`"),
        (b'{"started": 1}', "pid"),
        (b"[" * 100_000, "nested too deeply|as this program"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply"),
        (b'{"pid": 1', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON|as this program"),
        (b"", "not valid JSON"),
    ],
)
def test_a_typed_file_of_another_form_is_told(run, content, text):
    path = run / "detached.json"
    path.write_bytes(content)
    with pytest.raises(FileFault, match=text):
        safe_files.read_json(path, run.parent, Noted)


def test_a_file_is_read_up_to_its_limit(run):
    path = run / "about.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(FileFault, match="104,857,600 bytes; at most"):
        safe_files.read_bytes(path, run.parent)
    path.write_bytes(b"1234")
    assert safe_files.read_bytes(path, run.parent, most=4) == b"1234"


def test_a_fault_is_an_error_of_a_run_and_of_the_system():
    """Callers that say more about a file add `strerror`; others show the sentence."""
    fault = FileFault("/runs/a/lock", "is a link")
    assert isinstance(fault, RunError) and isinstance(fault, OSError)
    assert str(fault) == "/runs/a/lock is a link." and fault.strerror == "it is a link"


def test_errors_of_the_system_name_the_whole_path(run):
    with pytest.raises(FileNotFoundError) as found:
        safe_files.read_bytes(run / "best" / "none", run.parent)
    assert found.value.filename == str(run / "best" / "none")
    assert safe_files.lstat(run / "best" / "none", run.parent) is None
    assert safe_files.size_of(run / "none", run.parent) == 0


def test_modes_of_what_is_made(run):
    before = os.umask(0o022)
    try:
        safe_files.make_folder(run / "made", run.parent)
        safe_files.write_whole(run / "about.json", "{}", run.parent)
        safe_files.write_whole(run / "queue.json", "{}", run.parent, mode=safe_files.PRIVATE)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in run.iterdir()}
    assert modes == {"made": 0o700, "about.json": 0o644, "queue.json": 0o600}
