"""On a GPU, weights that stay in fp32 arrive whole, and any plan gives the same bits."""

from __future__ import annotations

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from tests.support.families import tiny_family_config
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = pytest.mark.gpu

BASE = PlanChoices().changed(micro_batches=2)
DEVICE_UPDATES = dict(device_updated_units=("block 1", "block 2", "head"), update_buffers=2)


def planes_after(choices: PlanChoices, family: str) -> list[torch.Tensor]:
    """Every plane after three steps in bf16. The weights in the slots of the last blocks must be
    the masters.
    """
    config = tiny_family_config(family)
    backend = CudaBackend()
    run = streamed(plain_model(config), choices, backend=backend, dtype="bfloat16", config=config)
    for step in range(1, 4):
        run.engine.train_step(step, random_batches(choices.batching.micro_batches, seed=step), 1e-2)
    run.engine.drain()
    run.engine.evaluate(random_batches(1, seed=9))  # fetches the weights after the last step
    for slot, names in run.engine.plan.slots.items():
        for unit in (run.model.unit(name) for name in names if len(names) == 1):
            if unit.block is None:
                continue
            views = run.engine.templates.parameters(slot, unit)
            for spec, parameter in zip(unit.layout.parameters, views):
                if spec.keep_in_fp32:
                    master = run.host_states.parameters.master(unit.name, spec.name)
                    assert torch.equal(parameter.cpu(), master), spec.full_name
    planes = run.kept_planes()
    run.close()
    return planes


@pytest.mark.parametrize("family", ["ernie4_5_moe", "hunyuan_v1_moe"])
def test_any_plan_gives_the_same_bits(family, deterministic):
    expected = planes_after(BASE, family)
    for changes in (
        dict(slots=1, prefetch_depth=1),
        dict(slots=3, prefetch_depth=2),
        dict(blocks_kept_in_slots=4),
        dict(offloaded_block_inputs=True),
    ):
        assert_same_bits(planes_after(BASE.changed(**changes), family), expected)
    updated_on_device = planes_after(BASE.changed(**DEVICE_UPDATES), family)
    for changes in (dict(blocks_kept_in_slots=4), dict(slots=3, update_buffers=3)):
        choices = BASE.changed(**(DEVICE_UPDATES | changes))
        assert_same_bits(planes_after(choices, family), updated_on_device)
