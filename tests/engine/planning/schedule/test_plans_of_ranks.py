"""Plans for several ranks: how planes are divided, that every rank's plan is sound and needs each
of its waits, and that all ranks meet in the same exchanges in the same order.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.config.optimizers import BLOCK, StateFormat
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.schedule.buffers import BufferKind
from engine.planning.schedule.build import build_forward_plan, build_step_plan
from engine.planning.schedule.choices import ONE_RANK_ONLY, EmbedAndHead, PlanChoices, PlaneSizes
from engine.planning.schedule.grid import grid
from engine.planning.schedule.ops import Lane, OpKind
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.shards import SHARD_ELEMENTS, Shards
from engine.planning.schedule.verify_plan import verify_plan
from tests.support.plan_text import from_text, to_text
from tests.support.same_bits import find_dropped_waits

# ---------------------------------------------------------------------- shards

NUMELS = (0, 1, 63, 64, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 1 << 20, (1 << 20) + 64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 64])
def test_shards_cover_a_plane_exactly(ranks):
    generator = random.Random(ranks)
    for numel in (*NUMELS, *(generator.randrange(1 << 18) for _ in range(200))):
        shards = [Shards(ranks, rank) for rank in range(ranks)]
        bounds = [each.bounds(numel) for each in shards]
        assert bounds[0][0] == 0 and bounds[-1][1] == numel
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
        (size,) = {each.numel(numel) for each in shards}
        (padded,) = {each.padded(numel) for each in shards}
        assert padded == ranks * size >= numel
        assert all(0 <= stop - start <= size for start, stop in bounds)
        # Whichever elements a rank has, they stand at its place in the slot.
        assert all(start in (rank * size, numel) for rank, (start, _) in enumerate(bounds))
        if ranks > 1:
            assert size % SHARD_ELEMENTS == 0 and padded - numel < ranks * SHARD_ELEMENTS


def test_one_rank_has_everything_and_no_padding():
    for numel in NUMELS:
        assert Shards().bounds(numel) == (0, numel)
        assert Shards().numel(numel) == Shards().padded(numel) == numel


def test_small_units_leave_ranks_without_elements():
    assert [Shards(4, rank).bounds(300) for rank in range(4)] == [
        (0, 256),
        (256, 300),
        (300, 300),
        (300, 300),
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_border_cuts_a_block_of_codes(ranks, monkeypatch):
    """`StateRange.within` refuses to. A shard's bytes follow those of the one before."""
    monkeypatch.setattr("engine.config.optimizers.SMALL", 256)
    generator = random.Random(ranks)
    for _ in range(50):
        shapes = [(generator.randrange(1, 40), generator.randrange(1, 90)) for _ in range(6)]
        specs = [ParameterSpec(f"p{k}", f"p{k}", shape, k < 4) for k, shape in enumerate(shapes)]
        layout = lay_out("block 0", specs)
        ranges = layout.state_ranges("adamw_8bit")["exp_avg"]
        end = 0
        for rank in range(ranks):
            start, stop = Shards(ranks, rank).bounds(layout.numel)
            assert start % BLOCK == 0 or start == layout.numel
            if start == stop:
                continue
            parts = [range_.within(start, stop) for range_ in ranges]
            assert sum(part.stop - part.start for part in parts if part) == stop - start
            begin, after = layout.state_bounds("adamw_8bit", "exp_avg", start, stop)
            assert begin == end
            end = after
        assert end == sum(range_.bytes for range_ in ranges)
        if any(range_.kind == StateFormat.CODES for range_ in ranges):
            with pytest.raises(ValueError, match="cut a block"):
                codes = next(each for each in ranges if each.kind == StateFormat.CODES)
                codes.within(codes.start, codes.start + 1)


# ---------------------------------------------------------------------- plans

BLOCKS = [f"block {k}" for k in range(5)]
NUMEL = {block: 1000 + 300 * (k % 2) for k, block in enumerate(BLOCKS)}
NUMEL |= {"embed": 2500, "head": 300}
"""Of four ranks, two have nothing of the head."""
WHOLE = "unsharded reads"
DEVICE = dict(rounds=2, main_grad="device")
SHARDS = dict(rounds=2, main_grad="shards")
CHOICES = {
    f"{sums or 'vertical'}, {how or 'host'}, {device_updates or 'no device updates'}": (
        sums,
        how,
        device_updates,
    )
    for sums in ("", "rounds", "shards")
    for how in (
        "",
        "gradients on the GPU",
        "shared embed and head slot",
        "kept",
        "block inputs on the host",
        "resident",
        WHOLE,
    )
    for device_updates in ("", "some", "all")
}
WAYS: dict[str, dict] = {
    "": {},
    "gradients on the GPU": dict(gradients_on_gpu=True),
    "shared embed and head slot": dict(
        embed_and_head=EmbedAndHead.SHARED_SLOT, gradients_on_gpu=True
    ),
    "kept": dict(blocks_without_recompute=3, slots=3, prefetch_depth=2),
    "block inputs on the host": dict(
        offloaded_block_inputs=True, block_input_rings=1, blocks_without_recompute=1
    ),
    "resident": dict(blocks_kept_in_slots=3, blocks_without_recompute=2, slots=1),
    WHOLE: dict(unsharded_reads=True, blocks_kept_in_slots=1),
    "rounds": DEVICE,
    "shards": SHARDS,
    "no device updates": {},
    "some": dict(device_updated_units=("embed", "block 1"), update_buffers=1),
    "all": dict(device_updated_units=("embed", *BLOCKS, "head"), update_buffers=3),
}


def choices_of(name: str, ranks: int) -> PlanChoices:
    changes = {key: value for part in CHOICES[name] for key, value in WAYS[part].items()}
    return PlanChoices().changed(micro_batches=2, ranks=ranks, **changes)


def plan_of(name: str, ranks: int, rank: int, tied: bool = False, chunk: int = 0) -> StepPlan:
    sizes = PlaneSizes(numel=NUMEL, chunk_numel=chunk, rank=rank)
    return build_step_plan(BLOCKS, tied, choices_of(name, ranks), sizes)


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("ranks, tied", [(2, True), (4, False)], ids=["tied", "untied"])
def test_every_plan_of_every_rank_is_sound(ranks, tied):
    """Every rank updates its own shard and nothing else, and meets the others where they are."""
    for name in CHOICES:
        if tied and choices_of(name, ranks).streaming.shared_embed_and_head_slot:
            continue
        collectives = []
        for rank in range(ranks):
            plan = plan_of(name, ranks, rank, tied, chunk=256)
            verify_plan(plan)
            assert plan.shards == Shards(ranks, rank)
            assert from_text(to_text(plan)) == plan
            assert_own_shard_updated(plan, choices_of(name, ranks), name)
            assert not plan.placed  # the other ranks need an updated weight, too
            collectives.append(collectives_of(plan))
        assert all(each == collectives[0] for each in collectives), name


def collectives_of(plan: StepPlan) -> list[tuple]:
    """Returns what all ranks must do alike: each exchange, and the buffer that it works on."""
    points = [op for op in plan.ops if op.lane == Lane.COLLECTIVE]
    return [
        (op.kind, op.unit, getattr(op, "slot", None), getattr(op, "grad", None)) for op in points
    ]


def assert_own_shard_updated(plan: StepPlan, choices: PlanChoices, name: str) -> None:
    for unit, numel in NUMEL.items():
        start, stop = plan.shards.bounds(numel)
        kinds = {OpKind.UPDATE, OpKind.DEVICE_UPDATE}
        chunks = [op.chunk for op in plan.ops if op.kind in kinds and op.unit == unit]
        covered = [element for chunk in chunks for element in range(*chunk)]
        assert covered == [*range(start, stop)], (name, unit)
        updated_on_device = unit in choices.updates.device_updated_units
        found = {op.kind for op in plan.ops if op.kind in kinds and op.unit == unit}
        expected = OpKind.DEVICE_UPDATE if updated_on_device else OpKind.UPDATE
        assert found <= {expected}, (name, unit)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CHOICES)
def test_each_weight_is_gathered_and_each_sum_is_scattered(name, ranks):
    """No op computes with weights that only this rank has, and no gradient leaves the device
    before it is the accumulator of all ranks.
    """
    plan = plan_of(name, ranks, 1)
    order = [(op.kind, op.unit) for op in plan.ops]
    assert order.count((OpKind.ALL_REDUCE, "step")) == 1
    is_whole = WHOLE in name
    for unit in NUMEL:  # after the updates of all ranks, and before any of them reads the unit
        assert order.count((OpKind.BARRIER, unit)) == is_whole
        if is_whole:
            read = order.index((OpKind.PREFETCH, unit))
            assert order.index((OpKind.BARRIER, unit)) == read - 1
            assert read - 1 in plan.ops[read].waits
    for op, after in pairwise(plan.ops):
        if op.kind == OpKind.PREFETCH and not is_whole:
            assert (after.kind, after.unit, after.slot) == (OpKind.ALL_GATHER, op.unit, op.slot)
    for unit in NUMEL:
        assert order.count((OpKind.REDUCE_SCATTER, unit)) == 1 + ("shards" in name)
        assert (OpKind.REDUCE, unit) not in order
        scattered = max(at for at, op in enumerate(order) if op == (OpKind.REDUCE_SCATTER, unit))
        sent = (OpKind.OFFLOAD, OpKind.OFFLOAD_KEPT_GRADIENT)
        assert all(order.index((kind, unit)) > scattered for kind in sent if (kind, unit) in order)


@pytest.mark.parametrize(
    "name",
    [
        "vertical, host, no device updates",
        "rounds, block inputs on the host, some",
        "vertical, shared embed and head slot, all",
        "vertical, kept, all",
        "rounds, resident, no device updates",
        "shards, gradients on the GPU, all",
        "shards, block inputs on the host, some",
        "vertical, unsharded reads, some",
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_dropping_any_single_wait_is_found(name, ranks):
    for rank in (0, ranks - 1):
        dropped = {kind for kind, _ in find_dropped_waits(plan_of(name, ranks, rank))}
        # The lane has all norms before their sum over the ranks, so that needs no wait.
        comes_in = OpKind.BARRIER if WHOLE in name else OpKind.ALL_GATHER
        assert dropped >= {comes_in, OpKind.REDUCE_SCATTER, OpKind.SUMMARY}
        assert dropped >= {OpKind.PREFETCH, OpKind.FORWARD, OpKind.BACKWARD}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pass_without_gradients_gathers_weights_too(ranks):
    choices = PlanChoices().changed(micro_batches=2, ranks=ranks, blocks_kept_in_slots=1)
    plans = [build_forward_plan(BLOCKS, False, choices, rank=rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        verify_plan(plan)
        assert plan.shards == Shards(ranks, rank)
        assert {op.kind for op in plan.ops if op.lane == Lane.COLLECTIVE} == {OpKind.ALL_GATHER}
        assert collectives_of(plan) == collectives_of(plans[0])
    held = build_forward_plan(BLOCKS, False, choices, held=True)
    verify_plan(held)
    assert not [op for op in held.ops if op.unit == BLOCKS[-1] and op.kind == OpKind.ALL_GATHER]


def test_only_the_last_round_rounds_and_sends_a_gradient():
    plan = plan_of("shards, host, no device updates", 2, 0)
    for unit in NUMEL:
        first, last = (
            op for op in plan.ops if op.kind == OpKind.REDUCE_SCATTER and op.unit == unit
        )
        assert first.total == last.total and first.total.kind == BufferKind.MAIN_GRAD_SHARD
        assert (first.first, last.first) == (True, False)
        assert first.staging is None and last.staging is not None
        assert [op.kind for op in plan.ops if op.unit == unit].count(OpKind.OFFLOAD) <= 1


@pytest.mark.parametrize("changes", [{}, DEVICE, SHARDS, dict(blocks_kept_in_slots=2)], ids=str)
def test_units_that_live_on_the_device_are_gathered_after_their_update(changes):
    """Each rank updates its shard in the slot, and no later op computes with the others' old
    weights.
    """
    choices = PlanChoices().changed(micro_batches=2, ranks=3, gpu_resident_units=3, **changes)
    collectives = []
    for rank in range(3):
        plan = build_step_plan(BLOCKS, False, choices, PlaneSizes(numel=NUMEL, rank=rank))
        verify_plan(plan)
        assert from_text(to_text(plan)) == plan
        kinds = {kind for kind, _ in find_dropped_waits(plan)}
        assert kinds >= {OpKind.ALL_GATHER, OpKind.UPDATE_IN_PLACE}
        for unit in ("embed", "block 0", "block 1"):
            of_unit = [op for op in plan.ops if op.unit == unit]
            assert OpKind.PREFETCH not in {op.kind for op in of_unit}
            updated, gathered = of_unit[-2:]
            assert (updated.kind, gathered.kind) == (OpKind.UPDATE_IN_PLACE, OpKind.ALL_GATHER)
            assert updated.slot == gathered.slot
        collectives.append(collectives_of(plan))
    assert collectives[0] == collectives[1] == collectives[2]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nodes_exchange_gradients_and_no_weights(ranks, tied):
    """The plan of a rank is that of a rank of one node, but for what says how many nodes there are.
    A rank that is alone on its node gathers nothing.
    """
    for name in CHOICES:
        choices = choices_of(name, ranks)
        if (tied and choices.streaming.shared_embed_and_head_slot) or (
            choices.sharding.unsharded_reads and ranks == 1
        ):
            continue
        sizes = PlaneSizes(numel=NUMEL, chunk_numel=256, rank=ranks - 1)
        choices = choices.changed(replicas=3)
        plan = build_step_plan(BLOCKS, tied, choices, sizes)
        verify_plan(plan)
        assert plan.replicas == 3
        assert plan.is_shared
        assert plan.shards == Shards(ranks, ranks - 1)
        assert from_text(to_text(plan)) == plan
        if ranks > 1:
            assert_own_shard_updated(plan, choices, name)
        order = [(op.kind, op.unit) for op in plan.ops if op.lane == Lane.COLLECTIVE]
        assert order.count((OpKind.ALL_REDUCE, "step")) == 1
        rounds = 1 + ("shards" in name)
        assert all(order.count((OpKind.REDUCE_SCATTER, unit)) == rounds for unit in NUMEL), name
        if ranks == 1:
            assert len(order) == 1 + rounds * len(NUMEL), name
            assert OpKind.REDUCE not in {op.kind for op in plan.ops}


@pytest.mark.parametrize(
    "name", ["vertical, host, no device updates", "rounds, gradients on the GPU, all"]
)
def test_dropping_any_single_wait_between_nodes_is_found(name):
    choices = choices_of(name, 1).changed(replicas=2)
    plan = build_step_plan(BLOCKS, False, choices, PlaneSizes(numel=NUMEL))
    dropped = {kind for kind, _ in find_dropped_waits(plan)}
    assert dropped >= {OpKind.REDUCE_SCATTER, OpKind.SUMMARY, OpKind.PREFETCH, OpKind.BACKWARD}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("disk_offloaded_units", dict(disk_offloaded_units=1)),
        ("graphs", dict(gpu_resident_units=2 + len(BLOCKS), graphs=True)),
    ],
)
def test_choices_of_one_rank_are_refused_for_several_nodes(name, changes):
    choices = PlanChoices().changed(micro_batches=2, **changes)
    build_step_plan(BLOCKS, False, choices, PlaneSizes(numel=NUMEL))
    with pytest.raises(ValueError, match=f"^{name} is for one rank, not for 2$"):
        build_step_plan(BLOCKS, False, choices.changed(replicas=2), PlaneSizes(numel=NUMEL))


def test_the_grid_shows_the_exchange():
    text = grid(plan_of("vertical, host, no device updates", 2, 0))
    assert text.splitlines()[0].split()[1:6] == ["H2D", "COMPUTE", "D2H", "HOST", "COLLECTIVE"]
    assert "all_gather embed >slot" in text and "reduce_scatter head >staging" in text
    assert "all_reduce step" in text


def test_two_main_grads_take_turns():
    """The backward of a block need not wait until the sum of the block before is exchanged."""
    plan = plan_of("vertical, host, no device updates", 2, 0)
    sums = {op.unit: op.grad for op in plan.ops if op.kind == OpKind.REDUCE_SCATTER}
    assert {sums[block].kind for block in BLOCKS} == {BufferKind.MAIN_GRAD}
    assert all(sums[below] != sums[block] for below, block in pairwise(BLOCKS))


FROZEN = ("embed", "block 0", "block 3", "head")


@pytest.mark.parametrize(
    "changes", [{}, dict(unsharded_reads=True), dict(gpu_resident_units=3)], ids=str
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_frozen_units_are_gathered_and_nothing_else(changes, ranks):
    """Nobody waits for an update of theirs, where each rank reads them whole."""
    numel = NUMEL | dict.fromkeys(FROZEN, 0)
    choices = PlanChoices().changed(micro_batches=2, ranks=ranks, **changes)
    collectives = []
    for rank in range(ranks):
        plan = build_step_plan(
            BLOCKS, False, choices, PlaneSizes(numel=numel, rank=rank, frozen=FROZEN)
        )
        verify_plan(plan)
        assert from_text(to_text(plan)) == plan
        trained = set(NUMEL) - set(FROZEN)
        for kind in (OpKind.REDUCE_SCATTER, OpKind.BARRIER):
            units = {op.unit for op in plan.ops if op.kind == kind}
            assert units == (
                set() if kind == OpKind.BARRIER and "unsharded_reads" not in changes else trained
            )
        updated = {op.unit for op in plan.ops if op.kind in (OpKind.UPDATE, OpKind.UPDATE_IN_PLACE)}
        assert updated == trained
        dropped = {kind for kind, _ in find_dropped_waits(plan)}
        assert dropped >= {OpKind.PREFETCH, OpKind.REDUCE_SCATTER, OpKind.SUMMARY}
        collectives.append(collectives_of(plan))
    assert all(each == collectives[0] for each in collectives)


# ---------------------------------------------------------------------- refusals

ALONE = {
    "disk_offloaded_units": dict(disk_offloaded_units=1),
    "disk_offloaded_block_inputs": dict(disk_offloaded_block_inputs=1, offloaded_block_inputs=True),
    "embed_and_head_in_kept_gradients": dict(
        embed_and_head=EmbedAndHead.IN_KEPT_GRADIENTS,
        gradients_on_gpu=True,
    ),
    "graphs": dict(graphs=True, gpu_resident_units=7),
    "host": dict(rounds=2, main_grad="host"),
    "pairs": dict(blocks_per_saved_input=2),
}


def test_shards_of_main_grads_are_for_several_ranks():
    with pytest.raises(ValueError, match="only several ranks keep shards"):
        build_step_plan(
            BLOCKS, False, PlanChoices().changed(micro_batches=2, **SHARDS), PlaneSizes(numel=NUMEL)
        )


@pytest.mark.parametrize("name", ALONE)
def test_choices_for_one_rank_are_refused_for_several(name):
    assert set(ONE_RANK_ONLY) <= set(ALONE)
    choices = PlanChoices().changed(micro_batches=2, **ALONE[name])
    sizes = PlaneSizes(numel=NUMEL, embed_chunk=500)
    build_step_plan(BLOCKS, False, choices, sizes)  # one rank may have them
    several = PlanChoices().changed(micro_batches=2, ranks=2, **ALONE[name])
    with pytest.raises(ValueError, match="(is|are) for one rank"):
        build_step_plan(BLOCKS, False, several, sizes)


def test_a_plan_is_of_one_of_its_ranks():
    choices = PlanChoices().changed(ranks=2)
    for sizes in (None, PlaneSizes(numel=NUMEL, rank=2), PlaneSizes(numel=NUMEL, rank=-1)):
        with pytest.raises(ValueError, match="of none of 2 ranks"):
            build_step_plan(BLOCKS, False, choices, sizes)
