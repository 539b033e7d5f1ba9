"""Dropout is drawn anew for every step, unit and micro-batch, again alike in the recompute, and
never in an evaluation.
"""

from __future__ import annotations

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

MICRO_BATCHES = 2
STEPS = 2


def with_dropout():
    """Returns a plain model of three blocks that drop a fifth of everything."""
    config = tiny_config("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    return plain_model(config)


class SeedsNoted(CpuBackend):
    """Notes every seed that the ops ask for."""

    def __init__(self):
        super().__init__()
        self.seeds: list[int] = []

    def seed(self, value: int) -> None:
        self.seeds.append(value)
        super().seed(value)


def test_every_step_unit_and_micro_batch_has_a_seed_that_its_recompute_repeats():
    backend = SeedsNoted()
    run = streamed(
        with_dropout(), PlanChoices().changed(micro_batches=MICRO_BATCHES), backend=backend
    )
    of_steps = []
    for step in range(1, STEPS + 1):
        backend.seeds.clear()
        run.engine.train_step(step, random_batches(MICRO_BATCHES, seed=1), 0.0)
        run.engine.drain()
        of_steps.append(list(backend.seeds))
    run.close()
    drawing = MICRO_BATCHES * len(run.model.units[:-1])  # all units but the head
    for seeds in of_steps:
        forward, backward = seeds[:drawing], seeds[drawing:]
        assert len(set(forward)) == drawing, "two places draw the same numbers"
        assert sorted(forward) == sorted(backward), "a recompute draws other numbers"
    assert not set(of_steps[0]) & set(of_steps[1])


def test_the_same_rows_lose_otherwise_in_the_next_step():
    run, losses = streamed(with_dropout(), PlanChoices().changed(micro_batches=MICRO_BATCHES)), []
    for step in range(1, STEPS + 1):
        batches = random_batches(MICRO_BATCHES, seed=1)
        run.engine.train_step(step, batches, 0.0, lambda home: losses.append(home.loss))
        run.engine.drain()
    run.close()
    assert len(set(losses)) == STEPS


def test_an_evaluation_between_two_steps_draws_nothing():
    plain, batches = with_dropout(), random_batches(MICRO_BATCHES, seed=1)
    run = streamed(plain, PlanChoices().changed(micro_batches=MICRO_BATCHES))
    run.engine.train_step(1, batches, 0.0)
    run.engine.drain()
    found = run.engine.evaluate(batches)
    run.close()
    with torch.no_grad():
        expected = plain_loss(plain.eval(), batches).item()
        dropped = plain_loss(plain.train(), batches).item()
    assert found == pytest.approx(expected, rel=1e-5) != pytest.approx(dropped, rel=1e-3)
