"""Rank 0 always knows which step the common planes hold, also when a rank is lost."""

from __future__ import annotations

import threading

import pytest

from engine.errors import RankError
from engine.runtime.distributed.versions import RankZeroVersion, WorkerVersion

UNITS = ("embed", "0", "head")
PATIENCE = 30


class Told:
    """What the other ranks are told, and when they have written a step."""

    def __init__(self) -> None:
        self.gone: list[int] = []
        self.waited: list[int] = []
        self.lost = False
        self.held = RankZeroVersion(UNITS, self.gone.append, self._wait)

    def _wait(self, step: int) -> None:
        self.waited.append(step)
        if self.lost:
            raise RankError("Rank 1 of 2 is lost.")


class Reader:
    """Protects the planes of one step until it is told to let go."""

    is_ready = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lets_go = threading.Event()

    def arm(self) -> None:
        self.is_ready = True

    def protect(self, unit: str) -> None:
        self.asked.append(unit)
        assert self.lets_go.wait(PATIENCE)

    def end(self) -> None:
        self.is_ready = True


@pytest.fixture
def told():
    return Told()


def apply(told: Told, step: int) -> None:
    for unit in UNITS:
        told.held.begin(step, unit)
    told.held.complete(step)


def test_others_are_told_once_a_step_and_waited_for(told):
    apply(told, 1)
    apply(told, 2)
    assert told.gone == [1, 2] == told.waited
    assert told.held.step == 2 and not told.held.is_mixed


def test_a_rank_that_is_lost_before_the_updates_leaves_the_planes_whole(told):
    apply(told, 1)
    told.lost = True
    assert told.held.step == 1 and not told.held.is_mixed


def test_a_rank_that_is_lost_among_the_updates_leaves_a_mixture(told):
    apply(told, 1)
    told.lost = True
    with pytest.raises(RankError):
        apply(told, 2)
    assert told.held.step == 1
    assert told.held.is_mixed
    assert told.held.writing == 2


def test_others_write_nothing_while_a_checkpoint_needs_the_planes(told):
    apply(told, 1)
    reader = Reader()
    told.held.read_by(1, reader)
    updating = threading.Thread(target=apply, args=(told, 2), daemon=True)
    updating.start()
    while not reader.asked:
        pass
    assert told.gone == [1] and not told.held.is_mixed
    reader.lets_go.set()
    updating.join(PATIENCE)
    assert told.gone == [1, 2] and told.held.step == 2
    # The other ranks are let in at once, so no unit may still be needed.
    assert set(UNITS) <= set(reader.asked)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_step_that_is_skipped_is_waited_for_by_nobody(told, has_begun):
    """Updates on the device begin when they are launched, before the norm is known."""
    apply(told, 1)
    if has_begun:
        told.held.begin(2, "embed")
    told.held.abort()
    told.held.skip(2)
    assert told.waited == [1]
    assert told.held.step == 2
    assert not told.held.is_mixed
    apply(told, 3)
    assert told.waited == [1, 3] and told.gone[-1] == 3
    assert told.held.update_number(3) == 2


def test_an_update_waits_for_rank_0_s_word():
    held, begun = WorkerVersion(), []

    def update(step: int) -> None:
        held.begin(step, "0")
        begun.append(step)

    held.expect()
    for step in (1, 2):
        updating = threading.Thread(target=update, args=(step,), daemon=True)
        updating.start()
        updating.join(0.1)
        assert begun == list(range(1, step))
        held.go(step)
        updating.join(PATIENCE)
        assert begun == list(range(1, step + 1))


def test_no_update_waits_for_a_step_that_was_given_up():
    held = WorkerVersion()
    held.expect()
    updating = threading.Thread(target=held.begin, args=(1, "0"), daemon=True)
    updating.start()
    updating.join(0.1)
    assert updating.is_alive()
    held.end_waits()
    updating.join(PATIENCE)
    assert not updating.is_alive()
    held.expect()  # the next step waits again
    updating = threading.Thread(target=held.begin, args=(2, "0"), daemon=True)
    updating.start()
    updating.join(0.1)
    assert updating.is_alive()
    held.go(2)
    updating.join(PATIENCE)
    assert not updating.is_alive()
