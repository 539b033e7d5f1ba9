"""A run on a full disk waits for space, says so, and then continues as if nothing had happened.
Either a checkpoint or the record lacks space, on a small file system that really fills up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import engine.runs.record.recorder
import engine.training.loop.disk_space
import engine.training.loop.memory_watch
import engine.training.loop.prepare
from engine.runs.record.control import send_command
from engine.runs.record.events import (
    ControlReceived,
    DataPrepared,
    EvalFinished,
    LogLine,
    RunEnded,
    StateChanged,
    StepFinished,
    StepTimeline,
)
from engine.runs.record.following import replay
from engine.runs.record.reserve import RECORD_BYTES, RESERVE_FILE
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import list_runs
from engine.text import MIB
from engine.training.loop.run import start_run
from tests.support.disks import small_file_system
from tests.support.failing import (
    at_event,
    at_step,
    command,
    equals,
    failed,
    fill,
    intact,
    plenty,
    resumes_to_the_end,
    whole_checkpoints,
)
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.trained_runs import execute

pytestmark = pytest.mark.slow("it tries a fault at many moments of a run")

SECONDS = 60
POLL_SECONDS = 0.05


@pytest.fixture
def disk(tmp_path, monkeypatch, whole):
    """Mounts a file system of 40 MiB that is checked often and that the fit report takes for a
    large one. It is made after `whole`, which must not be affected.
    """
    monkeypatch.setattr(engine.training.loop.planning, "read_machine", plenty)
    for module in (engine.training.loop.disk_space, engine.runs.record.recorder):
        monkeypatch.setattr(module, "POLL_SECONDS", POLL_SECONDS)
    with small_file_system(tmp_path / "disk", 40) as place:
        yield place


Act = Callable[[RunFolder], object]


def free_disk_space(folder: RunFolder) -> None:
    (folder.path.parent / "ballast").unlink()


def ask(word: str) -> Act:
    """Returns an act that sends `word` after enough time for a reader of the record to see that the
    run waits.
    """

    def act(folder: RunFolder) -> None:
        time.sleep(2.5 * POLL_SECONDS)
        send_command(folder, word)

    return act


def waits(folder: RunFolder) -> list[StateChanged]:
    return [
        r.event
        for r in replay(folder.events_path)
        if isinstance(r.event, StateChanged)
        and r.event.lacks_space_for in ("record", "checkpoint", "stop")
    ]


@contextmanager
def when_it_waits(runs: Path, *acts: Act) -> Iterator[None]:
    """Performs the first of `acts` when the run waits for space, and the next one when it says so
    again.
    """
    problems: list[BaseException] = []

    def follow() -> None:
        try:
            for number, act in enumerate(acts, 1):
                end = time.monotonic() + SECONDS
                while (
                    not (found := list_runs(runs))
                    or len(waits(RunFolder(Path(found[0].path)))) < number
                ):
                    assert time.monotonic() < end, f"it did not wait {number} times"
                    time.sleep(0.02)
                act(RunFolder(Path(found[0].path)))
        except BaseException as error:
            problems.append(error)
            (runs / "ballast").unlink(missing_ok=True)  # otherwise the run would wait forever

    follower = threading.Thread(target=follow)
    follower.start()
    yield
    follower.join()
    assert not problems, problems


def trains(
    capsys, disk: Path, preset: Path, *acts: Act, extra: tuple[str, ...] = ()
) -> tuple[RunFolder, str]:
    """Returns the folder of a run that succeeds, and the terminal's output."""
    with when_it_waits(disk, *acts):
        code, shown, _ = command(capsys, "--runs-dir", disk, "train", preset, *extra)
    assert code == 0
    return RunFolder(Path(list_runs(disk)[0].path)), shown


def fails(capsys, disk: Path, preset: Path, *acts: Act) -> str:
    """Returns the sentence with which a run ends when it can no longer wait."""
    with when_it_waits(disk, *acts):
        return failed(capsys, disk, preset, code=1)


def went_on(folder: RunFolder, whole, reason: str, lacks: str) -> None:
    """Checks that the run waited once, said `reason`, and then equals one whose disk was never
    full.
    """
    records = equals(folder, whole)
    (found,) = waits(folder)
    assert (found.state, found.lacks_space_for) == ("paused", lacks)
    assert reason in found.reason
    assert found.reason.endswith(".")
    assert "by itself" in found.reason and str(folder.path) in found.reason
    assert any(
        isinstance(r.event, LogLine) and r.event.text.startswith("There is room on the disk again")
        for r in records
    )
    assert not (folder.path / RESERVE_FILE).exists()
    theirs = [r.event for r in replay(whole.folder.events_path)]
    for kind, values in (
        (StepFinished, ("step", "loss", "grad_norm", "learning_rate", "tokens")),
        (EvalFinished, ("step", "loss")),
    ):
        ours, whole_ones = (
            [
                tuple(getattr(event, name) for name in values)
                for event in events
                if isinstance(event, kind)
            ]
            for events in ((r.event for r in records), theirs)
        )
        assert ours == whole_ones
    snapshot = fold(records)
    assert (
        snapshot.sessions,
        snapshot.damaged_lines,
        snapshot.state,
        snapshot.lacks_space_for,
    ) == (1, 0, "finished", "")


# ---------------------------------------------------------------------- a checkpoint


@pytest.fixture
def no_space_for_a_checkpoint(disk, monkeypatch):
    """From step 5 on, the disk has space only for the record."""
    at_event(monkeypatch, at_step(5), lambda: fill(disk, 500_000))
    return disk


def test_a_checkpoint_waits_for_disk_space(capsys, preset, no_space_for_a_checkpoint, whole):
    folder, shown = trains(capsys, no_space_for_a_checkpoint, preset, free_disk_space)
    went_on(
        folder, whole, "The disk is full: the checkpoint of step 6 needs 1 MiB in", "checkpoint"
    )
    assert "The disk is full: the checkpoint of step 6 needs" in shown
    assert "info: There is room on the disk again" in shown


def test_a_disk_that_fills_up_within_a_checkpoint(capsys, preset, disk, monkeypatch, whole):
    from engine.training.checkpoints import checkpoint
    from engine.training.checkpoints.chunk_files import ChunkFile

    monkeypatch.setattr(checkpoint, "_SPARE_BYTES", 0)
    real, chunks = ChunkFile.write, []

    def write(self, content, offset):
        if list(disk.rglob(".step-6.partial")):
            chunks.append(offset)
            if len(chunks) == 3:  # of the second checkpoint
                fill(disk)
        real(self, content, offset)

    monkeypatch.setattr(ChunkFile, "write", write)
    folder, _ = trains(capsys, disk, preset, free_disk_space)
    went_on(folder, whole, "The disk is full: the checkpoint of step 6 needs", "checkpoint")


def test_a_stop_waits_for_its_checkpoint(capsys, preset, no_space_for_a_checkpoint, whole):
    folder, shown = trains(capsys, no_space_for_a_checkpoint, preset, ask("stop"), free_disk_space)
    assert "Stopped and saved at step 6" in shown and whole_checkpoints(folder.path) == 6
    first, second = waits(folder)
    assert "stop it again to end it without saving" in second.reason
    assert "stop it again" not in first.reason
    resumes_to_the_end(capsys, folder.path.parent, whole)


def test_a_second_stop_ends_it_without_saving(capsys, preset, no_space_for_a_checkpoint, whole):
    disk = no_space_for_a_checkpoint
    sentence = fails(capsys, disk, preset, ask("stop"), ask("stop"))
    assert "checkpoint of step 6 needs" in sentence
    assert whole_checkpoints(Path(list_runs(disk)[0].path)) == 3
    (disk / "ballast").unlink()
    resumes_to_the_end(capsys, disk, whole)


def test_two_who_stop_at_once_ask_for_one_stop(
    capsys, preset, no_space_for_a_checkpoint, monkeypatch
):
    def twice(folder: RunFolder) -> None:
        monkeypatch.setattr(
            engine.training.loop.disk_space, "POLL_SECONDS", 1.0
        )  # too soon for anyone to have read what the run says
        send_command(folder, "stop")
        while len(waits(folder)) < 2:
            time.sleep(0.01)
        send_command(folder, "stop")
        free_disk_space(folder)

    folder, shown = trains(capsys, no_space_for_a_checkpoint, preset, twice)
    assert "Stopped and saved at step 6" in shown
    asked = [
        r.event.command for r in replay(folder.events_path) if isinstance(r.event, ControlReceived)
    ]
    assert asked == ["stop", "stop"]


@pytest.mark.parametrize("acts", [("discard",), ("stop", "discard")])
def test_discard_is_obeyed_while_a_checkpoint_waits(
    capsys, preset, no_space_for_a_checkpoint, acts
):
    folder, _ = trains(capsys, no_space_for_a_checkpoint, preset, *map(ask, acts))
    records = intact(folder.path)
    assert records[-1].event.state == "discarded" and not folder.checkpoints_path.exists()


@pytest.mark.parametrize("word", ["resume", "save"])
def test_a_request_tries_again_at_once(
    capsys, preset, no_space_for_a_checkpoint, monkeypatch, whole, word
):
    monkeypatch.setattr(engine.training.loop.disk_space, "POLL_SECONDS", 1e9)

    def act(folder: RunFolder) -> None:
        free_disk_space(folder)
        send_command(folder, word)

    folder, _ = trains(capsys, no_space_for_a_checkpoint, preset, act)
    equals(folder, whole)
    assert len(waits(folder)) == 1


def wait_until_paused(folder: RunFolder, reason: str) -> None:
    def is_paused() -> bool:
        events = [record.event for record in replay(folder.events_path)]
        changes = [event for event in events if isinstance(event, StateChanged)]
        return any((each.state, each.reason) == ("paused", reason) for each in changes)

    deadline = time.monotonic() + 60
    while not is_paused():
        assert time.monotonic() < deadline, "the run did not pause"
        time.sleep(0.01)


def test_a_pause_that_is_asked_for_meanwhile_comes_after(
    capsys, preset, no_space_for_a_checkpoint, whole
):
    def act(folder: RunFolder) -> None:
        send_command(folder, "pause")
        free_disk_space(folder)
        wait_until_paused(folder, "Paused after step 6; the model stays in memory.")
        send_command(folder, "resume")

    folder, _ = trains(capsys, no_space_for_a_checkpoint, preset, act)
    equals(folder, whole)


def test_the_weights_of_a_run_that_waits_can_be_chatted_with(
    tmp_path, no_space_for_a_checkpoint, whole
):
    run = start_run(make_config(tmp_path), no_space_for_a_checkpoint)
    seen = []

    def act(folder: RunFolder) -> None:
        seen.append(run.paused.do(lambda prepared: prepared.total_steps))
        free_disk_space(folder)

    with when_it_waits(no_space_for_a_checkpoint, act):
        assert execute(run).state == "finished"
    assert seen == [8] and not run.paused.is_open
    equals(run.folder, whole)


def test_a_save_in_a_pause_waits_and_the_pause_goes_on(tmp_path, disk, whole):
    run = start_run(make_config(tmp_path), disk)
    paused = StateChanged("paused", "Paused after step 4; the model stays in memory.")

    def react(record):
        if isinstance(record.event, StepFinished) and record.event.step == 4:
            run.request("pause")
        elif record.event == paused:
            fill(disk, 500_000)
            run.request("save")

    def act(folder: RunFolder) -> None:
        free_disk_space(folder)
        wait_until_paused(folder, "")
        run.request("resume")

    run.recorder.subscribe(react)
    with when_it_waits(disk, act):
        assert run.execute().state == "finished"
    equals(run.folder, whole)


def test_a_run_short_of_memory_does_not_wait_for_disk_space(
    capsys, preset, no_space_for_a_checkpoint, monkeypatch
):
    at_event(
        monkeypatch,
        lambda e: isinstance(e, StateChanged) and e.lacks_space_for == "checkpoint",
        lambda: monkeypatch.setattr(
            engine.training.loop.memory_watch, "sample_host_memory", lambda: (3 << 30, MIB)
        ),
    )
    assert "checkpoint of step 6 needs" in failed(capsys, no_space_for_a_checkpoint, preset, code=1)


# ---------------------------------------------------------------------- the record


@pytest.fixture
def no_space_for_the_record(disk, monkeypatch):
    at_event(monkeypatch, at_step(5), lambda: fill(disk))
    return disk


MANY_LINES = ("--set", "output.timeline_every=1")


def test_the_record_waits_for_disk_space(capsys, preset, no_space_for_the_record, whole):
    folder, shown = trains(
        capsys, no_space_for_the_record, preset, free_disk_space, extra=MANY_LINES
    )
    went_on(folder, whole, f"free at least {RECORD_BYTES >> 20} MiB of that disk", "record")
    assert "The disk is full: the record of the run cannot be written" in shown
    records = [r.event for r in replay(folder.events_path)]
    assert [event.step for event in records if isinstance(event, StepTimeline)] == list(range(1, 9))


def test_the_record_waits_before_the_first_step(capsys, preset, disk, monkeypatch, whole):
    at_event(monkeypatch, lambda e: isinstance(e, DataPrepared), lambda: fill(disk))
    folder, _ = trains(capsys, disk, preset, free_disk_space, extra=MANY_LINES)
    went_on(folder, whole, "free at least", "record")


@pytest.mark.parametrize("word, state", [("stop", "failed"), ("discard", "discarded")])
def test_a_request_to_end_a_run_whose_record_waits(
    capsys, preset, no_space_for_the_record, whole, word, state
):
    disk = no_space_for_the_record
    with when_it_waits(disk, ask(word)):
        code, _, sentence = command(capsys, "--runs-dir", disk, "train", preset, *MANY_LINES)
    folder = RunFolder(Path(list_runs(disk)[0].path))
    ended = intact(folder.path)[-1].event
    assert isinstance(ended, RunEnded) and ended.state == state
    free_disk_space(folder)
    if word == "discard":
        assert code == 0
        assert "its checkpoints were deleted" in ended.reason
        assert not folder.checkpoints_path.exists()
        return
    assert code == 1
    assert ended.reason == sentence
    assert "No space left on device" in sentence
    assert "resume the run" in sentence
    assert whole_checkpoints(folder.path) == 3
    resumes_to_the_end(capsys, disk, whole)


def test_other_requests_are_kept_for_the_run_that_goes_on(
    capsys, preset, no_space_for_the_record, whole
):
    def act(folder: RunFolder) -> None:
        ask("save")(folder)
        free_disk_space(folder)

    folder, _ = trains(capsys, no_space_for_the_record, preset, act, extra=MANY_LINES)
    records = equals(folder, whole)
    assert [r.event.command for r in records if isinstance(r.event, ControlReceived)] == ["save"]
