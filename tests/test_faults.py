"""Faults while a run goes on, each made to happen: one sentence, a whole record, and at most the steps since the last
checkpoint are lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import engine.prepare
import engine.watch
from engine.adamw import HostAdamW
from engine.backend import CpuBackend
from engine.engine import StreamingEngine
from engine.errors import GpuMemoryError
from engine.events import CheckpointWritten, JobProgressed, LogLine, RunStarted, StateChanged, StepFinished
from engine.fit import MIB
from engine.job import start_run
from engine.recorder import RunRecorder, replay
from engine.runs import list_runs, open_run
from tests.failing import command, failed, intact, refused, whole_checkpoints
from tests.folders import WORDS, make_config
from tests.test_trainer import events_of, execute, planes_on_disk

ROOT = Path(__file__).parent.parent


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "preset.yaml"
    make_config(tmp_path).save(path)
    return path


@pytest.fixture
def saved(tmp_path, runs):
    """A run that was stopped after step 6, with the checkpoints of two steps."""
    run = start_run(make_config(tmp_path), runs)
    assert execute(run, {6: "stop"}).state == "stopped"
    return run


def resumes_to_the_end(capsys, runs: Path, whole) -> None:
    """The only unfinished run goes on to the end and equals `whole` to the bit."""
    run = next(run for run in list_runs(runs) if run.state != "finished")
    assert command(capsys, "--runs-dir", runs, "train", "--resume", run.id)[0] == 0
    intact(Path(run.path))
    again = open_run(runs, run.id)
    whole_checkpoints(again.path)
    whole.folder, folder = again, whole.folder
    ours = planes_on_disk(whole)
    whole.folder = folder
    assert ours == planes_on_disk(whole)


@pytest.fixture
def whole(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "whole")
    assert execute(run).state == "finished"
    return run


def at_event(monkeypatch, chosen, act) -> None:
    """Call `act` once, just before the first event that `chosen` takes is recorded."""
    real, done = RunRecorder.emit, []

    def emit(self, event):
        if not done and chosen(event):
            done.append(event)
            act()
        return real(self, event)

    monkeypatch.setattr(RunRecorder, "emit", emit)


def at_step(number: int):
    return lambda event: isinstance(event, StepFinished) and event.step == number


# ---------------------------------------------------------------------- the disk

@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(place: Path, leave: int = 0) -> Path:
    ballast = place / "ballast"
    size = shutil.disk_usage(place).free - leave
    with open(ballast, "wb") as file:
        file.write(bytes(max(0, size)))
    return ballast


def test_a_disk_that_fills_up_before_a_checkpoint(capsys, preset, small_disk, monkeypatch, whole):
    at_event(monkeypatch, at_step(5), lambda: fill(small_disk, 200_000))
    monkeypatch.setattr(engine.prepare, "read_machine", plenty)
    sentence = failed(capsys, small_disk, preset, code=1)
    assert "checkpoint of step 6 needs" in sentence
    run = list_runs(small_disk)[0]
    assert whole_checkpoints(Path(run.path)) == 3
    (small_disk / "ballast").unlink()
    resumes_to_the_end(capsys, small_disk, whole)


def test_a_disk_that_fills_up_within_a_checkpoint(capsys, preset, small_disk, monkeypatch, whole):
    from engine import checkpoint

    monkeypatch.setattr(engine.prepare, "read_machine", plenty)
    monkeypatch.setattr(checkpoint, "_SPARE_BYTES", 0)
    real, calls = checkpoint._write_unit, []

    def write_unit(path, *arguments):
        calls.append(path)
        if len(calls) == 8:  # of the second checkpoint
            fill(small_disk)
        return real(path, *arguments)

    monkeypatch.setattr(checkpoint, "_write_unit", write_unit)
    sentence = failed(capsys, small_disk, preset, code=1)
    assert "checkpoint of step 6" in sentence and "No space left on device" in sentence
    assert whole_checkpoints(Path(list_runs(small_disk)[0].path)) == 3
    (small_disk / "ballast").unlink()
    resumes_to_the_end(capsys, small_disk, whole)


def test_a_disk_that_is_full_for_the_record_keeps_room_for_its_last_line(capsys, preset, small_disk, monkeypatch, whole):
    monkeypatch.setattr(engine.prepare, "read_machine", plenty)
    at_event(monkeypatch, at_step(5), lambda: fill(small_disk))
    sentence = failed(capsys, small_disk, preset, "--set", "output.timeline_every=1", code=1)
    assert "record" in sentence and "No space left on device" in sentence
    (small_disk / "ballast").unlink()
    resumes_to_the_end(capsys, small_disk, whole)


def test_a_disk_that_is_full_for_the_export(capsys, preset, small_disk, monkeypatch):
    monkeypatch.setattr(engine.prepare, "read_machine", plenty)
    at_event(monkeypatch, lambda e: isinstance(e, JobProgressed) and e.job == "export", lambda: fill(small_disk, 120_000))
    monkeypatch.setattr("engine.export.disk_free", lambda path: 1 << 40)
    sentence = failed(capsys, small_disk, preset, "--set", "output.export=true", code=1)
    assert "model cannot be written" in sentence
    (small_disk / "ballast").unlink()
    run = list_runs(small_disk)[0]
    assert whole_checkpoints(Path(run.path)) == 8
    assert command(capsys, "--runs-dir", small_disk, "train", "--resume", run.id)[0] == 0
    assert (Path(run.path) / "export" / "model.safetensors").exists()


def plenty(path):
    from dataclasses import replace

    from engine.machine import read_machine

    return replace(read_machine(path), disk_free=1 << 40)


def test_files_that_may_not_grow(tmp_path, preset, runs):
    """A quota, in a process of its own: RLIMIT_FSIZE holds for a process."""
    limit = f"import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, {resource.RLIM_INFINITY})); " \
            f"sys.path.insert(0, {str(ROOT)!r}); import launch; sys.exit(launch.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", limit, "--runs-dir", runs, "train", preset, "--set", "data.packing=false"],
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    intact(Path(list_runs(runs)[0].path))


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_disk_that_fails_to_sync(capsys, preset, runs, monkeypatch, call, whole):
    from engine import checkpoint

    monkeypatch.setattr(checkpoint, "UNSYNCED_BYTES", 1000)
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
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(capsys, runs, saved, whole, file, kind):
    newest = max(saved.folder.checkpoints_path.iterdir(), key=lambda path: int(path.name[5:]))
    damage(next(newest.glob(file)), kind)
    resumes_to_the_end(capsys, runs, whole)
    records = intact(saved.folder.path)
    assert [r.event.resumed_step for r in records if isinstance(r.event, RunStarted)] == [None, 3]


def test_when_every_checkpoint_is_damaged(capsys, runs, saved):
    for path in saved.folder.checkpoints_path.glob("*/0001-*.planes"):
        damage(path, "flipped")
    sentence = failed(capsys, runs, "--resume", saved.id, code=1)
    assert "No checkpoint" in sentence and "start a new run" in sentence
    assert len(list(saved.folder.checkpoints_path.iterdir())) == 2, "nothing is deleted"


def test_a_checkpoint_of_a_newer_version(capsys, runs, saved):
    for path in saved.folder.checkpoints_path.glob("*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}), encoding="utf-8")
    assert "has format 99" in failed(capsys, runs, "--resume", saved.id, code=1)


def test_a_run_folder_of_a_newer_version_is_left_as_it_is(capsys, runs, saved):
    path = saved.folder.path / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(tree | {"swarm": {"nodes": 4}}), encoding="utf-8")
    sentence = refused(capsys, runs, "train", "--resume", saved.id)
    assert "swarm" in sentence and "use the version that wrote it" in sentence


def test_a_run_folder_of_an_older_version_goes_on(capsys, runs, saved, whole):
    """Settings, events and fields that came later are missing, and so is the file of the session's time."""
    path = saved.folder.path / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree["output"]["timeline_every"], tree["train"]["max_grad_norm"], tree["engine"]["rounds"]
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    lines = [json.loads(line) for line in saved.folder.events_path.read_text().splitlines()]
    for line in lines:
        for late in ("exposed", "loss_tokens", "program_version", "host_available", "error_type"):
            line.pop(late, None)
    saved.folder.events_path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (saved.folder.path / "session.json").unlink(missing_ok=True)
    resumes_to_the_end(capsys, runs, whole)


def test_a_record_cut_in_the_middle_of_a_line(capsys, runs, saved, whole):
    content = saved.folder.events_path.read_bytes()
    saved.folder.events_path.write_bytes(content[:-25])
    resumes_to_the_end(capsys, runs, whole)
    assert (saved.folder.path / "events.torn").exists()


def test_a_record_with_a_damaged_line_says_which_and_goes_on(capsys, runs, saved, whole):
    content = bytearray(saved.folder.events_path.read_bytes())
    content[content.index(b"\n") + 5] = 0
    saved.folder.events_path.write_bytes(content)
    resumes_to_the_end(capsys, runs, whole)
    logged = [r.event.text for r in replay(saved.folder.events_path) if isinstance(r.event, LogLine)]
    assert any(text.startswith("Line 2 of") for text in logged)


def test_settings_that_are_damaged(capsys, runs, saved):
    (saved.folder.path / "config.yaml").write_bytes(b"train: [\x00")
    assert "config.yaml" in refused(capsys, runs, "train", "--resume", saved.id)
    (saved.folder.path / "config.yaml").unlink()
    assert "config.yaml" in refused(capsys, runs, "train", "--resume", saved.id)


def test_two_processes_on_one_run_folder(capsys, runs, saved):
    hold = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from engine.runs import open_run\n" \
           f"with open_run({str(runs)!r}, {saved.id!r}).lock(): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        sentence = refused(capsys, runs, "train", "--resume", saved.id)
        assert f"in use by process {other.pid}" in sentence
    finally:
        other.kill()
        other.wait()
    assert command(capsys, "--runs-dir", runs, "train", "--resume", saved.id)[0] == 0


def test_garbage_in_the_control_file(capsys, runs, preset, monkeypatch):
    garbage = [b"\xff\xfe\x00", b"[" * 100_000, b'{"command": ["stop"]}', b'{"command": {"stop": 1}}', b'"stop"', b"null",
               b'{"command": "explode"}', b'{"command": "stop"']

    def scribble():
        path = Path(list_runs(runs)[0].path) / "control.jsonl"
        path.write_bytes(b"\n".join(garbage) + b"\n")

    at_event(monkeypatch, at_step(2), scribble)
    at_event(monkeypatch, at_step(4), lambda: (Path(list_runs(runs)[0].path) / "control.jsonl").write_bytes(b""))
    assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 0
    assert list_runs(runs)[0].state == "finished"


# ---------------------------------------------------------------------- signals and the clock

MOMENTS = {
    "before the data is read": lambda e: isinstance(e, StateChanged) and e.state == "preparing",
    "while the weights are read": lambda e: isinstance(e, JobProgressed) and e.job == "load_model",
    "before the first step": lambda e: isinstance(e, RunStarted),
    "in a step": at_step(4),
    "before a checkpoint": lambda e: isinstance(e, StateChanged) and e.state == "saving",
    "in a checkpoint": lambda e: isinstance(e, JobProgressed) and e.job == "checkpoint",
    "after a checkpoint": lambda e: isinstance(e, CheckpointWritten),
}


@pytest.mark.parametrize("moment, number", [*((moment, signal.SIGINT) for moment in MOMENTS), ("in a step", signal.SIGTERM),
                                            ("in a checkpoint", signal.SIGHUP)])
def test_a_signal_at_any_moment_stops_and_saves(capsys, preset, runs, monkeypatch, whole, moment, number):
    with monkeypatch.context() as interrupted:
        at_event(interrupted, MOMENTS[moment], lambda: signal.raise_signal(number))
        code, out, _ = command(capsys, "--runs-dir", runs, "train", preset)
    assert code == 0 and "--resume" in out
    run = list_runs(runs)[0]
    assert run.state == "stopped"
    intact(Path(run.path))
    assert whole_checkpoints(Path(run.path)) == (run.step or None), "what was trained is saved"
    resumes_to_the_end(capsys, runs, whole)


@pytest.mark.parametrize("moment, told", [("before the data is read", "nothing is lost"),
                                          ("while the weights are read", "--resume")])
def test_a_signal_while_a_resumed_run_loads_loses_nothing(capsys, runs, saved, monkeypatch, whole, moment, told):
    with monkeypatch.context() as interrupted:
        at_event(interrupted, MOMENTS[moment], lambda: signal.raise_signal(signal.SIGINT))
        code, out, _ = command(capsys, "--runs-dir", runs, "train", "--resume", saved.id)
    assert code == 0 and told in out and whole_checkpoints(saved.folder.path) >= 6
    resumes_to_the_end(capsys, runs, whole)


def test_a_second_signal_leaves_now_and_resume_equals_the_undisturbed_run(capsys, preset, runs, whole):
    """In a process of its own, which ends itself."""
    twice = f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
import launch
from engine.events import StepFinished
from engine.recorder import RunRecorder
real = RunRecorder.emit
def emit(self, event):
    if isinstance(event, StepFinished) and event.step == 5:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    return real(self, event)
RunRecorder.emit = emit
launch.main(sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", twice, "--runs-dir", runs, "train", preset], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 130 and "Traceback" not in done.stderr and "again to leave at once" in done.stderr
    run = list_runs(runs)[0]
    assert run.state == "interrupted" and whole_checkpoints(Path(run.path)) == 3
    resumes_to_the_end(capsys, runs, whole)


def test_a_pipe_that_nobody_reads_ends_no_run(preset, runs):
    line = f"{sys.executable} {ROOT / 'launch.py'} --runs-dir {runs} train {preset} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert list_runs(runs)[0].state == "finished"


def test_a_clock_that_is_set_back(capsys, preset, runs, monkeypatch, whole):
    real = time.time
    with monkeypatch.context() as clock:
        at_event(clock, at_step(3), lambda: clock.setattr(time, "time", lambda: real() - 86_400))
        assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 0
    run = list_runs(runs)[0]
    assert run.state == "finished" and run.seconds >= 0
    intact(Path(run.path))
    finished = [r.event for r in replay(Path(run.path) / "events.jsonl") if isinstance(r.event, StepFinished)]
    assert len(finished) == 8 and all(step.seconds > 0 for step in finished)


# ---------------------------------------------------------------------- numbers, memory and devices

def test_a_loss_that_is_no_number_keeps_the_steps_before(capsys, tmp_path, preset, runs):
    """A token that only the last rows hold has an embedding that is not finite."""
    model = tmp_path / "model"
    weights = load_file(model / "model.safetensors")
    word = WORDS.index("six") + 7
    weights["model.embed_tokens.weight"][word] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    turns = [[("say after one", "two")]] * 20 + [[("say after six", "seven")]] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": [
        {"role": role, "content": text} for pair in row for role, text in zip(("user", "assistant"), pair)]}) + "\n"
        for row in turns), encoding="utf-8")
    wanted = ["data.shuffle=false", "data.packing=false", "data.eval_fraction=0", "train.steps=6", "output.checkpoint_every=2"]
    sentence = failed(capsys, runs, preset, *(word for value in wanted for word in ("--set", value)), code=1)
    assert "step 6" in sentence and "not a finite number" in sentence
    run = list_runs(runs)[0]
    assert whole_checkpoints(Path(run.path)) == 4 and run.step == 5


def low_from(monkeypatch, step: int, *available: int) -> None:
    """After `step`, the machine has these bytes left, the last of them for ever."""
    rest = list(available)

    def start():
        monkeypatch.setattr(engine.watch, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr("engine.trainer.LOOK_SECONDS", 0.0)
        monkeypatch.setattr(engine.watch, "sample_host_memory",
                            lambda: (3 << 30, rest.pop(0) if len(rest) > 1 else rest[0]))

    at_event(monkeypatch, at_step(step), start)


@pytest.mark.parametrize("left", [(60 * MIB,), (100 * MIB, 90 * MIB)], ids=["suddenly", "lastingly"])
def test_host_memory_that_runs_low_stops_with_a_checkpoint(capsys, preset, runs, monkeypatch, whole, left):
    with monkeypatch.context() as low:
        low_from(low, 4, *left)
        sentence = failed(capsys, runs, preset, code=1)
    assert "this process takes 3.0 GiB (planes " in sentence and "everything else" in sentence
    saved = whole_checkpoints(Path(list_runs(runs)[0].path))
    assert saved >= 4 and f"step {saved} is saved" in sentence
    resumes_to_the_end(capsys, runs, whole)


def test_a_short_peak_of_another_program_ends_no_run(capsys, preset, runs, monkeypatch):
    low_from(monkeypatch, 4, 100 * MIB, 8 << 30)
    assert command(capsys, "--runs-dir", runs, "train", preset)[0] == 0


def test_host_memory_that_runs_low_in_a_pause(tmp_path, runs, monkeypatch):
    at_event(monkeypatch, lambda e: isinstance(e, StateChanged) and e.state == "paused",
             lambda: monkeypatch.setattr(engine.watch, "sample_host_memory", lambda: (3 << 30, MIB)))
    run = start_run(make_config(tmp_path), runs)
    ended = execute(run, {2: "pause"})
    assert ended.error_type == "HostMemoryError" and "is saved" in ended.reason
    assert whole_checkpoints(run.folder.path) >= 2


@pytest.mark.parametrize("error, told", [
    (MemoryError(), "The host ran out of memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
                  "4096 bytes.\nC++ trace"), "The host ran out of memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "Working set"),
    (GpuMemoryError("70.1 GiB in use of 79.2"), "(70.1 GiB in use of 79.2), where the plan takes"),
    (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously "
                  "reported"), "The GPU failed (CUDA error: an illegal memory access was encountered)"),
    (RuntimeError("CUDA error: unspecified launch failure"), "resume the run from its last checkpoint"),
    (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "The GPU failed"),
    (OSError(errno.EMFILE, "Too many open files", "/x"), "Too many open files"),
    (ZeroDivisionError("division by zero"), "An error in the program ended the run (ZeroDivisionError"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_errors_of_device_system_and_program(capsys, preset, runs, monkeypatch, whole, error, told):
    """Raised by an op of step 5; drain and close fail as well, as they do when a device is gone."""
    with monkeypatch.context() as broken:
        real, steps = StreamingEngine.train_step, []

        def train_step(self, number, *arguments):
            if number == 5:
                broken.setattr(CpuBackend, "drain", lambda self: (_ for _ in ()).throw(RuntimeError("gone")))
                broken.setattr(CpuBackend, "close", lambda self: (_ for _ in ()).throw(RuntimeError("gone")))
                raise error
            real(self, number, *arguments)

        broken.setattr(StreamingEngine, "train_step", train_step)
        sentence = failed(capsys, runs, preset, code=1)
    assert told in sentence and "gone" not in sentence
    run = list_runs(runs)[0]
    logged = [r.event.text for r in replay(Path(run.path) / "events.jsonl") if isinstance(r.event, LogLine)]
    assert any("train_step" in text for text in logged), "the record keeps where it happened"
    assert whole_checkpoints(Path(run.path)) == 3
    resumes_to_the_end(capsys, runs, whole)


def test_a_device_that_is_too_small_while_the_engine_is_built_is_told_by_item(capsys, preset, runs, monkeypatch):
    def build(self, *arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(StreamingEngine, "__init__", build)
    assert "The GPU ran out of memory" in failed(capsys, runs, preset, code=1)


def test_an_update_that_fails_half_way_is_not_saved(capsys, preset, runs, monkeypatch, whole):
    with monkeypatch.context() as broken:
        real, calls = HostAdamW.update, []

        def update(self, unit, *arguments):
            calls.append(unit)
            if len(calls) == 22:  # within step 5
                raise MemoryError
            real(self, unit, *arguments)

        broken.setattr(HostAdamW, "update", update)
        failed(capsys, runs, preset, code=1)
    assert whole_checkpoints(Path(list_runs(runs)[0].path)) == 3
    resumes_to_the_end(capsys, runs, whole)
