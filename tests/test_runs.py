"""Run folders: ids, the lock and what `interrupted` means, commands from other processes, the list of runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine import run_list
from engine.about import NAME_LIMIT, NOTE_LIMIT, About, read_about, write_about
from engine.config import TrainConfig
from engine.errors import ConfigError, RunError
from engine.events import PlanBuilt, Record, RunEnded, RunStarted, StateChanged, StepFinished, StepTimeline
from engine.paths import PROGRAM_ROOT
from engine.recorder import RunRecorder, replay
from engine.run_list import list_runs
from engine.runs import (COMMANDS, CommandReader, RunFolder, create_run, delete_run, open_run, send_command,
                         shown_state)
from engine.snapshot import RunSnapshot
from tests.test_snapshot import random_run

CONFIG = TrainConfig.from_dict({"name": "My Run!", "model": {"source": "models/m"}, "data": {"source": "d.jsonl"}})


def named(name: str) -> TrainConfig:
    return CONFIG.with_values({"name": name})


def record(folder: RunFolder, *events) -> RunSnapshot:
    recorder = RunRecorder(folder, folder.id)
    for event in events:
        recorder.emit(event)
    recorder.close()
    return recorder.snapshot


def holding_process(folder: RunFolder) -> subprocess.Popen:
    code = ("import sys; from pathlib import Path; from engine.runs import RunFolder\n"
            "with RunFolder(Path(sys.argv[1])).lock():\n"
            "    print('held', flush=True); sys.stdin.read()")
    process = subprocess.Popen([sys.executable, "-c", code, folder.path], cwd=PROGRAM_ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen, sent: signal.Signals) -> None:
    process.send_signal(sent)
    process.wait()
    process.stdin.close()
    process.stdout.close()


# ---------------------------------------------------------------------- folders


def test_a_new_run_has_its_configuration_and_can_be_opened(tmp_path):
    folder = create_run(tmp_path / "deep" / "runs", CONFIG)
    assert re.fullmatch(r"\d{8}-\d{6}-my-run", folder.id) and folder.path.name == folder.id
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]
    again = open_run(tmp_path / "deep" / "runs", folder.id)
    assert again.config == CONFIG and again.path == folder.path
    assert (again.events_path.name, again.checkpoints_path.name, again.export_path.name) == (
        "events.jsonl", "checkpoints", "export")
    assert os.fspath(again) == str(folder.path)


def test_ids_are_unique_within_a_second(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        ids = [folder.id for folder in pool.map(lambda _: create_run(tmp_path, CONFIG), range(24))]
    assert len(set(ids)) == 24 and all(open_run(tmp_path, run_id).config == CONFIG for run_id in ids)


@pytest.mark.parametrize(("name", "slug"), [
    ("Tschüß Ünder", "tschu-under"), ("한국어", "run"), ("", "run"), ("../../etc/passwd", "etc-passwd"),
    ("a" * 300, "a" * 40),
    ("<b>x</b>\n", "b-x-b"), ("-.-", "run"),
])
def test_any_name_makes_a_plain_id(tmp_path, name, slug):
    folder = create_run(tmp_path, named(name))
    assert folder.id[16:] == slug and folder.path.parent == tmp_path
    assert open_run(tmp_path, folder.id).config.name == name


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".hidden", "a\n", "a\0", "-x",
                                    "a" * 129, "ä"])
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
        folder.config
    with pytest.raises(RunError, match="cannot be locked"), RunFolder(tmp_path / "gone").lock():
        pass


# ---------------------------------------------------------------------- lock


def test_the_lock_excludes_within_a_process(tmp_path):
    folder, other = create_run(tmp_path, CONFIG), None
    assert not folder.is_running()
    with folder.lock():
        other = open_run(tmp_path, folder.id)
        assert folder.is_running() and other.is_running()
        for same in (folder, other):
            with pytest.raises(RunError, match=f"in use by process {os.getpid()}"), same.lock():
                pass
        CommandReader(folder)  # the refused attempt took nothing from the holder
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
    script = ("import os, sys; from pathlib import Path; from engine.runs import RunFolder\n"
              "with RunFolder(Path(sys.argv[1])).lock():\n"
              "    reading, writing = os.pipe()\n"
              "    child = os.fork()\n"
              "    if child == 0: os.write(writing, b'.'); sys.stdin.read(); os._exit(0)\n"
              "    os.read(reading, 1); print(child, flush=True); os.kill(os.getpid(), 9)")
    process = subprocess.Popen([sys.executable, "-c", script, folder.path], cwd=PROGRAM_ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    orphan = int(process.stdout.readline())
    process.wait()
    os.kill(orphan, 0)  # the child outlives its parent
    assert not folder.is_running()
    process.stdin.close()
    process.stdout.close()


def test_watching_does_not_disturb_taking_the_lock(tmp_path, monkeypatch):
    """A watcher that asks `is_running` holds the lock for an instant."""
    folder = create_run(tmp_path, CONFIG)
    with open(folder.path / "lock", "w") as watcher:
        fcntl.flock(watcher, fcntl.LOCK_SH)
        assert not folder.is_running()  # watchers do not disturb each other either
        monkeypatch.setattr("engine.runs.time.sleep", lambda seconds: fcntl.flock(watcher, fcntl.LOCK_UN))
        with folder.lock():
            assert folder.is_running()


def test_interrupted_is_unfinished_and_held_by_nobody():
    assert shown_state("running", True) == "running" and shown_state("running", False) == "interrupted"
    assert shown_state("paused", False) == shown_state("preparing", False) == "interrupted"
    for state in ("finished", "stopped", "failed", "discarded"):
        assert shown_state(state, False) == shown_state(state, True) == state


# ---------------------------------------------------------------------- deleting


def test_a_run_is_deleted_only_when_nobody_holds_it(tmp_path):
    folder, neighbour = create_run(tmp_path, CONFIG), create_run(tmp_path, CONFIG)
    (folder.checkpoints_path / "step-1").mkdir(parents=True)
    with folder.lock(), pytest.raises(RunError, match="in use"):
        delete_run(tmp_path, folder.id)
    assert open_run(tmp_path, folder.id).config == CONFIG
    (tmp_path / ".deleted-half-way" / "checkpoints").mkdir(parents=True)
    delete_run(tmp_path, folder.id)
    assert [path.name for path in tmp_path.iterdir()] == [neighbour.id]


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
        with pytest.raises(RunError, match="'explode' is not a command; a run takes stop, discard, pause,"):
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
            b'garbage\n\n[1]\n{"command": "explode"}\n{"command": ["stop"]}\n{"time": 1}\n{"comm')
        assert reader.read_new() == []
        with open(folder.control_path, "ab") as file:
            file.write(b'and": "save"}\n')
        assert reader.read_new() == ["save"]


# ---------------------------------------------------------------------- list of runs


def test_the_list_says_what_the_record_says(tmp_path):
    waiting = create_run(tmp_path, named("waiting"))
    done, held = create_run(tmp_path, named("done")), create_run(tmp_path, named("held"))
    record(done, RunStarted(total_steps=2), StateChanged("running"), StepFinished(1, loss=2.0),
           StepFinished(2, loss=1.5), RunEnded("finished", "All steps done."))
    record(held, RunStarted(total_steps=9), StateChanged("running"), StepFinished(1, loss=3.0))
    with held.lock():
        found = {run.name: run for run in list_runs(tmp_path)}
    assert set(found) == {"waiting", "done", "held"}
    run = found["done"]
    assert (run.id, run.state, run.step, run.total_steps, run.loss) == (done.id, "finished", 2, 2, 1.5)
    assert (run.model, run.data, run.path, run.reason) == ("models/m", "d.jsonl", str(done.path), "All steps done.")
    assert (found["held"].state, found["held"].loss) == ("running", 3.0)
    assert (found["waiting"].state, found["waiting"].step, found["waiting"].loss) == ("interrupted", 0, None)
    assert {run.name: run.state for run in list_runs(tmp_path)} == {
        "waiting": "interrupted", "done": "finished", "held": "interrupted"}
    assert waiting.path.is_dir()


def test_the_newest_run_comes_first(tmp_path):
    ids = []
    for hour in (3, 1, 2):
        folder = create_run(tmp_path, CONFIG)
        line = Record(folder.id, 1, 1000.0 * hour, RunStarted()).to_json()
        folder.events_path.write_text(json.dumps(line) + "\n")
        ids.append(folder.id)
    assert [run.id for run in list_runs(tmp_path)] == [ids[0], ids[2], ids[1]]
    assert list_runs(tmp_path / "none") == []


@pytest.mark.parametrize("seed", range(12))
def test_the_two_ends_tell_what_the_whole_record_tells(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(run_list, "_TAIL_BYTES", random.Random(seed).choice([50, 300, 5000]))
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder, folder.id)
    for event in random_run(seed):
        if recorder.snapshot.is_over:
            recorder.close()
            recorder = RunRecorder(folder, folder.id)
        recorder.emit(event)
    recorder.close()
    with open(folder.events_path, "ab") as file:
        file.write(b'{"kind":"step_finished","run_id":"r","se')  # being written
    snapshot = RunSnapshot()
    for line in replay(folder.events_path):
        snapshot.apply(line)
    with folder.lock():
        run, = list_runs(tmp_path)
    assert (run.state, run.reason, run.step, run.loss, run.total_steps) == (
        snapshot.state, snapshot.reason, snapshot.step, snapshot.loss, snapshot.total_steps)
    assert run.created == snapshot.started_time and run.seconds == pytest.approx(snapshot.seconds, abs=0.05)


def test_steps_that_two_resumes_took_back_are_not_told(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    steps = [StepFinished(step, loss=10.0 - step) for step in range(1, 6)]
    snapshot = record(folder, RunStarted(), *steps, RunStarted(resumed_step=2), RunStarted(resumed_step=4))
    run, = list_runs(tmp_path)
    assert (run.step, run.loss) == (snapshot.step, snapshot.loss) == (4, 8.0)


def test_only_the_ends_of_a_long_record_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_list, "_END_LIMIT", 200_000)
    folder = create_run(tmp_path, CONFIG)
    middle = [StepFinished(step, loss=1 / step) for step in range(1, 1001)]
    record(folder, StateChanged("preparing"), PlanBuilt(grid="x" * 1000), RunStarted(total_steps=5000),
           StateChanged("running"), *middle,
           StepTimeline(1000, [{"unit": f"block.{n}", "op": "forward", "lane": "COMPUTE", "start": 0.0, "end": 1.0} for n in range(1300)]))
    content = folder.events_path.read_bytes()
    end_of_head = content.index(b'{"kind":"step_finished"')
    folder.events_path.write_bytes(content[:end_of_head] + b"#" * 100_000 + b"\n" + content[end_of_head + 100_000:])
    with folder.lock():
        run, = list_runs(tmp_path)
    # The change to `running` is out of sight; a step at the end says the same.
    assert (run.state, run.step, run.total_steps, run.loss) == ("running", 1000, 5000, 1 / 1000)


def test_broken_folders_are_listed_with_the_reason(tmp_path):
    good = create_run(tmp_path, named("good"))
    record(good, RunStarted(), RunEnded())
    broken = {}
    for name, says in (("empty", "config.yaml cannot be read"), ("yaml", "not valid YAML"),
                       ("old", "there is no such setting"), ("folder", "cannot be read")):
        folder = broken[name] = create_run(tmp_path, named(name))
        record(folder, RunStarted(), StepFinished(1), StateChanged("running"))
        broken[name] = (folder, says)
    (broken["empty"][0].path / "config.yaml").unlink()
    (broken["yaml"][0].path / "config.yaml").write_text("{")
    (broken["old"][0].path / "config.yaml").write_text("model: {source: m}\ndata: {source: d}\ngone: 1")
    broken["folder"][0].events_path.unlink()
    broken["folder"][0].events_path.mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("not a run")
    listed = {run.id: run for run in list_runs(tmp_path)}
    assert set(listed) == {good.id, *(folder.id for folder, _ in broken.values())}
    assert listed[good.id].state == "finished"
    for folder, says in broken.values():
        run = listed[folder.id]
        assert run.state == "unreadable" and re.search(says, run.reason) and "\n" not in run.reason
        delete_run(tmp_path, folder.id)
    assert [run.id for run in list_runs(tmp_path)] == [good.id]


@pytest.mark.parametrize("damaged", range(4))
def test_a_damaged_line_takes_no_run_off_the_list(tmp_path, damaged):
    folder = create_run(tmp_path, named("n"))
    record(folder, RunStarted(total_steps=9), StepFinished(1), StepFinished(2), RunEnded("stopped"))
    content = folder.events_path.read_bytes().split(b"\n")
    content[damaged] = b"\xff\xfe"
    folder.events_path.write_bytes(b"\n".join(content))
    run, = list_runs(tmp_path)
    assert run.state == ("interrupted" if damaged == 3 else "stopped")
    assert run.step == (1 if damaged == 2 else 2) and run.total_steps == (0 if damaged == 0 else 9)


def test_the_time_between_sessions_is_not_in_the_list_either(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("engine.recorder.time.time", lambda: clock[0])
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder, folder.id)
    for at, event in ((1000.0, RunStarted()), (1030.0, StepFinished(1))):
        clock[0] = at
        recorder.emit(event)
    recorder.close()
    clock[0] = 5000.0
    again = RunRecorder(folder, folder.id)
    for at, event in ((5000.0, RunStarted(resumed_step=1)), (5004.0, RunEnded())):
        clock[0] = at
        again.emit(event)
    again.close()
    run, = list_runs(tmp_path)
    assert run.seconds == again.snapshot.seconds == 34.0 and run.created == 1000.0


# ---------------------------------------------------------------------- names and notes


def test_a_name_and_a_note_are_kept_beside_the_run_and_change_nothing_else(tmp_path):
    folder = create_run(tmp_path, named("As run"))
    assert write_about(folder, "  Renamed – <b> ", " first line\nsecond \n") == About("Renamed – <b>", "first line\nsecond")
    run, = list_runs(tmp_path)
    assert (run.id, run.name, run.note) == (folder.id, "Renamed – <b>", "first line\nsecond")
    assert open_run(tmp_path, folder.id).config.name == "As run"
    assert sorted(path.name for path in folder.path.iterdir()) == ["about.json", "config.yaml"]
    write_about(folder, "", "")
    run, = list_runs(tmp_path)
    assert (run.name, run.note) == ("As run", "")


@pytest.mark.parametrize(("name", "note", "says"), [
    ("two\nlines", "", "in one line"), ("a\0b", "", "in one line"), ("n" * (NAME_LIMIT + 1), "", "The name has 121 characters"),
    ("n", "x" * (NOTE_LIMIT + 1), "The note has 4,001 characters; 4,000 are possible"),
])
def test_names_and_notes_that_cannot_be_shown_are_refused(tmp_path, name, note, says):
    folder = create_run(tmp_path, CONFIG)
    write_about(folder, "kept", "as well")
    with pytest.raises(RunError, match=says):
        write_about(folder, name, note)
    assert read_about(folder.path) == About("kept", "as well")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": 1, "note": ""}', b'{"name": "x"}', b"\xff", b"[" * 100_000])
def test_a_damaged_note_hides_no_run(tmp_path, content):
    folder = create_run(tmp_path, named("n"))
    (folder.path / "about.json").write_bytes(content)
    run, = list_runs(tmp_path)
    assert (run.name, run.note, run.state) == ("n", "", "interrupted")


def test_a_run_that_cannot_be_read_keeps_its_name(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    write_about(folder, "Known", "still")
    (folder.path / "config.yaml").write_bytes(b"\0\xff")
    run, = list_runs(tmp_path)
    assert (run.state, run.name, run.note) == ("unreadable", "Known", "still")


def test_the_list_on_the_command_line_has_names_and_notes(tmp_path, capsys):
    import launch

    write_about(create_run(tmp_path, CONFIG), "Renamed", "why")
    assert launch.main(["runs", "--json", "--runs-dir", str(tmp_path)]) == 0
    listed, = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["note"]) == ("Renamed", "why")


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
        patched.setattr("engine.runs.fcntl.flock", refused)
        assert folder.is_running()
