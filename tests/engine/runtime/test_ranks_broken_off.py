"""A step that fails on one rank fails on all of them, in the same call, and is not applied in any
part on any. A step with a loss that is not finite can be skipped, and all ranks go on.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.runtime.device import cuda_backend
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.lanes import ImmediateStreams, lanes_without_a_gpu
from tests.support.rank_choices import DEVICE_UPDATES, LATE
from tests.support.ranks import Rendezvous, ThreadExchange, on_ranks
from tests.support.same_bits import DelayedBackend
from tests.support.sets import PLAN_SWEEP, slow_but
from tests.support.tiny import random_batches
from tests.support.trained_ranks import RATE, Job, open_rank, shards_of

pytestmark = pytest.mark.computing

JOB = Job("qwen2", "bfloat16", changes={"tie_word_embeddings": False})
PLANS: dict[str, dict[str, Any]] = {
    "usual": {},
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "late moments, one micro-batch a round": dict(
        rounds=2, main_grad=MainGrad.SHARDS, moments_after_weights=True
    ),
    "some on the device": dict(device_updated_units=DEVICE_UPDATES["some"], update_buffers=2),
    "all on the device": dict(
        device_updated_units=DEVICE_UPDATES["all"], update_buffers=2, gradients_on_gpu=True
    ),
}
BAD_STEP = 2
STATES = ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")


class Spoilt(ThreadExchange):
    """Has a number that is not finite in what one rank brings, as if its rows had made it."""

    def __init__(self, rendezvous: Rendezvous, rank: int, what: str, number: float):
        super().__init__(rendezvous, rank)
        self._what, self._number = what, number
        self.spoils = False

    def reduce_scatter(self, gradients: torch.Tensor) -> None:
        if self.spoils and self._what == "gradient norm":
            gradients[3] = self._number
        super().reduce_scatter(gradients)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        if self.spoils and self._what == "loss":
            values = values.clone()
            values[-1] = self._number
        return super().all_reduce(values)


def step(run: Any, number: int) -> None:
    run.engine.train_step(number, random_batches(JOB.micro_batches, seed=number), RATE)


def states_of(run: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {key: shard for key, shard in shards_of(run).items() if key[1] in STATES}


def all_equal(ours: dict, theirs: dict) -> bool:
    return all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    "bad",
    slow_but(
        [
            (name, what, number)
            for name in PLANS
            for what, number in (("loss", math.nan), ("gradient norm", math.inf))
        ],
        [
            ("usual", "gradient norm", math.inf),
            ("all on the device", "loss", math.nan),
            ("late moments, one micro-batch a round", "gradient norm", math.inf),
        ],
        PLAN_SWEEP,
    ),
    ids=lambda bad: ", ".join(map(str, bad)),
)
@pytest.mark.parametrize(
    "in_threads, culprit", [(False, 0), (True, 1)], ids=["inline", "lanes in threads"]
)
def test_all_ranks_give_up_the_same_step_and_can_skip_it(monkeypatch, bad, culprit, in_threads):
    """Whichever rank has the bad rows; the bad element is in the shard of the first."""
    monkeypatch.setattr(cuda_backend, "torch", ImmediateStreams())
    name, what, number = bad
    choices = PlanChoices().changed(micro_batches=2, ranks=2, **PLANS[name])
    backend = lanes_without_a_gpu if in_threads else CpuBackend

    def work(collectives: ThreadExchange) -> tuple[bool, dict, dict]:
        spoilt = Spoilt(collectives._rendezvous, collectives.rank, what, number)
        run = open_rank(JOB, choices, spoilt, backend())
        step(run, 1)
        run.engine.drain()
        before = states_of(run)
        spoilt.spoils = collectives.rank == culprit
        with pytest.raises(NonFiniteError, match=f"The {what} of step {BAD_STEP} is not a finite"):
            step(run, BAD_STEP)
        with contextlib.suppress(NonFiniteError):  # lanes with threads raise it again
            run.engine.drain()
        unchanged = all_equal(states_of(run), before)
        spoilt.spoils = False
        run.host_states.held.abort()
        run.host_states.held.skip(BAD_STEP)
        step(run, 3)
        run.engine.drain()
        after = states_of(run)
        run.close()
        return unchanged, before, after

    def without(collectives: ThreadExchange) -> dict:
        run = open_rank(JOB, choices, collectives)
        step(run, 1)
        run.host_states.held.skip(BAD_STEP)
        step(run, 3)
        run.engine.drain()
        expected = states_of(run)
        run.close()
        return expected

    for (unchanged, before, after), expected in zip(on_ranks(2, work), on_ranks(2, without)):
        assert unchanged
        assert all_equal(after, expected) and not all_equal(after, before)


@pytest.mark.parametrize("late", ["exchange", "all"])
def test_it_is_raised_by_the_call_that_submits_the_step_however_late_a_lane_is(late):
    """Else one rank would be in the next step, where it would wait for a rank that is not."""
    choices = PlanChoices().changed(micro_batches=2, ranks=2)

    def work(collectives: ThreadExchange) -> bool:
        spoilt = Spoilt(collectives._rendezvous, collectives.rank, "loss", math.nan)
        backend = DelayedBackend(LATE[late] if collectives.rank == 1 else ())
        run = open_rank(JOB, choices, spoilt, backend)
        before = states_of(run)
        spoilt.spoils = collectives.rank == 1
        with pytest.raises(NonFiniteError):
            step(run, 1)
        return all_equal(states_of(run), before)

    assert on_ranks(2, work) == [True, True]


class Enough(Exception):
    pass


def test_ranks_that_break_a_step_off_together_change_no_state():
    """`check` asks every rank before each op; a stop reaches all of them at the same op."""
    choices = PlanChoices().changed(micro_batches=2, ranks=2)

    def work(collectives: ThreadExchange) -> list[bool]:
        run = open_rank(JOB, choices, collectives)
        calls, stop_at, found = 0, 0, []

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise Enough

        run.engine.train_step(1, random_batches(JOB.micro_batches, seed=1), RATE, check=check)
        run.engine.drain()
        before, whole = states_of(run), calls
        for stop_at in range(1, whole + 1, 3):  # noqa: B007  `check` reads it
            calls = 0
            with pytest.raises(Enough):
                run.engine.train_step(
                    2, random_batches(JOB.micro_batches, seed=2), RATE, check=check
                )
            run.engine.drain()
            found.append(all_equal(states_of(run), before))
        step(run, 2)
        run.engine.drain()
        found.append(not all_equal(states_of(run), before))
        run.close()
        return found

    ours, theirs = on_ranks(2, work)
    assert len(ours) == len(theirs) > 10
    assert all(ours)
    assert all(theirs)


def test_a_dry_run_of_all_ranks_changes_no_state():
    choices = PlanChoices().changed(micro_batches=2, ranks=2)

    def work(collectives: ThreadExchange) -> bool:
        run = open_rank(JOB, choices, collectives)
        before = states_of(run)
        run.engine.dry_run(random_batches(JOB.micro_batches, seed=1))
        unchanged = all_equal(states_of(run), before)
        run.close()
        return unchanged

    assert on_ranks(2, work) == [True, True]
