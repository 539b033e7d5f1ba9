"""Run folders are tested: ids, the lock and what `interrupted` means, deletion, and commands from
other processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import ConfigError, RunError
from engine.paths import PROGRAM_ROOT
from engine.runs.record.control import COMMANDS, CommandReader, send_command
from engine.runs.record.run_folder import RunFolder, create_run, delete_run, open_run, shown_state
from tests.support.run_folders import CONFIG, named

# ---------------------------------------------------------------------- folders


def test_a_new_run_has_its_configuration_and_can_be_opened(tmp_path):
    folder = create_run(tmp_path / "deep" / "runs", CONFIG)
    assert re.fullmatch(r"\d{8}-\d{6}-my-run", folder.id) and folder.path.name == folder.id
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]
    again = open_run(tmp_path / "deep" / "runs", folder.id)
    assert again.config == CONFIG and again.path == folder.path
    assert (again.events_path.name, again.checkpoints_path.name, again.export_path.name) == (
        "events.jsonl",
        "checkpoints",
        "export",
    )
    assert os.fspath(again) == str(folder.path)


def test_ids_are_unique_within_a_second(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        ids = [folder.id for folder in pool.map(lambda _: create_run(tmp_path, CONFIG), range(24))]
    assert len(set(ids)) == 24
    assert all(open_run(tmp_path, run_id).config == CONFIG for run_id in ids)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Tschüß Ünder", "tschu-under"),
        ("한국어", "run"),
        ("", "run"),
        ("../../etc/passwd", "etc-passwd"),
        ("a" * 300, "a" * 40),
        ("<b>x</b>\n", "b-x-b"),
        ("-.-", "run"),
    ],
)
def test_any_name_makes_a_plain_id(tmp_path, name, slug):
    folder = create_run(tmp_path, named(name))
    assert folder.id[16:] == slug and folder.path.parent == tmp_path
    assert open_run(tmp_path, folder.id).config.name == name


@pytest.mark.parametrize(
    "run_id",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".hidden", "a\n", "a\0", "-x", "a" * 129, "ä"],
)
def test_ids_that_are_no_folder_name_are_refused(tmp_path, run_id):
    (tmp_path / "x").mkdir()
    for act in (open_run, delete_run):
        with pytest.raises(RunError, match="is not a run id"):
            act(tmp_path / "x", run_id)
    assert (tmp_path / "x").is_dir()


def test_errors_are_plain(tmp_path):
    with pytest.raises(RunError, match="There is no run 20250101-000000-x in "):
        open_run(tmp_path, "20250101-000000-x")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="A run folder cannot be made in .*file"):
        create_run(tmp_path / "file", CONFIG)
    folder = create_run(tmp_path, CONFIG)
    (folder.path / "config.yaml").write_text("trian: {}")
    with pytest.raises(ConfigError, match="trian"):
        _ = folder.config
    with pytest.raises(RunError, match="cannot be locked"), RunFolder(tmp_path / "gone").lock():
        pass


# ---------------------------------------------------------------------- lock


def holding_process(folder: RunFolder) -> subprocess.Popen:
    code = (
        "import sys; from pathlib import Path\n"
        "from engine.runs.record.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder.path],
        cwd=PROGRAM_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen, sent: signal.Signals) -> None:
    process.send_signal(sent)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_the_lock_excludes_within_a_process(tmp_path):
    folder, other = create_run(tmp_path, CONFIG), None
    assert not folder.is_running()
    with folder.lock():
        other = open_run(tmp_path, folder.id)
        assert folder.is_running() and other.is_running()
        for same in (folder, other):
            with pytest.raises(RunError, match=f"in use by process {os.getpid()}"), same.lock():
                pass
        CommandReader(folder)  # the refused attempt did not affect the holder
    assert not folder.is_running()
    with other.lock():
        assert folder.is_running()


def test_the_lock_ends_with_its_process(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    process = holding_process(folder)
    try:
        assert folder.is_running()
        with pytest.raises(RunError, match=f"in use by process {process.pid}"), folder.lock():
            pass
    finally:
        end(process, signal.SIGKILL)
    assert not folder.is_running()
    with folder.lock():
        pass


def test_the_lock_is_not_inherited_by_forked_children(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    with folder.lock():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
    assert not folder.is_running()
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from engine.runs.record.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n"
        "    reading, writing = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(writing, b'.')\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    os.read(reading, 1)\n"
        "    print(child, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, folder.path],
        cwd=PROGRAM_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    orphan = int(process.stdout.readline())
    process.wait()
    os.kill(orphan, 0)  # the child outlives its parent
    assert not folder.is_running()
    process.stdin.close()
    process.stdout.close()


def test_watching_does_not_disturb_taking_the_lock(tmp_path, monkeypatch):
    """A watcher that calls `is_running` holds the lock for an instant."""
    folder = create_run(tmp_path, CONFIG)
    with open(folder.path / "lock", "w") as watcher:
        fcntl.flock(watcher, fcntl.LOCK_SH)
        assert not folder.is_running()  # watchers do not disturb each other either
        monkeypatch.setattr(
            "engine.runs.record.run_folder.time.sleep",
            lambda seconds: fcntl.flock(watcher, fcntl.LOCK_UN),
        )
        with folder.lock():
            assert folder.is_running()


def test_interrupted_is_unfinished_and_held_by_nobody():
    assert shown_state("running", True) == "running"
    assert shown_state("running", False) == "interrupted"
    assert shown_state("paused", False) == shown_state("preparing", False) == "interrupted"
    for state in ("finished", "stopped", "failed", "discarded"):
        assert shown_state(state, False) == shown_state(state, True) == state


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_a_lock_that_cannot_be_asked_counts_as_held(tmp_path, monkeypatch, number):
    folder = create_run(tmp_path, CONFIG)
    assert not folder.is_running()

    def refused(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refused)
        assert folder.is_running()
    with folder.lock():
        pass
    with monkeypatch.context() as patched:
        patched.setattr("engine.runs.record.run_folder.fcntl.flock", refused)
        assert folder.is_running()


# ---------------------------------------------------------------------- deleting


def test_a_run_is_deleted_only_when_nobody_holds_it(tmp_path):
    folder, neighbor = create_run(tmp_path, CONFIG), create_run(tmp_path, CONFIG)
    (folder.checkpoints_path / "step-1").mkdir(parents=True)
    with folder.lock(), pytest.raises(RunError, match="in use"):
        delete_run(tmp_path, folder.id)
    assert open_run(tmp_path, folder.id).config == CONFIG
    (tmp_path / ".deleted-half-way" / "checkpoints").mkdir(parents=True)
    delete_run(tmp_path, folder.id)
    assert [path.name for path in tmp_path.iterdir()] == [neighbor.id]


def test_deleting_a_linked_run_leaves_what_it_links_to(tmp_path):
    elsewhere = create_run(tmp_path / "elsewhere", CONFIG)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(elsewhere.path)
    delete_run(tmp_path / "runs", "linked")
    assert list((tmp_path / "runs").iterdir()) == [] and elsewhere.config == CONFIG


# ---------------------------------------------------------------------- commands


def test_commands_reach_the_process_that_holds_the_run(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    with pytest.raises(RunError, match="is not running, so it cannot stop"):
        send_command(folder, "stop")
    with folder.lock():
        sender = open_run(tmp_path, folder.id)
        send_command(sender, "pause")  # before the reader exists, after the lock was taken
        reader = CommandReader(folder)
        assert reader.read_new() == ["pause"] and reader.read_new() == []
        for command in COMMANDS:
            send_command(sender, command)
        assert reader.read_new() == list(COMMANDS)
        with pytest.raises(
            RunError, match="'explode' is not a command; a run takes stop, discard, pause,"
        ):
            send_command(sender, "explode")
        assert reader.read_new() == []


def test_commands_to_an_earlier_process_are_not_obeyed(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    with folder.lock():
        send_command(folder, "discard")
    with folder.lock():
        reader = CommandReader(folder)
        assert reader.read_new() == []
        send_command(folder, "stop")
        assert reader.read_new() == ["stop"]
    with pytest.raises(RuntimeError, match="holds the run's lock"):
        CommandReader(folder)


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    with folder.lock():
        reader = CommandReader(folder)
        folder.control_path.write_bytes(
            b'garbage\n\n[1]\n{"command": "explode"}\n{"command": ["stop"]}\n{"time": 1}\n'
            b'\xff\xfe\x00\n"stop"\nnull\n{"command": {"stop": 1}}\n' + b"[" * 100_000 + b'\n{"comm'
        )
        assert reader.read_new() == []
        with open(folder.control_path, "ab") as file:
            file.write(b'and": "save"}\n')
        assert reader.read_new() == ["save"]
