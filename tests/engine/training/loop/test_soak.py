"""What a soak finds: a thread or file that stays is told, those of a checkpoint that is written are
not.
"""

from __future__ import annotations

import threading

import psutil
import pytest

from tests.support.soak import (
    CHECKPOINT_EVERY,
    Sample,
    Standing,
    files_now,
    is_writer,
    judge,
    threads_now,
)

STEPS = range(0, 60 * CHECKPOINT_EVERY, CHECKPOINT_EVERY // 2)
USUAL = {"MainThread", "memory-watch", "events.jsonl"}


def soaked(others) -> list[str]:
    """Returns what is told of a run. others: the names of threads beside the usual, by step; a name
    stands for the same thread as long as it is told. A file is open for each of them.
    """
    threads, files, samples = Standing(), Standing(), []
    for number, step in enumerate(STEPS):
        there = {*others(step)}
        writers = {name for name in there if is_writer(name.split("/")[0])}
        counts = [each.count(USUAL | there, writers, step) for each in (files, threads)]
        samples.append(Sample(number, step, 2**30, *counts))
    return judge(samples)


def checkpoint(step: int) -> list[str]:
    number = step // CHECKPOINT_EVERY
    names = ["checkpoint", "copy-planes", *(f"checkpoint_{n}" for n in range(4))]
    return [f"{name}/{number}" for name in names]


@pytest.mark.parametrize("share", [1, 2])
def test_writers_of_checkpoints_are_no_leak_however_many_samples_they_are_in(share):
    assert soaked(lambda step: checkpoint(step) if step % (share * 500) == 0 else []) == []


@pytest.mark.parametrize(
    "leaked",
    [
        pytest.param(lambda step: ["feed"] * (step > 50_000), id="another thread"),
        pytest.param(lambda step: ["checkpoint_0/old"] * (step > 50_000), id="one writer"),
        pytest.param(
            lambda step: [f"checkpoint_3/{n}" for n in range(step // CHECKPOINT_EVERY)],
            id="a writer of each checkpoint",
        ),
    ],
)
def test_a_thread_or_file_that_stays_is_found(leaked):
    files, threads = soaked(lambda step: checkpoint(step) + leaked(step))
    assert files.startswith("open files are not constant: ")
    assert threads.startswith("threads are not constant: ")


def test_files_and_threads_of_checkpoints_are_told_from_others(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    written = checkpoints / "step-7.partial" / "head.planes"
    written.parent.mkdir(parents=True)
    over, process = threading.Event(), psutil.Process()
    writers = [threading.Thread(target=over.wait, name=name) for name in ("checkpoint_0", "feed")]
    before, threads = files_now(checkpoints)[0], threads_now(process)[0]
    with written.open("wb") as first, (tmp_path / "events.jsonl").open("wb") as second:
        for thread in writers:
            thread.start()
        there, of_checkpoints = files_now(checkpoints)
        assert of_checkpoints == {(first.fileno(), str(written))}
        assert there - before == of_checkpoints | {(second.fileno(), second.name)}
        written.parent.rename(checkpoints / "step-7")
        assert {path for _, path in files_now(checkpoints)[1]} == {
            str(checkpoints / "step-7" / "head.planes")
        }
        all_threads, of_checkpoint = threads_now(process)
        over.set()
    assert of_checkpoint == {writers[0].native_id}
    assert all_threads - threads == {thread.native_id for thread in writers}
    for thread in writers:
        thread.join()
