"""What a soak finds: a thread that stays is told, writers of a checkpoint are not."""

from __future__ import annotations

import threading

import pytest

from tests.support.soak import CHECKPOINT_EVERY, Sample, StandingThreads, judge

STEPS = range(0, 60 * CHECKPOINT_EVERY, CHECKPOINT_EVERY // 2)


class Made(threading.Thread):
    """A thread that is never started."""

    def __init__(self, name: str, number: int):
        super().__init__(name=name)
        self._native_id = number


MAIN = [Made("MainThread", 1), Made("memory-watch", 2)]
NATIVE = [3, 4, 5]
"""Threads of libraries, which Python does not know."""


def soaked(others) -> list[str]:
    """Returns what is told of a run. others: the names of threads beside the usual, by step; a name
    stands for the same thread as long as it is told.
    """
    counted, there, samples = StandingThreads(), {}, []
    for number, step in enumerate(STEPS):
        names = others(step)
        there = {
            name: there.get(name) or Made(name.split("/")[0], 10 * number + 10 + at)
            for at, name in enumerate(names)
        }
        ids = [*NATIVE, *(thread.native_id for thread in (*MAIN, *there.values()))]
        count = counted.count(ids, {*MAIN, *there.values()}, step)
        samples.append(Sample(number, step, 2**30, 9, count))
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
def test_a_thread_that_stays_is_found(leaked):
    (told,) = soaked(lambda step: checkpoint(step) + leaked(step))
    assert told.startswith("threads are not constant: ")
