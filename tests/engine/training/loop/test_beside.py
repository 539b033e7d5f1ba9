"""Checkpoints that are written while steps go on hold one step's state, and the record tells it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from engine.planning.fit import checkpoint_sizes, requirements
from engine.runs.record.events import CheckpointWritten, LogLine, PlanBuilt
from engine.runtime.host.plane_version import PlaneVersion
from engine.training.checkpoints import chunk_files, staging, unit_files
from engine.training.loop import planning, saving
from engine.training.loop.run import Run, resume_run, start_run
from tests.support.disk_offloading import offload_to_disk
from tests.support.folders import make_config
from tests.support.trained_runs import events_of, files_of, weights_in

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")

EVERY = {"output.checkpoint_every": 1, "output.keep_checkpoints": 9, "output.eval_every": 0}


@pytest.fixture
def small(monkeypatch):
    """Even a tiny model is written beside training, in chunks of a page."""
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    for place, name in ((checkpoint_sizes, "STAGING_CHUNK_BYTES"), (staging, "CHUNK_BYTES")):
        monkeypatch.setattr(place, name, 4096)
    monkeypatch.setattr(unit_files, "ALIGNED_BYTES", 4096)


def slow(monkeypatch, seconds: float = 0.002) -> None:
    write = chunk_files.ChunkFile.write

    def slowly(self, chunk, offset):
        time.sleep(seconds)
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", slowly)


def train(tmp_path, name: str, **values) -> Run:
    run = start_run(make_config(tmp_path, **EVERY, **values), tmp_path / name)
    ended = run.execute()
    assert ended.state == "finished", ended.reason
    return run


@pytest.mark.parametrize("room", [0, 100_000, 1 << 30], ids=["waits", "both", "copies"])
def test_each_checkpoint_is_that_of_a_run_that_stood_still(tmp_path, monkeypatch, small, room):
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
    still = files_of(train(tmp_path, "still"))
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    whole = checkpoint_sizes._in_chunks
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *each: min(room, whole(*each)))
    slow(monkeypatch)
    run = train(tmp_path, "beside")
    beside, found = files_of(run), events_of(run, CheckpointWritten)
    assert beside.keys() < still.keys() and 8 in beside
    for step, files in beside.items():
        assert files == still[step], step
    assert [event.step for event in found] == sorted(beside)
    first = found[0]
    assert first.step == 1 and 0 <= first.waited_seconds <= first.seconds
    assert (first.copied_bytes > 0) == (room > 0) and (first.waited_seconds > 0 or room)
    # The second fell due while the first was written.
    lines = [event.text for event in events_of(run, LogLine)]
    assert any("fell due after step 2 is postponed: that of step 1" in line for line in lines)
    assert [event.due_step for event in found[:2]] == [0, 2] and found[1].step > 2
    assert "Checkpoint copies" in str(run.recorder.snapshot.fit) or not room


@pytest.mark.parametrize("device_updates", [("embed", "block 0", "block 1", "head"), ("block 1",)])
def test_so_it_is_where_optimizers_run_on_the_device(tmp_path, monkeypatch, small, device_updates):
    choose = requirements.choose

    def with_homes(job, target, *coarse):
        chosen = choose(job, target, *coarse)
        choices = chosen.choices.changed(device_updated_units=device_updates, update_buffers=2)
        return replace(chosen, choices=choices)

    for planner in (requirements, planning):
        monkeypatch.setattr(planner, "choose", with_homes)
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
    still = files_of(train(tmp_path, "still"))
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *each: 0)
    slow(monkeypatch, 0.005)
    run = train(tmp_path, "beside")
    (built,) = events_of(run, PlanBuilt)
    assert tuple(built.choices["device_updated_units"]) == device_updates
    beside = files_of(run)
    assert {step: files == still[step] for step, files in beside.items()} == dict.fromkeys(
        beside, True
    )
    assert events_of(run, CheckpointWritten)[0].waited_seconds > 0


@pytest.mark.parametrize("place", ["GPU", "disk"])
@pytest.mark.parametrize("room", [0, 1 << 30], ids=["waits", "copies"])
def test_so_it_is_where_units_are_not_in_ram(
    tmp_path, monkeypatch, small, keep_on_gpu, room, place
):
    (tmp_path / "disk").mkdir()
    folder = {"engine.disk": str(tmp_path / "disk")}
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
    still = files_of(train(tmp_path, "still", **folder))
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    whole = checkpoint_sizes._in_chunks
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *each: min(room, whole(*each)))
    if place == "GPU":
        keep_on_gpu(3)
    else:
        offload_to_disk(3, monkeypatch)
    beside = files_of(train(tmp_path, "beside", **folder))
    assert beside.keys() & {1, 8} == {1, 8}
    assert {step: files == still[step] for step, files in beside.items()} == dict.fromkeys(
        beside, True
    )


def test_weights_alone_are_those_of_their_step(tmp_path, monkeypatch, small):
    """The moments change freely meanwhile: nothing waits for them, and none of them is copied."""
    from engine.training.checkpoints.plane_snapshot import Snapshot

    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 1 << 40)
    still = {
        path.name: weights_in(path)
        for path in train(tmp_path, "still").folder.checkpoints_path.glob("step-*")
    }
    assert len(still) == 8
    monkeypatch.setattr(checkpoint_sizes, "SMALL_BYTES", 0)
    seen: set[str] = set()
    chunk = Snapshot.next_to_write

    def seeing(self):
        found = chunk(self)
        if found is not None:
            seen.add(found.plane)
        return found

    monkeypatch.setattr(Snapshot, "next_to_write", seeing)
    slow(monkeypatch)
    run = train(tmp_path, "weights", **{"output.checkpoint": "weights"})
    paths = {path.name: path for path in run.folder.checkpoints_path.glob("step-*")}
    assert "step-8" in paths and seen == {"weight_high"}, "the model computes in float32"
    for name, path in paths.items():
        assert weights_in(path) == still[name], name
    assert any(
        event.waited_seconds or event.copied_bytes for event in events_of(run, CheckpointWritten)
    )


def asks(run: Run, command: str, writing: threading.Event) -> None:
    """Makes a run ask for `command` once step 2 is applied and a checkpoint is being written."""

    def ask(record) -> None:
        if record.event.kind == "step_finished" and record.event.step == 2:
            assert writing.wait(20)
            run.request(command)

    run.recorder.subscribe(ask)


@pytest.mark.parametrize("command", ["stop", "discard"])
def test_a_request_to_end_does_not_wait_for_the_disk(tmp_path, monkeypatch, small, command):
    write, writing = chunk_files.ChunkFile.write, threading.Event()
    run = start_run(make_config(tmp_path, **EVERY), tmp_path / "runs")
    asks(run, command, writing)

    def stuck(self, chunk, offset):
        if run.recorder.snapshot.state == "running":
            writing.set()
            time.sleep(0.02)
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", stuck)
    ended = run.execute()
    if command == "discard":
        assert ended.state == "discarded" and not run.folder.checkpoints_path.exists()
        return
    assert ended.state == "stopped"
    newest = max(files_of(run))
    assert newest == run.recorder.snapshot.step
    monkeypatch.setattr(chunk_files.ChunkFile, "write", write)
    again = resume_run(tmp_path / "runs", run.id)
    assert again.execute().state == "finished"
    still = files_of(train(tmp_path, "still"))
    assert files_of(again)[8] == still[8]


def test_a_step_that_fails_leaves_the_checkpoint_of_the_step_before(tmp_path, monkeypatch, small):
    """The checkpoint of a good step is finished, though the step after it ends the run."""
    from engine.runtime.step.streaming_engine import StreamingEngine

    slow(monkeypatch)
    train_step = StreamingEngine.train_step

    def failing(self, number, *arguments):
        if number == 4:
            raise RuntimeError("broken")
        train_step(self, number, *arguments)

    monkeypatch.setattr(StreamingEngine, "train_step", failing)
    run = start_run(make_config(tmp_path, **EVERY), tmp_path / "runs")
    assert run.execute().state == "failed"
    steps = [event.step for event in events_of(run, CheckpointWritten)]
    assert set(steps) == set(files_of(run)) and max(steps) == 3
    assert not list(run.folder.checkpoints_path.glob(".*"))


def test_a_disk_that_is_full_meanwhile_is_told_and_the_last_step_is_saved(
    tmp_path, monkeypatch, small
):
    import errno

    write, fails = chunk_files.ChunkFile.write, [True]

    def full(self, chunk, offset):
        if fails:
            fails.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", full)
    values = EVERY | {"output.checkpoint_every": 3}
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    assert run.execute().state == "finished"
    steps = [event.step for event in events_of(run, CheckpointWritten)]
    assert 3 < steps[0] <= steps[-1] == 8, "the step at which it was found was saved"
    (found,) = [line.text for line in events_of(run, LogLine) if line.level == "warning"]
    assert found.startswith("The checkpoint of step 3 cannot be written in ")
    assert found.endswith(
        "(No space left on device); the ones before it are untouched. Training stands still until "
        f"step {steps[0]} is saved."
    )


@pytest.mark.parametrize("command", ["stop", "discard"])
def test_an_update_that_waits_for_a_stuck_disk_gives_way(tmp_path, monkeypatch, small, command):
    """Without RAM for copies, the update of step 2 waits for the disk, which takes nothing."""
    monkeypatch.setattr(checkpoint_sizes, "_in_chunks", lambda *each: 0)
    write, asked = chunk_files.ChunkFile.write, threading.Event()
    run = start_run(make_config(tmp_path, **EVERY), tmp_path / "runs")

    def stuck(self, chunk, offset):
        if not asked.is_set():
            asked.set()
            threading.Timer(0.3, run.request, [command]).start()
            step = run.recorder.snapshot.step
            while run.recorder.snapshot.step == step:  # until the update has gone on
                time.sleep(0.01)
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", stuck)
    ended = run.execute()
    assert ended.state == {"stop": "stopped", "discard": "discarded"}[command]
    if command == "stop":
        assert set(files_of(run)) == {2}, "the step whose update waited was applied and saved"
    else:
        assert not run.folder.checkpoints_path.exists()


@pytest.mark.parametrize("second, state", [("stop", "stopped"), ("discard", "discarded")])
def test_a_second_request_while_the_last_checkpoint_is_finished(
    tmp_path, monkeypatch, small, second, state
):
    """The checkpoint of the last step is under way when the run is stopped, so it is finished."""
    write, asked = chunk_files.ChunkFile.write, []
    run = start_run(make_config(tmp_path, **EVERY), tmp_path / "runs")

    def slowly(self, chunk, offset):
        time.sleep(0.05)
        if len(asked) == 1 and run.recorder.snapshot.state == "stopping":
            asked.append(second)
            run.request(second)
        write(self, chunk, offset)

    def ask(record) -> None:
        if record.event.kind == "step_finished" and not asked:
            asked.append("stop")
            run.request("stop")

    monkeypatch.setattr(chunk_files.ChunkFile, "write", slowly)
    run.recorder.subscribe(ask)
    ended = run.execute()
    assert asked == ["stop", second] and ended.state == state, ended.reason
    assert set(files_of(run)) == ({1} if second == "stop" else set())
    assert run.folder.checkpoints_path.exists() == (second == "stop")


def test_a_step_that_is_asked_for_twice_is_written_once(tmp_path, monkeypatch, small):
    slow(monkeypatch, 0.01)
    values = EVERY | {"output.checkpoint_every": 4}
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")

    def ask(record) -> None:
        if record.event.kind == "step_finished" and record.event.step == 4:
            for _ in range(2):
                run.request("save")

    run.recorder.subscribe(ask)
    assert run.execute().state == "finished"
    found = [(event.step, event.due_step) for event in events_of(run, CheckpointWritten)]
    assert found == [(4, 0), (8, 0)]
    assert not any("postponed" in line.text for line in events_of(run, LogLine))


def test_one_that_is_begun_again_at_its_own_step_was_not_postponed(tmp_path, monkeypatch, small):
    """The first attempt gives way at once, before the next step is submitted."""
    from engine.training.checkpoints.plane_snapshot import Ended, Snapshot

    wait, gave_way, poll = Snapshot.wait_until_ready, [], saving.Saver.poll

    def giving_way(self):
        if not gave_way:
            gave_way.append(self)
            raise Ended
        wait(self)

    def looking(self, step, config):
        if self._writer.under_way is not None and step == 4:
            self._writer.under_way.wait(20)
        poll(self, step, config)

    monkeypatch.setattr(Snapshot, "wait_until_ready", giving_way)
    monkeypatch.setattr(saving.Saver, "poll", looking)
    run = start_run(
        make_config(tmp_path, **EVERY | {"output.checkpoint_every": 4}), tmp_path / "runs"
    )
    assert run.execute().state == "finished" and gave_way
    found = [(event.step, event.due_step) for event in events_of(run, CheckpointWritten)]
    assert found == [(4, 0), (8, 0)]


class Reader:
    """A reader of planes that notes what it is told."""

    def __init__(self):
        self.told = []
        self.is_ready = False

    def arm(self):
        self.told.append("arm")
        self.is_ready = True

    def protect(self, unit):
        self.told.append(unit)

    def end(self):
        self.told.append("end")
        self.is_ready = True


def test_a_reader_of_the_planes_is_told_when_its_step_is_whole_and_what_is_to_change():
    held, reader = PlaneVersion(), Reader()
    held.begin(1, "embed")
    held.read_by(1, reader)
    held.begin(1, "head")  # of its own step
    assert reader.told == []
    held.complete(1)
    held.begin(2, "embed")
    held.fail()  # a later step failed, which is nothing to this reader
    assert reader.told == ["arm", "embed"] and held.is_mixed
    held.complete(2)
    held.release(reader)
    held.begin(3, "embed")
    assert reader.told == ["arm", "embed"]
    late = Reader()
    held.complete(3)
    held.read_by(3, late)
    assert late.told == ["arm"]


def test_two_readers_of_the_planes_are_told_and_released_apart():
    held, first, second = PlaneVersion(), Reader(), Reader()
    held.read_by(1, first)
    held.complete(1)
    held.read_by(1, second)
    held.begin(2, "embed")
    held.release(first)
    held.begin(2, "head")
    assert first.told == ["arm", "embed"] and second.told == ["arm", "embed", "head"]


def test_a_reader_whose_step_fails_is_ended_so_that_nothing_waits_for_ever():
    held, reader = PlaneVersion(), Reader()
    held.complete(1)
    held.read_by(2, reader)
    held.begin(3, "embed")
    held.fail()
    assert reader.told == ["embed", "end"]
