"""Several GPUs: what each takes is the engine's own, to the byte, plans for them are valid, and
their steps take as long as their copies, products and exchanges do.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from engine.config.settings import ModelConfig, TrainConfig
from engine.data.batches.rows import micro_batch_bounds
from engine.errors import ConfigError
from engine.machine.link_rates import ASSUMED_LINK, START_SECONDS, of_rank
from engine.machine.rates import Rates
from engine.machine.several_gpus import named_with_several
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import (
    fixed_items,
    gradient_ring_bytes,
    offloaded_input_bytes,
    state_bytes,
    update_buffer,
)
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.device_memory import COLLECTIVE_BYTES, RUNTIME_BYTES
from engine.planning.fit.fastest import SHORT_UNIT_SECONDS
from engine.planning.fit.job import Job, Target, numbers_of_ranks
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.pool import pool_of
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import Requirements, requirements_of
from engine.planning.fit.simulate_step import op_seconds, predicted_step
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import Lane, MainGrad, OpKind
from engine.planning.schedule.shards import Shards
from engine.planning.schedule.verify_plan import verify_plan
from engine.planning.shape.catalog import entry_of
from engine.planning.shape.model_shape import ModelShape
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.device_state import DeviceState, update_buffer_of
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config
from tests.support.gpu_grid import GRID, NoShards, bytes_of
from tests.support.ranks import on_ranks
from tests.support.tiny import plain_model, streamed, tiny_config

pytestmark = [pytest.mark.computing, pytest.mark.usefixtures("compiler")]

RANKS = (2, 4)


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "family, tied, dtype",
    [("llama", False, "bfloat16"), ("gpt2", True, "float32"), ("mixtral", False, "bfloat16")],
)
@pytest.mark.parametrize("ranks", RANKS)
def test_fixed_buffers_of_each_rank_are_its_device_state_to_the_byte(family, tied, dtype, ranks):
    model = build_model(
        tiny_config(family, tie_word_embeddings=tied), ModelConfig(source="tiny", dtype=dtype)
    )
    shape = shape_of(model)
    states = HostStates(model.layouts, dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    states.placement.divide(NoShards(ranks))
    numel = {unit.name: unit.numel for unit in shape.units}
    assert any(Shards(ranks).padded(size) != size for size in numel.values())
    for one_rank_s in GRID:
        if one_rank_s.streaming.shared_embed_and_head_slot and tied:
            continue
        choices = one_rank_s.changed(ranks=ranks)
        buffer = update_buffer(shape, choices)
        of_states = update_buffer_of(states, choices.updates.update_chunks, Shards(ranks))
        assert buffer == (
            of_states.without_gradients if choices.gradients.gradients_on_gpu else of_states
        )
        expected = sum(item.bytes for item in fixed_items(shape, choices, 24 * 32))
        for rank in (0, ranks - 1):
            if (
                rank and choices.placement.gpu_resident_units
            ):  # the planes of the host states are those of rank 0
                continue
            sizes = PlaneSizes(
                numel=numel,
                chunk_numel=buffer.numel,
                buffer_bytes=buffer.bytes,
                item_bytes=shape.item_bytes,
                rank=rank,
            )
            names = [unit.name for unit in model.blocks]
            plan = build_step_plan(names, model.tied, choices, sizes)
            states.placement.arrange(choices.placement.gpu_resident(names), CpuBackend())
            state = DeviceState(model, plan, torch.device("cpu"), 24 * 32, states, buffer)
            assert state.fixed_bytes() == expected, choices
    states.close()


@pytest.mark.parametrize("ranks", RANKS)
def test_what_engines_allocate_is_what_is_reported(ranks):
    plain = plain_model(tiny_config("llama"))
    choices = PlanChoices().changed(
        micro_batches=2, ranks=ranks, gradients_on_gpu=True, offloaded_block_inputs=True
    )

    def sizes(collectives):
        run = streamed(plain, choices, tokens=24, collectives=collectives)
        found = (
            shape_of(run.model),
            run.engine.state.fixed_bytes(),
            run.engine.block_input_bytes,
            run.engine._gradient_rings.nbytes,
        )
        run.close()
        return found

    for shape, fixed, block_inputs, rings in on_ranks(ranks, sizes):
        items = fixed_items(shape, choices, 24 * shape.hidden_width)
        assert fixed == sum(item.bytes for item in items)
        assert block_inputs == offloaded_input_bytes(shape, choices, 24) > 0
        assert rings == gradient_ring_bytes(shape, choices) > 0
    planes = shape.states.host_bytes - shape.states.plane_bytes()["grad"]
    assert state_bytes(shape, choices) == planes + ranks * rings


def needs_on(machine: str, shape: ModelShape | None = None, **changes) -> Requirements:
    return requirements_of(
        config(**changes), named_with_several(machine, 512), shape or big_shape()
    )


def test_a_node_has_planes_once_and_the_rest_once_for_each_rank():
    one = needs_on("2 x RTX 4090", engine__states="host", engine__gradients="host")
    two = needs_on("2 x RTX 4090", engine__gpus=2, engine__gradients="host")
    assert (one.ranks, two.ranks) == (1, 2)
    for kind in (MemoryItem.WEIGHT_HIGH, MemoryItem.EXP_AVG, MemoryItem.GRAD):
        assert bytes_of(one, PartName.HOST, kind) == bytes_of(two, PartName.HOST, kind) > 0
    assert bytes_of(two, PartName.HOST, MemoryItem.RUNTIME) == 2 * RUNTIME_BYTES["cuda"]
    tokens = two.chosen.micro_batch_size * 1024
    of_one_rank = offloaded_input_bytes(big_shape(), two.chosen.choices, tokens)
    assert bytes_of(two, PartName.HOST, MemoryItem.HOST_BLOCK_INPUTS) == 2 * of_one_rank > 0
    assert bytes_of(one, PartName.GPU, MemoryItem.COLLECTIVE) == 0
    assert bytes_of(two, PartName.GPU, MemoryItem.COLLECTIVE) == COLLECTIVE_BYTES


@pytest.mark.parametrize(
    "changes, is_gpu_resident",
    [({}, True), ({"engine__states": "host"}, False), ({"engine__gradients": "gpu"}, True)],
)
def test_the_pool_of_several_gpus_has_the_bytes_of_their_items(changes, is_gpu_resident):
    """Two of these GPUs hold most of the model, and a shard each of its moments."""
    requirements = needs_on("2 x H100 SXM", engine__gpus=2, train__batch_size=32, **changes)
    choices = requirements.chosen.choices
    assert (
        choices.placement.gpu_resident_units >= 20
        if is_gpu_resident
        else choices.placement.blocks_kept_in_slots > 0
    )
    assert is_gpu_resident or not choices.placement.gpu_resident_units
    for part in pool_of(requirements).parts:
        assert part.total == requirements.parts[part.name].total
        assert all(share.bytes > 0 for share in part.shares)


def test_the_gpu_with_the_least_free_memory_is_the_limit():
    machine = named_with_several("2 x RTX 4090", 512)
    less = dataclasses.replace(machine.gpus[1], free=machine.gpus[1].free - 4 * GIB)
    machine = dataclasses.replace(machine, gpus=(machine.gpus[0], less))
    for gpus, free in ((1, machine.gpus[0].free), (2, less.free)):
        requirements = requirements_of(config(engine__gpus=gpus), machine, big_shape())
        assert requirements.parts[PartName.GPU].limit == free
        assert requirements.parts[PartName.GPU].total <= free


# ---------------------------------------------------------------------- plans


def chosen_for(ranks: int, gib: float, rates: Rates = FAST_RATES, **changes) -> Chosen:
    job = Job(big_shape(), config(**changes), 1024, ranks=ranks)
    return choose(job, Target("cuda", round(gib * GIB), 400 * GIB, rates))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gib", [24, 80, 139])
@pytest.mark.parametrize("rows", [16, 148])
def test_what_is_chosen_is_a_plan_for_every_rank(ranks, gib, rows):
    chosen = chosen_for(ranks, gib, train__batch_size=rows * ranks)
    choices = chosen.choices
    assert choices.sharding.ranks == ranks and chosen.rounding["ranks"] == ranks
    cuts = micro_batch_bounds(rows * ranks, chosen.micro_batch_size)
    assert len(cuts) == ranks * choices.batching.micro_batches  # each rank takes as many
    assert chosen.gpu_bytes <= gib * GIB
    shape = big_shape()
    numel = {unit.name: unit.numel for unit in shape.units}
    blocks = [unit.name for unit in shape.blocks]
    for rank in (0, ranks - 1):
        verify_plan(build_step_plan(blocks, False, choices, PlaneSizes(numel=numel, rank=rank)))


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_ranks_take_micro_batches_of_any_size_as_one_gpu_does():
    """148 rows have no divisor near the 16 that keep a GPU busy; 37 leave activations less room."""
    chosen = chosen_for(2, 139, train__batch_size=296)
    assert 148 % chosen.micro_batch_size > 0
    assert chosen.choices.activations.blocks_without_recompute == 28  # nothing is recomputed


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_shards_of_main_grads_are_kept_where_they_make_a_step_much_shorter():
    """Whole accumulators of 14.8 billion parameters take 55 GiB of each of four GPUs, and shards
    14.
    """
    shape = entry_of("Qwen/Qwen2.5-14B").shape("bfloat16")
    asked = config(train__batch_size=512, engine__gpus=4, output__checkpoint="none")
    requirements = requirements_of(asked, named_with_several("8 x H200", 512), shape)
    chosen = requirements.chosen
    assert chosen.choices.gradients.main_grad == MainGrad.SHARDS
    job = Job(shape, asked, 1024, chosen.rounding | {"main_grad": "device"}, ranks=4)
    target = Target("cuda", requirements.machine.gpus[0].total, 500 * GIB, FAST_RATES)
    whole = choose(job, target)
    assert whole.choices.gradients.main_grad == MainGrad.DEVICE
    sums = [
        next(item.bytes for item in each.gpu_items if item.kind == MemoryItem.MAIN_GRADS)
        for each in (chosen, whole)
    ]
    assert sums[1] - sums[0] > 2.5 * shape.gradient_numel
    few = needs_on("8 x H200", engine__gpus=4, train__batch_size=592).chosen
    assert few.choices.gradients.main_grad == MainGrad.DEVICE


def test_a_session_of_several_ranks_is_continued_with_as_many():
    rounding = chosen_for(2, 80, train__batch_size=32).rounding
    again = config(train__batch_size=32, engine__gpus="auto")
    assert numbers_of_ranks(again, 8, rounding) == (2,)
    job = Job(big_shape(), again, 1024, rounding, ranks=2)
    assert choose(job, Target("cuda", 48 * GIB, 400 * GIB, FAST_RATES)).rounding == rounding


def test_settings_for_one_gpu_are_refused_for_several():
    with pytest.raises(
        ConfigError, match="^engine.activation_checkpointing: offload_pairs is for one GPU"
    ):
        chosen_for(2, 80, engine__activation_checkpointing="offload_pairs")
    with pytest.raises(ConfigError, match="^engine.rounds: 3 does not divide the 74 rows .* gets"):
        chosen_for(2, 80, engine__rounds=3)
    with pytest.raises(ConfigError, match="^engine.gpus: 4 are asked for, but the machine has 2"):
        needs_on("2 x RTX 4090", engine__gpus=4)


def test_which_numbers_of_gpus_are_compared():
    rows = config(train__batch_size=12)
    assert numbers_of_ranks(rows, 8, {}) == (1,)
    auto = rows.with_values({"engine.gpus": "auto"})
    assert numbers_of_ranks(auto, 8, {}) == (1, 2, 3, 4, 6)
    assert numbers_of_ranks(auto, 0, {}) == (1,)  # on the CPU
    assert numbers_of_ranks(auto.with_values({"train.micro_batch_size": 3}), 8, {}) == (1, 2, 4)
    assert numbers_of_ranks(auto.with_values({"engine.disk": "/scratch"}), 8, {}) == (1,)
    assert numbers_of_ranks(rows.with_values({"engine.gpus": 4}), 0, {}) == (4,)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_auto_takes_as_many_gpus_as_make_a_step_fastest():
    changes = {"engine__gpus": "auto", "train__batch_size": 296}
    assert needs_on("2 x H100 SXM", **changes).ranks == 2
    few = changes | {"train__batch_size": 3}
    assert needs_on("2 x H100 SXM", **few).ranks == 1
    # A small step on cards that exchange through the host's memory takes longer on both.
    slow = needs_on("2 x RTX 4090", engine__gpus="auto", train__batch_size=2)
    both = needs_on("2 x RTX 4090", engine__gpus=2, train__batch_size=2)
    assert slow.ranks == 1 and slow.step_seconds < both.step_seconds
    # One that is for one GPU alone is not compared with more.
    pairs = changes | {"engine__activation_checkpointing": "offload_pairs"}
    assert needs_on("2 x H100 SXM", **pairs).ranks == 1


def test_a_whole_model_on_the_gpus_is_preferred_only_where_units_are_short(monkeypatch):
    def chosen(rows: int) -> PlanChoices:
        found = needs_on("8 x H200", engine__gpus=4, train__batch_size=4 * rows)
        return found.chosen.choices

    monkeypatch.setattr(
        "engine.planning.fit.fastest.SHARDS_GAIN", 0.1
    )  # accumulators are not in shards
    short = SHORT_UNIT_SECONDS
    # Long units: activations use the memory better.
    long = chosen(96)
    kept = long.activations.blocks_without_recompute
    assert kept == 28 and long.placement.gpu_resident_units < 30
    monkeypatch.setattr("engine.planning.fit.fastest.SHORT_UNIT_SECONDS", 1.0)
    whole = chosen(96)
    kept = whole.activations.blocks_without_recompute
    assert kept < 28 and whole.placement.gpu_resident_units == 30
    monkeypatch.setattr("engine.planning.fit.fastest.SHORT_UNIT_SECONDS", short)
    # Short ones: nothing else takes the interpreter.
    assert chosen(8).placement.gpu_resident_units == 30


# ---------------------------------------------------------------------- time

FAST = 1e30


def only(**rates: float) -> Rates:
    """A machine that does all else in no time."""
    fast = dict.fromkeys(Rates.__dataclass_fields__, FAST)
    return Rates(**fast | {"overhead": 0.0, "call": 0.0, "others": ()} | rates)


def test_a_rank_copies_and_updates_its_shards_and_receives_the_others():
    shape, ranks = big_shape(), 4
    numel = {unit.name: unit.numel for unit in shape.units}
    blocks = [unit.name for unit in shape.blocks]
    plan = build_step_plan(
        blocks, False, PlanChoices().changed(micro_batches=2, ranks=ranks), PlaneSizes(numel=numel)
    )
    shard = Shards(ranks).numel(numel["block 3"])

    def of(kind: OpKind, **rates: float) -> float:
        seconds = op_seconds(plan, shape, only(**rates), MicroBatch(2, 1024))
        return seconds(next(op for op in plan.ops if op.kind == kind and op.unit == "block 3"))

    assert of(OpKind.PREFETCH, h2d=1e9) == pytest.approx(2 * shard / 1e9)
    assert of(OpKind.OFFLOAD, d2h=1e9) == pytest.approx(2 * shard / 1e9)
    # All ranks update their shards at once, each with a fourth of the cores.
    assert of(OpKind.UPDATE, adamw=1e9) == pytest.approx(numel["block 3"] / 1e9, rel=1e-5)
    gathered = of(OpKind.ALL_GATHER, link=1e9) - START_SECONDS
    assert gathered == pytest.approx(3 * 2 * shard / 1e9)
    assert of(OpKind.REDUCE_SCATTER, link=1e9) - START_SECONDS == pytest.approx(2 * gathered)
    unknown = of(OpKind.ALL_GATHER, link=0.0) - START_SECONDS
    assert unknown == pytest.approx(gathered * 1e9 / ASSUMED_LINK)
    forward = of(OpKind.FORWARD, matmul=1e12)
    assert forward == pytest.approx(2 * numel["block 3"] * 2048 / 1e12, rel=0.3)


def test_ranks_share_the_cores_and_the_memory_of_their_host():
    assert of_rank(FAST_RATES, 1) == FAST_RATES
    two, eight = of_rank(FAST_RATES, 2), of_rank(FAST_RATES, 8)
    assert two.adamw == FAST_RATES.adamw / 2 and two.h2d == FAST_RATES.h2d
    memory = 26 * FAST_RATES.adamw_busy + FAST_RATES.h2d_busy + FAST_RATES.d2h_busy
    assert eight.h2d == pytest.approx(memory / 8) and eight.h2d < FAST_RATES.h2d
    for ranks, each in ((2, two), (8, eight)):
        at_once = ranks * (26 * each.adamw_busy + each.h2d_busy + each.d2h_busy)
        assert at_once <= 1.001 * memory
        assert each.h2d_busy <= FAST_RATES.h2d_busy and each.matmul == FAST_RATES.matmul


def tokens_per_second(ranks: int, rates: Rates, rows: int) -> float:
    chosen = chosen_for(ranks, 139, rates, train__batch_size=rows * ranks)
    micro_batch = MicroBatch(chosen.micro_batch_size, 1024)
    _, timing = predicted_step(big_shape(), chosen.choices, rates, micro_batch, "cuda")
    assert (timing.busy[Lane.COLLECTIVE] > 0) == (ranks > 1)
    return rows * ranks * 1024 / timing.seconds


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_two_gpus_train_nearly_twice_as_fast_at_large_steps():
    """7.6 billion parameters, 148 rows of 1,024 tokens a GPU: measured, 1.98 times one H200. Each
    of two updates half of the parameters, so a fast link may give a little more than twice.
    """
    one = tokens_per_second(1, FAST_RATES, 148)
    two = {link: tokens_per_second(2, replace(FAST_RATES, link=link), 148) for link in (260e9, 8e9)}
    assert 1.93 < two[260e9] / one < 2.01
    assert 1.6 < two[8e9] / one < two[260e9] / one


def test_a_slow_link_is_what_a_small_step_waits_for():
    found = [
        tokens_per_second(2, replace(FAST_RATES, link=link), 16) for link in (260e9, 20e9, 8e9)
    ]
    assert found == sorted(found, reverse=True) and found[0] > 1.5 * found[-1]


# ---------------------------------------------------------------------- the report


def test_the_report_says_what_each_gpu_takes():
    two = estimate(config(engine__gpus=2), named_with_several("2 x H100 SXM", 512), big_shape())
    one = estimate(config(), named_with_several("H100 SXM", 512), big_shape())
    assert "of memory on each of 2 GPUs (" in two.headline and "GPUs" not in one.headline
    assert two.choices["ranks"] == 2
    # A step has as many tokens, and takes less time; both cards draw power.
    assert two.time["tokens_per_step"] == one.time["tokens_per_step"] == 148 * 1024
    # Each of two keeps half of the accumulators, so it has room for more activations.
    room = ("micro_batch_size", "blocks_without_recompute")
    assert [two.choices[name] for name in room] > [one.choices[name] for name in room]
    assert 1.5 < two.time["tokens_per_second"] / one.time["tokens_per_second"] < 2.1
    assert two.time["watts"] - one.time["watts"] == 700


def test_on_the_cpu_each_process_has_a_share_of_ram():
    small = TrainConfig.from_dict(
        {
            "model": {"source": "m", "dtype": "float32"},
            "data": {"source": "d"},
            "train": {"batch_size": 8},
            "engine": {"device": "cpu"},
        }
    )
    model = build_model(tiny_config("llama"), ModelConfig(source="tiny", dtype="float32"))
    machine = replace(named_with_several("RTX 4090", 64), gpus=())
    shape = shape_of(model)
    one, two = (
        requirements_of(small.with_values({"engine.gpus": ranks}), machine, shape)
        for ranks in (1, 2)
    )
    assert (one.ranks, two.ranks) == (1, 2) and two.chosen.choices.batching.micro_batches >= 1
    slots = [bytes_of(each, PartName.HOST, MemoryItem.EMBED_AND_HEAD_SLOTS) for each in (one, two)]
    assert slots[1] >= 2 * slots[0] > 0
    exchanged = bytes_of(two, PartName.HOST, MemoryItem.COLLECTIVE)
    largest = max(unit.numel for unit in shape.padded(2).units)
    assert exchanged == 2 * 4 * largest
