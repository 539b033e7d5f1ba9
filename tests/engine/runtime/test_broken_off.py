"""A step that is broken off, at whichever op, is not applied in any part."""

from __future__ import annotations

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from tests.support.tiny import Streamed, plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

CHOICES = PlanChoices().changed(micro_batches=2)
OPTIMIZER_STEP = ("weight_high", "weight_low", "exp_avg", "exp_avg_sq")


class Enough(Exception):
    pass


def states(run: Streamed) -> list[torch.Tensor]:
    """Returns copies of the planes that an update changes, each [numel]."""
    return [
        run.host_states.tensor(u.name, p).clone() for u in run.model.units for p in OPTIMIZER_STEP
    ]


def test_a_step_that_is_broken_off_changes_no_state():
    run = streamed(plain_model(tiny_config("qwen2")), CHOICES, dtype="bfloat16")
    batches, calls = random_batches(2, seed=1), 0

    def count() -> None:
        nonlocal calls
        calls += 1

    run.engine.train_step(1, batches, 1e-2, check=count)
    run.engine.drain()
    before, whole = states(run), calls
    assert whole > 2 * len(run.model.units)
    for at in range(1, whole + 1):  # an engine calls `check` only while nothing is applied
        calls = 0

        def break_off(at: int = at) -> None:
            count()
            if calls == at:
                raise Enough

        with pytest.raises(Enough):
            run.engine.train_step(2, batches, 1e-2, check=break_off)
        run.engine.drain()
        assert all(map(torch.equal, states(run), before)), f"broken off at op {at}"
    run.engine.train_step(2, batches, 1e-2)
    run.engine.drain()
    assert not all(map(torch.equal, states(run), before))
    run.close()
