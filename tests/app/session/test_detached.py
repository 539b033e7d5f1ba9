"""Runs in separate processes are shown at once and controlled like any run, and it is reported when
one ends before it began.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from app.session import detached
from app.session.detached import (
    DetachedRuns,
    is_starting,
    last_lines,
    process_of_its_own,
    train_command,
    why_it_ended,
)
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.helper_process import start_ticks
from engine.runs.record.following import replay
from engine.runs.record.run_folder import create_run, open_run
from engine.runs.summaries.listing import list_runs
from tests.support.clocks import DAYS_40
from tests.support.folders import make_config
from tests.support.routes import wait_for
from tests.support.sessions import get

CONFIG = TrainConfig.from_dict({"name": "Away", "model": {"source": "m"}, "data": {"source": "d"}})
SECONDS = 90


def as_python(code):
    """Returns a replacement for `train_command` that runs `code` instead of `launch.py train`."""
    return lambda folder: [sys.executable, "-c", code, str(folder.path)]


HOLDS = """
import sys
import time
from pathlib import Path
from engine.runs.record.control import CommandReader
from engine.runs.record.events import ControlReceived, RunEnded, RunStarted, StateChanged
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.recorder import RunRecorder

folder = RunFolder(Path(sys.argv[1]))
time.sleep(1)
with folder.lock():
    recorder, reader = RunRecorder(folder, folder.id), CommandReader(folder)
    recorder.emit(RunStarted(total_steps=9))
    recorder.emit(StateChanged('running'))
    while not (commands := reader.read_new()):
        time.sleep(0.02)
    recorder.emit(ControlReceived(commands[0]))
    recorder.emit(RunEnded('stopped'))
    recorder.close()
"""


@pytest.fixture
def session(tmp_path):
    session = Session(tmp_path / "runs")
    yield session
    session.close()


def kill(pid):
    with contextlib.suppress(ProcessLookupError):  # expected: the process has ended
        os.kill(pid, signal.SIGKILL)


def state(session, run_id):
    session._list.forget()
    return next(run.state for run in session.runs() if run.id == run_id)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_real_run_survives_its_server_and_is_controlled_by_the_next(tmp_path, session, request):
    config = make_config(tmp_path, **{"train.steps": 100_000, "train.schedule": "constant"})
    run_id = session.start_detached(config)
    folder = open_run(session.runs_dir, run_id)
    # The run is shown at once, long before the process has imported anything.
    assert state(session, run_id) == "preparing" and session.busy_id == run_id
    assert get(session, f"/api/live/{run_id}").json()["bar"]["state"] == "preparing"
    with pytest.raises(RunError, match="Tiny is training"):
        session.start(CONFIG)
    with pytest.raises(RunError, match="is starting; stop it first"):
        session.delete(run_id)
    pid = json.loads((folder.path / "detached.json").read_text())["pid"]
    request.addfinalizer(lambda: kill(pid))
    wait_for(lambda: list_runs(session.runs_dir)[0].step > 2, SECONDS)
    assert os.getsid(pid) == pid, (
        "a session of its own: neither Ctrl-C nor a closed terminal ends it"
    )
    session.close()
    again = Session(session.runs_dir)
    assert again.busy_id == run_id and state(again, run_id) in ("running", "saving")
    again.request(run_id, "stop")
    wait_for(lambda: state(again, run_id) == "stopped", SECONDS)
    wait_for(lambda: again.why_not_start() is None, SECONDS)
    # The process says so last, after it has let go of the run.
    wait_for(lambda: "Stopped and saved" in (folder.path / "stdout.txt").read_text(), SECONDS)
    assert last_lines(folder.path / "stderr.txt", folder.root) == [], "no progress bar for nobody"
    events = [record.event.kind for record in replay(folder.events_path)]
    assert events[0] == "state_changed" and "checkpoint_written" in events


def test_the_command_is_the_one_that_people_use(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    command = train_command(folder)
    assert command[0] == sys.executable and os.path.basename(command[1]) == "launch.py"
    assert command[2:] == ["train", "--resume", folder.id, "--runs-dir", str(tmp_path)]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_request_waits_for_a_process_that_is_still_starting(session, monkeypatch):
    monkeypatch.setattr(detached, "train_command", as_python(HOLDS))
    run_id = session.start_detached(CONFIG)
    assert not open_run(session.runs_dir, run_id).is_running()
    session.request(run_id, "stop")
    wait_for(lambda: state(session, run_id) == "stopped", SECONDS)


def test_the_queue_goes_on_when_a_detached_run_ends(session, monkeypatch):
    started = []
    monkeypatch.setattr(detached, "train_command", as_python("import time; time.sleep(1)"))
    session.start_detached(CONFIG)
    monkeypatch.setattr(
        session.queue, "_start", lambda queued: started.append(queued.config["name"])
    )
    session.queue.add(CONFIG.with_values({"name": "next"}))
    assert started == []
    wait_for(lambda: started == ["next"], SECONDS)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_next_server_goes_on_with_the_queue_behind_a_queued_detached_run(
    session, monkeypatch, request, stopped
):
    monkeypatch.setattr(detached, "train_command", as_python(HOLDS))
    with session.queue._change:  # otherwise it might have been started by then
        session.queue.add(CONFIG)
        session.queue.set_detached(session.queue.listed()[0].id, True)
    wait_for(lambda: session.busy_id is not None and not session.queue.listed(), SECONDS)
    away = open_run(session.runs_dir, session.busy_id)
    wait_for(away.is_running, SECONDS)
    pid = json.loads((away.path / "detached.json").read_text())["pid"]
    request.addfinalizer(lambda: kill(pid))
    session.queue.add(CONFIG.with_values({"name": "next"}))
    session.close()
    again = Session(session.runs_dir)
    assert again.queue.behind == away.id and not again.queue.is_held
    started = []
    monkeypatch.setattr(again.queue, "_start", lambda queued: started.append(queued.config["name"]))
    if stopped:
        again.request(away.id, "stop")
        wait_for(lambda: again.queue.is_held, SECONDS)
        assert started == []
    else:
        kill(pid)
        wait_for(lambda: started == ["next"], SECONDS)
    again.close()


# ------------------------------------------------------------------ ends before the first record


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "import sys\n"
            "print('ramstream: train.steps: -1 is too small.', file=sys.stderr)\n"
            "sys.exit(2)\n",
            "train.steps: -1 is too small.",
        ),
        (
            "raise ImportError('libcuda is missing')",
            r"with exit code 1\. Its last words: .*ImportError: libcuda is missing",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "ended by SIGKILL before the run began, as the system does when memory runs out",
        ),
        ("pass", r"ended before the run began\. It said nothing\."),
    ],
)
def test_a_process_that_ends_at_once_has_failed_with_its_last_words(
    session, monkeypatch, code, text
):
    monkeypatch.setattr(detached, "train_command", as_python(code))
    run_id = session.start_detached(CONFIG)
    wait_for(lambda: state(session, run_id) == "failed", SECONDS)
    bar = get(session, f"/api/live/{run_id}").json()["bar"]
    # Nothing was saved, so there is nothing to resume: a new run takes its settings.
    assert bar["state"] == "failed" and bar["actions"] == []
    (run,) = session.runs()
    assert re.search(text, run.reason) and "\n" not in run.reason
    wait_for(lambda: session.why_not_start() is None)


def test_settings_that_do_not_load_are_told_by_the_real_command(session, monkeypatch):
    real = detached.train_command

    def broken(folder):
        (folder.path / "config.yaml").write_text("trian: {}")
        return real(folder)

    monkeypatch.setattr(detached, "train_command", broken)
    run_id = session.start_detached(CONFIG)
    folder = open_run(session.runs_dir, run_id)
    wait_for(lambda: folder.events_path.exists() and list(replay(folder.events_path)), SECONDS)
    ended = list(replay(folder.events_path))[-1].event
    assert ended.state == "failed"
    assert "trian" in ended.reason
    assert "Traceback" not in ended.reason


def test_the_next_server_tells_what_the_one_before_could_not(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    (folder.path / "detached.json").write_text(
        json.dumps({"pid": process.pid, "started": time.time() - 100})
    )
    (folder.path / "stderr.txt").write_text("Traceback\n\n  MemoryError\n")
    process.wait()
    (run,) = Session(tmp_path).runs()
    assert run.state == "failed" and "MemoryError" in run.reason


@pytest.mark.parametrize("set_by", [DAYS_40, -DAYS_40])
def test_a_clock_that_is_set_makes_no_process_another_one(tmp_path, monkeypatch, set_by):
    """The system counts when it was booted from the wall clock; `detached.json` does not."""
    folder = create_run(tmp_path, CONFIG)
    monkeypatch.setattr(detached, "train_command", as_python("import time; time.sleep(600)"))
    process = detached._start_process(folder)
    set_clock = pytest.MonkeyPatch()
    try:
        booted = psutil.boot_time()
        set_clock.setattr(psutil._pslinux, "boot_time", lambda: booted + set_by)
        assert is_starting(folder)
        DetachedRuns().record_end(folder)
        assert not folder.events_path.exists()
        written = json.loads((folder.path / "detached.json").read_text())
        for changed in ({"boot": "of another boot"}, {"ticks": written["ticks"] - 1}):
            (folder.path / "detached.json").write_text(json.dumps(written | changed))
            assert not is_starting(folder)
        set_clock.undo()
        # The system tells no more.
        less = {name: written[name] for name in ("pid", "started")}
        (folder.path / "detached.json").write_text(json.dumps(less))
        assert is_starting(folder)
    finally:
        set_clock.undo()
        process.kill()
        process.wait()
    (folder.path / "detached.json").write_text(json.dumps(written))
    assert not is_starting(folder)


def living(pid: int) -> dict[str, object]:
    """Returns what `detached.json` would say of any process of this machine."""
    shown = {"pid": pid, "started": detached._started(pid), "boot": detached._boot_id()}
    return shown | {"ticks": start_ticks(pid)}


def test_a_record_that_names_another_process_closes_nothing(tmp_path, monkeypatch):
    """A stranger's folder may name any process that lives, also this one, or that of a run."""
    other = create_run(tmp_path, CONFIG)
    monkeypatch.setattr(detached, "train_command", as_python("import time; time.sleep(600)"))
    process = detached._start_process(other)
    try:
        for pid in (1, os.getpid(), os.getppid(), process.pid):
            folder = create_run(tmp_path, CONFIG)
            (folder.path / "detached.json").write_text(json.dumps(living(pid)))
            assert not is_starting(folder) and process_of_its_own(folder) is None
        assert is_starting(other) and process_of_its_own(other) == process.pid
        if os.geteuid() == 0:  # a record that another account wrote
            os.chown(other.path / "detached.json", 65534, 65534)
            assert not is_starting(other)
    finally:
        process.kill()
        process.wait()
    session = Session(tmp_path)
    assert session.busy_id is None
    assert not any(run.state == "preparing" for run in session.runs())
    session.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another account is started as root")
def test_a_process_of_another_account_is_no_run(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    words = ["/bin/sh", "-c", "read line", *train_command(folder)]
    process = subprocess.Popen(words, user=65534, stdin=subprocess.PIPE)
    try:
        (folder.path / "detached.json").write_text(json.dumps(living(process.pid)))
        assert not is_starting(folder)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_began_is_left_to_its_own_record(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    (folder.path / "detached.json").write_text(json.dumps({"pid": 1, "started": 5.0}))
    folder.events_path.write_text("something\n")
    detached._record_end(folder, 1)
    assert folder.events_path.read_text() == "something\n" and not is_starting(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "started": 1}', '{"pid": 4}'])
def test_a_damaged_process_file_is_no_process(tmp_path, content):
    folder = create_run(tmp_path, CONFIG)
    (folder.path / "detached.json").write_text(content)
    assert not is_starting(folder)
    DetachedRuns().record_end(folder)
    assert list_runs(tmp_path)[0].state == "failed"


def test_a_process_that_cannot_be_started_leaves_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(detached, "train_command", lambda folder: ["/no/such/program"])
    with pytest.raises(RunError, match="cannot be started"):
        DetachedRuns().start(CONFIG, tmp_path)
    assert list_runs(tmp_path) == []


def test_the_password_of_the_app_is_not_handed_on(session, monkeypatch):
    monkeypatch.setenv("RAMSTREAM_LOGIN", "ada:secret")
    monkeypatch.setattr(
        detached, "train_command", as_python("import os; print(os.environ.get('RAMSTREAM_LOGIN'))")
    )
    run_id = session.start_detached(CONFIG)
    wait_for(
        lambda: last_lines(session.runs_dir / run_id / "stdout.txt", session.runs_dir) == ["None"],
        SECONDS,
    )
    wait_for(lambda: state(session, run_id) == "failed", SECONDS)


def test_only_the_end_of_a_long_output_is_read(tmp_path):
    (tmp_path / "stderr.txt").write_bytes(b"x" * 100_000 + b"\n\xff last\n")
    assert last_lines(tmp_path / "stderr.txt", tmp_path)[-1] == "\ufffd last"
    assert why_it_ended(tmp_path, -signal.SIGSEGV).startswith(
        "The process of the run was ended by SIGSEGV"
    )


def test_an_end_that_cannot_be_recorded_is_told_all_the_same_and_recorded_later(
    tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    ended, runs = threading.Event(), DetachedRuns()
    monkeypatch.setattr(detached, "train_command", as_python("pass"))
    with monkeypatch.context() as patched:
        patched.setattr(detached, "RunRecorder", full)
        folder = open_run(tmp_path, runs.start(CONFIG, tmp_path, ended.set))
        assert ended.wait(SECONDS) and folder.path not in runs._awaited
    runs.record_end(folder)
    assert list_runs(tmp_path)[0].state == "failed"
