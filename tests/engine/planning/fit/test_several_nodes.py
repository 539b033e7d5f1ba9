"""Several nodes: what each of them holds, which rows its ranks get, and how long the sums take on
their way between nodes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import ModelConfig
from engine.errors import ConfigError
from engine.machine.link_rates import ASSUMED_NETWORK, seconds_between_nodes
from engine.machine.several_gpus import named_with_several
from engine.model.build.build import build_model
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.device_memory import COLLECTIVE_BYTES
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.requirements import FitStatus, Requirements, SessionFacts, requirements_of
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import OpKind
from engine.planning.schedule.verify_plan import verify_plan
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.device_bytes import agreeing_plans, filled_states
from tests.support.gpu_grid import GRID, bytes_of
from tests.support.plan_text import from_text, to_text
from tests.support.tiny import tiny_config


def chosen_on(nodes: int, ranks: int = 1, gib: float = 80, **changes) -> Chosen:
    job = Job(big_shape(), config(**changes), 1024, ranks=ranks, nodes=nodes)
    return choose(job, Target("cuda", round(gib * GIB), 400 * GIB, FAST_RATES))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("gib", [24, 139])
def test_what_is_chosen_is_a_plan_for_every_rank_of_every_node(ranks, gib):
    chosen = chosen_on(2, ranks, gib, train__batch_size=32 * ranks)
    choices = chosen.choices
    assert (choices.sharding.replicas, choices.sharding.ranks) == (2, ranks)
    assert (chosen.rounding["replicas"], chosen.rounding["ranks"]) == (2, ranks)
    assert chosen.micro_batch_size * choices.batching.micro_batches == 16
    assert not choices.kernels.graphs
    assert not choices.streaming.embed_and_head_in_kept_gradients
    shape = big_shape()
    numel = {unit.name: unit.numel for unit in shape.units}
    blocks = [unit.name for unit in shape.blocks]
    for rank in range(ranks):
        verify_plan(build_step_plan(blocks, False, choices, PlaneSizes(numel=numel, rank=rank)))


def test_a_session_is_continued_as_it_was():
    rounding = chosen_on(2, train__batch_size=32).rounding
    job = Job(big_shape(), config(train__batch_size=32), 1024, rounding, nodes=2)
    assert choose(job, Target("cuda", 48 * GIB, 400 * GIB, FAST_RATES)).rounding == rounding


def test_each_node_holds_all_planes_and_computes_its_part_of_the_rows():
    machine = named_with_several("2 x RTX 4090", 512)
    asked = config(
        engine__gpus=2,
        train__batch_size=64,
        engine__states="host",
        engine__across_nodes="replicate",
    )
    one = requirements_of(asked, machine, big_shape())
    two = requirements_of(asked, machine, big_shape(), SessionFacts(nodes=2, rates=FAST_RATES))
    assert (one.nodes, two.nodes, one.ranks, two.ranks) == (1, 2, 2, 2)
    rows = [
        each.chosen.micro_batch_size * each.chosen.choices.batching.micro_batches
        for each in (one, two)
    ]
    assert rows == [32, 16]
    kind = MemoryItem.WEIGHT_HIGH
    assert bytes_of(one, PartName.HOST, kind) == bytes_of(two, PartName.HOST, kind) > 0
    # There is a group of all ranks, one on the node, and one between the nodes.
    groups = [bytes_of(each, PartName.GPU, MemoryItem.COLLECTIVE) for each in (one, two)]
    assert groups == [COLLECTIVE_BYTES, 3 * COLLECTIVE_BYTES]


def test_gradients_take_their_time_between_nodes():
    shape = big_shape()
    choices = chosen_on(2, train__batch_size=32).choices
    micro_batch = MicroBatch(1, 1024)
    plan, timing = predicted_step(shape, choices, FAST_RATES, micro_batch, "cuda")
    alone, _ = predicted_step(shape, choices.changed(replicas=1), FAST_RATES, micro_batch, "cuda")
    assert OpKind.REDUCE_SCATTER not in {op.kind for op in alone.ops}
    seconds = {
        op.unit: timing.ends[op.index] - timing.starts[op.index]
        for op in plan.ops
        if op.kind == OpKind.REDUCE_SCATTER
    }
    for unit in shape.units:
        size = 4 * unit.numel
        assert seconds[unit.name] == pytest.approx(size / ASSUMED_NETWORK, rel=0.01, abs=1e-4)
    assert seconds_between_nodes(FAST_RATES, 1, 1e9) == 0
    # In a ring of very many nodes, each sends and receives all of it twice.
    assert seconds_between_nodes(FAST_RATES, 1000, ASSUMED_NETWORK) == pytest.approx(2, rel=0.01)
    measured = replace(FAST_RATES, network=2 * ASSUMED_NETWORK)
    assert seconds_between_nodes(measured, 1000, ASSUMED_NETWORK) == pytest.approx(1, rel=0.01)


def on_two(machine, rates, **changes) -> Requirements:
    asked = config(engine__gpus=2, train__batch_size=64, engine__states="host", **changes)
    return requirements_of(asked, machine, big_shape(), SessionFacts(nodes=2, rates=rates))


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_planes_that_are_divided_take_half_of_the_ram_of_two_nodes():
    machine = named_with_several("2 x RTX 4090", 512)
    copy, divide = (
        on_two(machine, FAST_RATES, engine__across_nodes=way) for way in ("replicate", "shard")
    )
    choices = divide.chosen.choices
    assert (
        choices.sharding.ranks,
        choices.sharding.replicas,
        choices.sharding.nodes_per_replica,
    ) == (4, 1, 2)
    assert (divide.nodes, divide.ranks) == (2, 2)
    for kind in (MemoryItem.WEIGHT_HIGH, MemoryItem.EXP_AVG):
        whole = bytes_of(copy, PartName.HOST, kind)
        assert bytes_of(divide, PartName.HOST, kind) == whole // 2 > 0
    # One group has all ranks.
    assert bytes_of(divide, PartName.GPU, MemoryItem.COLLECTIVE) == COLLECTIVE_BYTES
    rounding = divide.chosen.rounding
    job = Job(
        big_shape(),
        config(train__batch_size=64),
        1024,
        rounding,
        ranks=2,
        nodes=2,
        nodes_per_replica=2,
    )
    target = Target("cuda", 24 * GIB, 400 * GIB, FAST_RATES)
    again = choose(job, target)
    assert again.rounding == rounding
    numel = {unit.name: unit.numel for unit in big_shape().units}
    blocks = [unit.name for unit in big_shape().blocks]
    for rank in range(4):
        plan = build_step_plan(blocks, False, again.choices, PlaneSizes(numel=numel, rank=rank))
        verify_plan(plan)
        assert from_text(to_text(plan)) == plan and plan.nodes_per_replica == 2


def test_what_does_not_fit_on_one_node_is_divided_and_else_the_faster_way_is_taken():
    small = named_with_several("2 x RTX 4090", 72)
    assert (
        on_two(small, FAST_RATES, engine__across_nodes="replicate").status()
        == FitStatus.DOES_NOT_FIT
    )
    requirements = on_two(small, FAST_RATES)
    assert (
        requirements.chosen.choices.sharding.nodes_per_replica == 2
        and requirements.status() != FitStatus.DOES_NOT_FIT
    )
    large = named_with_several("2 x RTX 4090", 512)
    slow, fast = replace(FAST_RATES, network=2e8), replace(FAST_RATES, link=1e11, network=1e11)
    assert on_two(large, slow).chosen.choices.sharding.nodes_per_replica == 1
    # AdamW on each node then updates half of the model.
    assert on_two(large, fast).chosen.choices.sharding.nodes_per_replica == 2


def test_weights_and_gradients_that_are_divided_pass_the_network():
    shape, choices = big_shape(), chosen_on(1, 4, train__batch_size=64).choices
    rates = replace(FAST_RATES, link=1e11, network=1e9)

    def seconds(of: PlanChoices) -> dict[OpKind, float]:
        plan, timing = predicted_step(shape, of, rates, MicroBatch(1, 1024), "cuda")
        found = {op.kind: timing.ends[op.index] - timing.starts[op.index] for op in plan.ops}
        return {kind: found[kind] for kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)}

    within = seconds(choices.changed(unsharded_reads=False))
    across = seconds(choices.changed(unsharded_reads=False, nodes_per_replica=2))
    for kind, least in within.items():
        assert across[kind] == pytest.approx(100 * least, rel=0.02)


def test_rows_that_nodes_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="^train.batch_size: 18 is no multiple of the 4 ranks"):
        chosen_on(2, 2, train__batch_size=18)
    with pytest.raises(ConfigError, match="^train.micro_batch_size: 8 does not divide the 12 row"):
        chosen_on(2, 1, train__batch_size=24, train__micro_batch_size=8)
    with pytest.raises(
        ConfigError, match="^engine.activation_checkpointing: .*, or start one process on one no"
    ):
        chosen_on(2, 1, train__batch_size=16, engine__activation_checkpointing="offload_pairs")
    assert replace(Job(big_shape(), config(train__batch_size=16), 8), nodes=4).rows == 4


@pytest.mark.parametrize("family, tied", [("llama", False), ("gpt2", True)])
def test_the_buffers_of_a_rank_alone_on_its_node_are_its_device_state_to_the_byte(family, tied):
    model = build_model(
        tiny_config(family, tie_word_embeddings=tied), ModelConfig(source="tiny", dtype="bfloat16")
    )
    states = filled_states(model)
    plans = [
        one.changed(replicas=2)
        for one in GRID
        if not (one.streaming.shared_embed_and_head_slot and tied)
    ]
    assert agreeing_plans(model, states, plans) == len(plans)
    states.close()
