"""Blocks in sequence chunks train as plain transformers does, in float32 and in bf16, and with
sequence chunks of one size any plan gives the same bits.
"""

from __future__ import annotations

import pytest
import torch

from engine.config.adapters import Adapters
from engine.planning.schedule.choices import PlanChoices
from tests.support.bf16_parity import Bounds, Rows, compare_in_bf16
from tests.support.parity import compare
from tests.support.same_bits import assert_same_bits, planes_after
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

TILED = PlanChoices().changed(micro_batches=2, tile_tokens=10)
SWEEP = "it sweeps over families; a plain run compares a module and adapters"
FAMILIES = ["llama", "mixtral"]
OTHER_PLANS = {
    "kept": dict(blocks_without_recompute=2, blocks_kept_in_slots=2),
    "kept in one slot": dict(blocks_without_recompute=3, slots=2),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "in pairs": dict(blocks_per_saved_input=2, offloaded_block_inputs=True),
}


@pytest.mark.slow(SWEEP)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_equals_plain_training(family):
    compare(family, False, 2, TILED)


@pytest.mark.slow(SWEEP)
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_training_in_bf16_is_as_near_to_float32_as_plain_training(family):
    bounds = Bounds(norm=2e-2, update=0.15 if family == "mixtral" else 6e-2)
    compare_in_bf16(tiny_config(family), Rows(2, 12, 7), TILED, bounds=bounds, steps=2)


@pytest.mark.slow("it trains by six plans; the laws of plans do not depend on sequence tiling")
@pytest.mark.parametrize("family", ["mixtral"])
def test_any_plan_gives_the_same_bits(family):
    right = planes_after(TILED, family=family)
    for changes in OTHER_PLANS.values():
        assert_same_bits(planes_after(TILED.changed(**changes), family=family), right)


def test_evaluation_with_tiling_equals_evaluation_of_whole_rows():
    plain = plain_model(tiny_config("qwen2"))
    losses = []
    for choices in (TILED, PlanChoices().changed(micro_batches=2)):
        run = streamed(plain, choices)
        losses.append(run.engine.evaluate(random_batches(2)))
        run.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert torch.isfinite(torch.tensor(losses)).all()


def test_tiled_adapters_get_the_gradients_of_whole_rows():
    plain, found = plain_model(tiny_config("qwen2")), []
    for choices in (TILED, PlanChoices().changed(micro_batches=2)):
        run = streamed(plain, choices, parts=Adapters(rank=4))
        for unit in run.model.blocks:  # the second factor of a new adapter is zero
            for spec in unit.layout.parameters:
                if spec.adapter:
                    torch.manual_seed(len(spec.full_name))
                    run.host_states.parameters.write(
                        unit.name, spec.name, torch.randn(spec.shape) / 10
                    )
        run.engine.train_step(1, random_batches(2), 1e-3)
        run.engine.drain()
        found.append(torch.cat([run.host_states.tensor(u.name, "grad") for u in run.model.blocks]))
        run.close()
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()
    assert found[1].norm() > 0
