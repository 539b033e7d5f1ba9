"""On a GPU, too, models whose blocks hand on values have the gradients of plain training, and any
plan gives the same bits.
"""

from __future__ import annotations

import pytest

from engine.runtime.device.backend import Backend
from engine.runtime.device.cuda_backend import CudaBackend
from tests.support.bf16_parity import distance, plain_gradients
from tests.support.cross_layer_models import BASE, HANDING, PLANS, planes_after
from tests.support.families import tiny_family_config
from tests.support.family_parity import AMPLIFIES
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = pytest.mark.gpu


def gradients_are_those_of_plain_training(family: str, backend: Backend) -> None:
    """One step in float32; the norm is not clipped, so the gradients are in their planes."""
    plain = plain_model(tiny_family_config(family))
    run = streamed(plain, BASE, backend=backend)
    batches, device_updates = random_batches(2, seed=1), []
    run.engine.train_step(1, batches, 0.0, device_updates.append)
    run.engine.drain()
    loss, gradients = plain_gradients(plain.to(backend.device), batches)
    ours = {
        spec.full_name: run.host_states.tensor(unit.name, "grad")[offset : offset + spec.numel]
        .view(spec.shape)
        .to(backend.device, copy=True)
        for unit in run.model.units
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets)
    }
    run.close()
    assert device_updates[0].loss == pytest.approx(loss, rel=1e-5)
    assert distance(ours, gradients) < (2e-5 if family in AMPLIFIES else 5e-6)


@pytest.mark.parametrize("family", [*HANDING, "deepseek_v4"])
def test_gradients_are_those_of_plain_training(family):
    gradients_are_those_of_plain_training(family, CudaBackend())


@pytest.mark.parametrize("family", [*HANDING, "deepseek_v4"])
def test_any_plan_gives_the_same_bits(deterministic, family):
    # An engine that is closed has ended the lanes of its backend, so each has one of its own.
    expected = planes_after(family, BASE, CudaBackend())
    for choices in PLANS.values():
        assert_same_bits(planes_after(family, BASE.changed(**choices), CudaBackend()), expected)
