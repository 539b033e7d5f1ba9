"""Whatever ends one rank ends all of them, soon, with one sentence that names the rank and the
cause. Nothing is left: no process, no open file, nothing in memory that others see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.errors import HostMemoryError, NonFiniteError, RankError
from engine.paths import PROGRAM_ROOT
from engine.planning.schedule.ops import OpKind
from engine.runtime.distributed import build_engine, connection
from engine.runtime.step import compute_ops, copy_ops
from tests.support.filled_states import planes_of
from tests.support.forked_processes import ForkedProcess
from tests.support.rebuilt import rebuilt
from tests.support.tiny import random_batches
from tests.support.worker_groups import (
    FORK_RANKS,
    StartedGroup,
    forked_workers,  # noqa: F401  a fixture
    plant,
    started_group,
    wait_for_end,
    workers_of,
)

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

SOON = 60
"""An end that takes longer than so many seconds is a wait that nothing bounds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("groups") / "model"


@contextlib.contextmanager
def ended_soon(pids: list[int]) -> Iterator[None]:
    """Checks that what is done ends soon, and that no process is left."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON
    wait_for_end(*pids)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("ram")}


def train_until_it_fails(workers: StartedGroup, first: int = 1) -> str:
    """Trains until the workers is broken; returns the sentence."""
    with pytest.raises(RankError) as error:
        for number in range(first, 10_000):
            workers.train(number)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".") and len(sentence) < 300, sentence
    assert workers.workers.problem == sentence
    return sentence


# --------------------------------------------------------------------- a rank is lost


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "number, rank, reported",
    [
        (signal.SIGKILL, 1, "its process was killed (SIGKILL), by a person, or by the system for "),
        (signal.SIGTERM, 2, "its process was ended by the signal SIGTERM."),
    ],
)
@pytest.mark.parametrize("moment", ["among steps", "while nothing is asked"])
def test_a_signal_to_one_ends_all(model, number, rank, reported, moment):
    before = shared_files()
    with started_group(model, 3, batches=3) as workers:
        pids = workers.pids
        workers.train(1, 2)
        if moment == "among steps":
            threading.Timer(0.3, os.kill, (pids[rank - 1], number)).start()
        else:
            os.kill(pids[rank - 1], number)
            wait_for_end(*pids)  # nobody reads, and all are ended nonetheless
        with ended_soon(pids):
            sentence = train_until_it_fails(workers, 3)
    assert sentence.startswith(f"Rank {rank} of 3 is lost: {reported}")
    assert shared_files() == before and not workers_of(os.getpid())


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_process_that_is_stopped_is_lost_once_it_was_silent(model, monkeypatch):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 3.0)
    with started_group(model, 2) as workers:
        (pid,) = workers.pids
        workers.train(1)
        os.kill(pid, signal.SIGSTOP)
        with ended_soon([pid]):
            sentence = train_until_it_fails(workers, 2)
    assert sentence == "Rank 1 of 2 is lost: it has been silent for 3 s."


# --------------------------------------------------------------------- a rank fails

DEEDS = {
    "an error": (
        "raise ValueError('it is\\nbroken')",
        "failed: ValueError: it is.",
        "ValueError: it is",
    ),
    "one of ours": (
        "from engine.errors import DeviceError; raise DeviceError('The GPU is gone.')",
        "failed: The GPU is gone.",
        "",
    ),
    "no memory": (
        "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate')",
        "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate.",
        "OutOfMemoryError",
    ),
    "an exit": ("os._exit(7)", "is lost: its process ended with exit code 7.", ""),
    "a crash": (
        "os.kill(os.getpid(), 11)",
        "is lost: its process was ended by the signal SIGSEGV.",
        "",
    ),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_goes_wrong_in_a_step_of_one_is_told(model, tmp_path, monkeypatch, deed):
    statement, found, traced = DEEDS[deed]
    plant(monkeypatch, tmp_path / "fault", 1, "Train", statement)
    with started_group(model, 2) as workers:
        pids = workers.pids
        with ended_soon(pids):
            sentence = train_until_it_fails(workers)
    assert sentence == f"Rank 1 of 2 {found}"
    assert bool(workers.logged) == bool(traced)
    assert all("Traceback" in text and traced in text for text in workers.logged)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("message", ["Open", "Build", "Evaluate", "DryRun", "Drain"])
def test_what_goes_wrong_elsewhere_is_told_too(model, tmp_path, monkeypatch, message):
    plant(monkeypatch, tmp_path / "fault", 1, message, "raise ValueError('broken')")
    with ended_soon([]), pytest.raises(RankError) as error, started_group(model, 2) as workers:
        workers.engine.dry_run(random_batches(4))
        workers.engine.evaluate(random_batches(3))
        workers.train(1)
    assert str(error.value) == "Rank 1 of 2 failed: ValueError: broken."
    assert not workers_of(os.getpid())


@pytest.mark.parametrize(
    "text, reported",
    [
        ("import os; os._exit(5)", "is lost: its process ended with exit code 5."),
        ("import os; os.kill(os.getpid(), 9)", "is lost: its process was killed (SIGKILL), by a "),
    ],
)
def test_a_process_that_does_not_start_is_told(model, tmp_path, monkeypatch, text, reported):
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        ended_soon([]),
        pytest.raises(RankError, match="Rank 1 of 2") as error,
        started_group(model, 2),
    ):
        pass
    assert reported in str(error.value)


def test_a_program_that_is_not_there_is_told(model, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = r"Rank 1 of 2 cannot be started \(.*No such file"
    with pytest.raises(RankError, match=found), started_group(model, 2):
        pass


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_model_that_vanishes_is_not_missed(tmp_path):
    """Workers are told the configuration by rank 0, and read nothing of the model."""
    folder = tmp_path / "model"
    with started_group(folder, 2) as workers:
        workers.engine.close()
        shutil.rmtree(folder)
        rebuilt(workers)
        workers.train(1)
        assert workers.host_states.held.step == 1


# --------------------------------------------------------------------- rank 0 fails


@pytest.mark.parametrize(
    "error, reported",
    [
        (ValueError("it is\nbroken"), "failed: ValueError: it is."),
        (HostMemoryError("Host memory ran low."), "failed: Host memory ran low."),
        (torch.OutOfMemoryError("no room"), "failed: OutOfMemoryError: no room."),
    ],
)
def test_rank_0_s_own_error_in_a_step_ends_all(model, monkeypatch, error, reported):
    loss = compute_ops.loss

    def fails(context, op, step):
        if step.inputs.number == 2:
            raise error
        loss(context, op, step)

    monkeypatch.setitem(copy_ops.WORK, OpKind.LOSS, fails)
    with started_group(model, 2) as workers:
        pids = workers.pids
        with ended_soon(pids):
            assert train_until_it_fails(workers) == f"Rank 0 of 2 {reported}"


def read(states) -> dict[tuple[str, str], bytes]:
    """Returns the planes of host states as a checkpoint reads them, those on other devices too."""
    return {
        (unit, plane): states.content(unit, plane, 0, states.nbytes(unit, plane)).tobytes()
        for unit in states.layouts
        for plane in planes_of(states)
    }


@pytest.mark.parametrize(
    ("given_up", "choices"),
    [(KeyboardInterrupt, {}), (HostMemoryError, {"gpu_resident_units": 2})],
    ids=["planes in RAM", "planes on the devices"],
)
def test_a_step_that_rank_0_gives_up_changes_no_plane_and_all_can_be_read(model, given_up, choices):
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 9:
            raise given_up("enough")

    with started_group(model, 2, **choices) as workers:
        processes = workers.workers._processes
        workers.train(1)
        before = read(workers.host_states)
        with pytest.raises(given_up, match="enough"):
            workers.engine.train_step(2, random_batches(4), 3e-3, check=look)
        workers.engine.drain()
        assert workers.host_states.held.step == 1 and not workers.host_states.held.is_mixed
        assert read(workers.host_states) == before and not workers.logged
        workers.engine.close()
    assert [each.process.returncode for each in processes] == [0], "it ends by itself"


def test_an_evaluation_that_is_given_up_leaves_the_ranks_in_step(model):
    """A request to stop ends an evaluation on rank 0 alone."""
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    with started_group(model, 2) as workers:
        expected = workers.engine.evaluate(random_batches(5))
        with pytest.raises(KeyboardInterrupt):
            workers.engine.evaluate(random_batches(5), look)
        assert workers.engine.evaluate(random_batches(5)) == expected
        workers.train(1, 2)
        assert workers.host_states.held.step == 2 and not workers.host_states.held.is_mixed


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_an_engine_that_rank_0_cannot_build_leaves_the_ranks_in_step(model, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    with started_group(model, 2) as workers:
        workers.train(1)
        workers.engine.close()
        with monkeypatch.context() as short:
            short.setattr(build_engine, "RankZeroEngine", no_room)
            with pytest.raises(torch.OutOfMemoryError):
                rebuilt(workers)
        rebuilt(workers)
        workers.train(2, 3)
        assert workers.host_states.held.step == 3


def test_numbers_that_are_not_finite_end_no_rank(model):
    with started_group(model, 2) as workers:
        workers.train(1)
        weight = workers.host_states.tensor("head", "weight_high")
        kept = weight.clone()
        weight.fill_(float("nan"))
        for _ in range(2):
            with pytest.raises(NonFiniteError):
                workers.train(2)
            workers.engine.drain()
        weight.copy_(kept)
        workers.host_states.held.skip(2)
        workers.train(3)
        assert workers.host_states.held.step == 3 and not workers.host_states.held.is_mixed


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_workers_of_rank_0_that_is_killed_end_by_themselves(model, tmp_path):
    if not model.exists():
        with started_group(model, 2):
            pass
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support.worker_groups import started_group\n"
        "with started_group(Path(sys.argv[1]), 3, batches=3) as workers:\n"
        "    for number in range(1, 100_000):\n"
        "        workers.train(number)\n"
        "        print(number, *workers.pids, flush=True)\n"
    )
    rank_zero = ForkedProcess(
        [sys.executable, "-c", FORK_RANKS + program, str(model)],
        cwd=PROGRAM_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    pids = []
    while len(pids) < 3:
        found = rank_zero.stdout.readline()
        assert found, rank_zero.stderr.read()
        pids = [int(word) for word in found.split()]
    rank_zero.kill()
    with ended_soon(pids[1:]):
        _, noise = rank_zero.communicate(timeout=SOON)
    assert noise == ""


# --------------------------------------------------------------------- what stays


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_groups_one_after_another_leave_nothing(model, capfd, recwarn):
    """The app starts several runs in one process."""

    def once() -> None:
        with started_group(model, 2) as workers:
            workers.train(1)

    once()
    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(3):
        once()
    # What earlier tests have left may be closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads
    assert not workers_of(os.getpid())
    assert capfd.readouterr() == ("", "")
    assert [str(each.message) for each in recwarn] == []
