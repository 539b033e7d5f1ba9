"""On a GPU, too, models whose blocks hand on values have the gradients of plain training, and any
plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine.runtime.backend import Backend
from engine.runtime.cuda_backend import CudaBackend
from tests.engine.model.test_families import AMPLIFIES
from tests.engine.passing.test_handed_models import BASE, HANDING, PLANS
from tests.engine.plan.test_laws import assert_same_bits
from tests.support.bf16_parity import distance, plain_gradients
from tests.support.families import tiny_family_config
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = pytest.mark.gpu


def gradients_are_those_of_plain_training(family: str, backend: Backend) -> None:
    """One step in float32; the norm is not clipped, so the gradients are in their planes."""
    plain = plain_model(tiny_family_config(family))
    run = streamed(plain, BASE, backend=backend)
    batches, homes = random_batches(2, seed=1), []
    run.engine.train_step(1, batches, 0.0, homes.append)
    run.engine.drain()
    loss, gradients = plain_gradients(plain.to(backend.device), batches)
    ours = {
        spec.full_name: run.store.tensor(unit.name, "grad")[offset : offset + spec.numel]
        .view(spec.shape)
        .to(backend.device, copy=True)
        for unit in run.model.units
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets)
    }
    run.close()
    assert homes[0].loss == pytest.approx(loss, rel=1e-5)
    assert distance(ours, gradients) < (2e-5 if family in AMPLIFIES else 5e-6)


def any_plan_gives_the_same_bits(family: str, open_backend: Callable[[], Backend]) -> None:
    def planes_after(**choices) -> list[torch.Tensor]:
        plan = replace(BASE, **choices)
        plain = plain_model(tiny_family_config(family))
        # An engine that is closed has ended the lanes of its backend.
        run = streamed(plain, plan, backend=open_backend(), dtype="bfloat16")
        for step in (1, 2):
            run.engine.train_step(step, random_batches(plan.micro_batches, seed=step), 1e-2)
        run.engine.drain()
        planes = [
            run.store.tensor(unit.name, plane).clone()
            for unit in run.model.units
            for plane in run.store.planes
        ]
        run.close()
        return planes

    expected = planes_after()
    for choices in PLANS.values():
        assert_same_bits(planes_after(**choices), expected)


@pytest.mark.parametrize("family", [*HANDING, "deepseek_v4"])
def test_gradients_are_those_of_plain_training(family):
    gradients_are_those_of_plain_training(family, CudaBackend())


@pytest.mark.parametrize("family", [*HANDING, "deepseek_v4"])
def test_any_plan_gives_the_same_bits(deterministic, family):
    any_plan_gives_the_same_bits(family, CudaBackend)
