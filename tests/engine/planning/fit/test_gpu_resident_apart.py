"""Blocks whose base is frozen live on the device apart from each other, so that the bus never has
to bring many blocks one after the other.
"""

from __future__ import annotations

import itertools

import pytest

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.machine.known_machines import named_machine
from engine.model.build.build import build_model
from engine.model.build.find_shape import adapted_shape
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import pool_of
from engine.planning.fit.requirements import requirements_of
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import Lane
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.device_bytes import agreeing_plans, filled_states
from tests.support.size_grid import BUFFER_GRID
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.computing


def lora_needs(model: str, rows: int, ram: float, **changes):
    asked = config(model__source=model, train__method="lora", train__batch_size=rows, **changes)
    shape = adapted_shape(ModelConfig(source=model), Adapters())
    return requirements_of(asked, named_machine("H200", ram), shape)


def test_the_blocks_that_live_there_are_spread_evenly():
    for blocks, gpu_resident, resident in itertools.product((1, 5, 28), range(31), (0, 1, 4)):
        if max(0, gpu_resident - 1) + resident > blocks:
            continue
        choices = PlanChoices().changed(
            gpu_resident_units=gpu_resident, gpu_resident_apart=True, blocks_kept_in_slots=resident
        )
        places = choices.placement.gpu_resident_places(blocks)
        assert len(places) == max(0, gpu_resident - 1)
        assert all(0 <= at < blocks - resident for at in places)
        gaps = {then - now for now, then in itertools.pairwise([-1, *places])}
        assert not gaps or max(gaps) - min(gaps) <= 1
    names = [f"block {at}" for at in range(4)]
    assert PlanChoices().changed(
        gpu_resident_units=3, gpu_resident_apart=True
    ).placement.gpu_resident(names) == (*("embed", "block 1", "block 3"),)
    whole = PlanChoices().changed(gpu_resident_units=6, gpu_resident_apart=True)
    assert whole.placement.gpu_resident(names) == ("embed", *names, "head")


@pytest.mark.parametrize(
    "model, rows, ram", [("Qwen/Qwen2.5-32B", 64, 128), ("meta-llama/Llama-3.1-70B", 32, 256)]
)
def test_a_frozen_base_is_fetched_while_blocks_compute(model, rows, ram):
    """With the first blocks there instead, the device waits for the bus at the last ones."""
    requirements = lora_needs(model, rows, ram)
    chosen = requirements.chosen.choices
    assert chosen.placement.gpu_resident_apart
    assert 10 < chosen.placement.gpu_resident_units < len(requirements.shape.units)

    def seconds(choices: PlanChoices) -> tuple[float, float]:
        _, timing = predicted_step(
            requirements.shape, choices, FAST_RATES, requirements.micro_batch, "cuda"
        )
        return timing.seconds, timing.busy[Lane.COMPUTE]

    apart, compute = seconds(chosen)
    first = chosen.changed(gpu_resident_apart=False, device_updated_units=(), update_buffers=0)
    assert apart < 1.01 * compute
    assert seconds(first)[0] - compute > 5 * (apart - compute)


def test_what_is_trained_whole_lives_there_from_the_first_block_on():
    requirements = requirements_of(
        config(train__batch_size=64), named_machine("H200", 128), big_shape()
    )
    assert requirements.chosen.choices.placement.gpu_resident_units > 1
    assert not requirements.chosen.choices.placement.gpu_resident_apart


def test_the_pool_says_how_many_of_which_blocks_live_where():
    requirements = lora_needs("Qwen/Qwen2.5-32B", 64, 128)
    pool = pool_of(requirements)
    for part in pool.parts:
        assert part.total == requirements.parts[part.name].total
    here, *others = pool.units
    blocks = requirements.chosen.choices.placement.gpu_resident_units - 1
    assert here.placement.weights == PartName.GPU
    assert here.words == f"embed and {blocks} of blocks 1 to 63"
    assert len(here.numbers) + sum(len(each.numbers) for each in others) == 66
    assert here.to_dict()["count"] == blocks + 1


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_buffers_are_the_device_state_to_the_byte():
    model = build_model(
        tiny_config("llama", num_hidden_layers=4),
        ModelConfig(source="tiny", dtype="bfloat16"),
        Adapters(rank=4),
    )
    plans = [
        each.changed(gpu_resident_units=gpu_resident, gpu_resident_apart=True)
        for each in BUFFER_GRID[::3]
        if each.activations.blocks_per_saved_input == 1
        and not each.placement.gpu_resident_units
        and not each.streaming.shared_embed_and_head_slot
        if each.gradients.main_grad != "host"
        for gpu_resident in (2, 3)
        if gpu_resident - 1 + each.placement.blocks_kept_in_slots <= 4
    ]
    assert agreeing_plans(model, filled_states(model), plans) > 20


def test_moments_on_the_disk_keep_the_usual_order():
    names = [f"block {at}" for at in range(3)]
    sizes = PlaneSizes(numel=dict.fromkeys(["embed", *names, "head"], 64))
    choices = PlanChoices().changed(
        gpu_resident_units=2, gpu_resident_apart=True, disk_offloaded_units=1
    )
    with pytest.raises(ValueError, match="moments on the disk"):
        build_step_plan(names, False, choices, sizes)
