"""Several GPUs that train adapters, or parts of a model: what each takes is the engine's own, to
the byte, frozen weights are in RAM once, and a step exchanges nothing of them but the weights.
"""

from __future__ import annotations

import pytest

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError
from engine.machine.several_gpus import named_with_several
from engine.model.build.build import build_model
from engine.model.build.find_shape import adapted_shape
from engine.planning.fit.collectives import CollectiveTimes
from engine.planning.fit.job import (
    Job,
    nodes_per_replica_options,
    numbers_of_ranks,
    refuse_contradictions,
)
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.pool import pool_of
from engine.planning.fit.requirements import requirements_of
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.ops import OpKind
from engine.planning.schedule.shards import Shards
from engine.planning.shape.model_shape import ModelShape
from tests.support.chosen import FAST_RATES, config
from tests.support.device_bytes import agreeing_plans, filled_states
from tests.support.gpu_grid import GRID, NoShards, bytes_of
from tests.support.tiny import tiny_config

pytestmark = [pytest.mark.computing, pytest.mark.usefixtures("compiler")]

LORA = {"train__method": "lora", "train__batch_size": 32}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "parts, family, tied, dtype",
    [
        (Adapters(rank=4), "llama", False, "bfloat16"),
        (Adapters(rank=3), "qwen2", True, "float32"),
        (Parts(last_blocks=1), "llama", False, "bfloat16"),
    ],
)
def test_fixed_buffers_of_each_rank_are_its_device_state_to_the_byte(
    parts, family, tied, dtype, ranks
):
    how = ModelConfig(source="tiny", dtype=dtype)
    model = build_model(tiny_config(family, tie_word_embeddings=tied), how, parts)
    states = filled_states(model)
    states.placement.divide(NoShards(ranks))
    plans = (
        one.changed(ranks=ranks)
        for one in GRID
        if not (one.streaming.shared_embed_and_head_slot and tied)
    )
    assert agreeing_plans(model, states, plans) > 10
    states.close()


def big_shape() -> ModelShape:
    """Qwen2.5 7B with adapters, from the catalog."""
    found = adapted_shape(ModelConfig(source="Qwen/Qwen2.5-7B"), Adapters())
    assert found is not None
    return found


def needs_on(ranks: int, **changes):
    asked = config(**LORA | {"engine__gpus": ranks} | changes)
    return requirements_of(asked, named_with_several("2 x H100 SXM", 512), big_shape())


def test_ram_has_frozen_weights_once():
    one, two = (needs_on(ranks, engine__states="host") for ranks in (1, 2))
    assert (one.ranks, two.ranks) == (1, 2)
    for kind in (MemoryItem.WEIGHT_HIGH, MemoryItem.EXP_AVG):
        assert bytes_of(one, PartName.HOST, kind) == bytes_of(two, PartName.HOST, kind) > 0
    for requirements in (two, needs_on(2)):
        for part in pool_of(requirements).parts:
            assert part.total == requirements.parts[part.name].total
            assert all(share.bytes > 0 for share in part.shares)


def test_a_step_gathers_all_weights_and_scatters_the_gradients_of_adapters():
    requirements = needs_on(2, engine__states="host")
    shape, choices = requirements.shape, requirements.chosen.choices
    assert not choices.sharding.unsharded_reads and not choices.placement.gpu_resident_units
    plan, _ = predicted_step(shape, choices, FAST_RATES, requirements.micro_batch, "cuda")
    numels = {unit.name: (unit.numel, unit.weight_numel) for unit in shape.units}
    times, shards = CollectiveTimes(plan, numels, shape.item_bytes, FAST_RATES), Shards(2)
    block = shape.blocks[3]
    gathered = shards.received(block.numel) + shards.received(block.frozen_numel)
    for op in plan.ops:
        if op.unit == block.name and op.kind == OpKind.ALL_GATHER:
            assert times.received(op) == shape.item_bytes * gathered
        if op.kind == OpKind.REDUCE_SCATTER:
            assert times.received(op) < 0.02 * shape.item_bytes * gathered


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_two_gpus_are_predicted_to_be_faster():
    one, two = (needs_on(ranks) for ranks in (1, 2))
    assert 0.45 < two.step_seconds / one.step_seconds < 0.7


def test_auto_compares_numbers_of_gpus_and_copies_planes_to_nodes():
    asked = config(**LORA | {"engine__gpus": "auto"})
    assert numbers_of_ranks(asked, 4, {}) == (1, 2, 4)
    assert nodes_per_replica_options(asked, 2, {}) == (1,)
    divided = asked.with_values({"engine.across_nodes": "shard"})
    job = Job(big_shape(), divided, 1024, ranks=2, nodes=2, nodes_per_replica=2)
    with pytest.raises(
        ConfigError, match="^engine.across_nodes: planes are divided among nodes"
    ) as e:
        refuse_contradictions(job)
    assert "here adapters are trained; choose auto or copy." in str(e.value)
