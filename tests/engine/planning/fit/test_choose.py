"""What the planner chooses, and that contradictions are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from engine.config.settings import ModelConfig
from engine.machine.rates import TYPICAL
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit import choose as choosing
from engine.planning.fit.batch_splits import LEAST_TOKENS, MOST_ROUNDS
from engine.planning.fit.buffer_sizes import state_bytes
from engine.planning.fit.choose import choose, least_choices
from engine.planning.fit.cost_model import Cost, MicroBatch, step_seconds
from engine.planning.fit.device_memory import (
    COMFORTABLE,
    LOGITS_BYTES,
    SMALL_GPU_BYTES,
    DeviceMemory,
    Sizer,
    size_of_device,
)
from engine.planning.fit.fastest import GPU_RESIDENT_COST
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.simulate_step import op_seconds, predicted_seconds
from engine.planning.fit.step_times import StepTimes
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.simulate import simulate
from engine.planning.schedule.verify_plan import verify_plan
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.text import GIB
from tests.support.chosen import FAST_RATES, big_shape, config, on_gpu
from tests.support.tiny import tiny_config

pytestmark = [pytest.mark.computing, pytest.mark.usefixtures("compiler")]


# ---------------------------------------------------------------------- policy

LIMITS = (12, 16, 20, 24, 28, 32, 48, 80, 139)
NUMEL = {unit.name: unit.numel for unit in big_shape().units}
SIZES = PlaneSizes(numel=NUMEL, embed_chunk=big_shape().embed_chunk)


def comfortable(gib: float) -> float:
    """The bytes of a GPU that automatic choices may fill."""
    return COMFORTABLE[size_of_device("cuda", round(gib * GIB))] * gib * GIB


def plan_of(chosen) -> StepPlan:
    blocks = [unit for unit in NUMEL if unit.startswith("block")]
    return build_step_plan(blocks, False, chosen.choices, SIZES)


def with_candidates(monkeypatch, gib: float, **changes):
    """What is chosen, and (seconds, rows of a micro-batch, choices, sizer) of everything that was
    timed.
    """
    seen, placed = [], StepTimes.placed

    def record(times, candidate):
        found = placed(times, candidate)
        if candidate.choices.updates.update_buffers == found.choices.updates.update_buffers:
            seen.append((found.seconds, found.size, found.choices, times._sizer))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(StepTimes, "placed", record)
        return on_gpu(gib, **changes), seen


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_memory_is_used_where_it_is_and_saved_where_it_is_not(either):
    large, middle, small = on_gpu(139), on_gpu(80), on_gpu(24)
    for chosen in (large, middle):
        c = chosen.choices
        assert (
            c.batching.rounds == c.batching.micro_batches > 1 and c.gradients.main_grad == "device"
        )
        assert c.activations.blocks_without_recompute == (
            28 if chosen is large else pytest.approx(26, abs=2)
        )
        assert not c.activations.offloaded_block_inputs and chosen.offloaded_input_bytes == 0
        assert c.updates.device_updated_units and c.updates.update_buffers > 1
    assert large.micro_batch_size > middle.micro_batch_size
    assert (
        small.choices.batching.rounds,
        small.choices.gradients.main_grad,
        small.choices.activations.blocks_without_recompute,
    ) == (
        1,
        "vertical",
        0,
    )
    assert (
        small.choices.activations.offloaded_block_inputs
        and small.choices.placement.blocks_kept_in_slots < 28
    )
    assert small.offloaded_input_bytes == 28 * 148 * 1024 * 3584 * 2
    for gib in LIMITS:
        chosen, rows = on_gpu(gib), 148
        assert chosen.gpu_bytes <= comfortable(gib)
        assert -(-rows // chosen.micro_batch_size) == chosen.choices.batching.micro_batches
        assert chosen.choices.batching.micro_batches % chosen.choices.batching.rounds == 0
        assert chosen.choices.gradients.main_grad != "host"
        assert chosen.choices.kernels.compiled == either
        assert chosen.choices.streaming.slots == 2
        assert chosen.choices.streaming.prefetch_depth == 1
        assert chosen.rounding["rounds"] == chosen.choices.batching.rounds
        verify_plan(plan_of(chosen))


@pytest.mark.parametrize("gib", [24, 48, 139])
def test_of_all_that_fits_one_of_the_fastest_is_taken(monkeypatch, either, gib):
    chosen, seen = with_candidates(monkeypatch, gib)
    limit = comfortable(gib)
    assert all(sizer.total(size, choices) <= limit for _, size, choices, sizer in seen)
    assert (chosen.micro_batch_size, chosen.choices) in [
        (size, choices) for _, size, choices, _ in seen
    ]
    for _, size, choices, sizer in seen:
        kept, resident = (
            choices.activations.blocks_without_recompute,
            choices.placement.blocks_kept_in_slots,
        )
        placed = choices.changed(
            device_updated_units=("head",) if choices.updates.update_buffers else ()
        )
        if kept < 28:  # what is kept comes before what stays
            assert not sizer.fits(
                size,
                placed.changed(blocks_without_recompute=kept + 1, blocks_kept_in_slots=0),
                sizer.memory.keeping,
            )
        if resident < 28 - choices.placement.gpu_resident_blocks(28):
            assert not sizer.fits(
                size,
                placed.changed(blocks_kept_in_slots=resident + 1),
                sizer.memory.keeping,
            )


@pytest.mark.parametrize("rates", [TYPICAL["cuda"], FAST_RATES], ids=["typical", "quick"])
@pytest.mark.parametrize("gib", [24, 48, 139])
def test_what_is_chosen_is_also_the_fastest_op_by_op(monkeypatch, gib, rates):
    """The closed form that compares is near the simulation, and nearest where it counts."""
    shape = big_shape()
    monkeypatch.setitem(choosing.TYPICAL, "cuda", rates)
    chosen, seen = with_candidates(monkeypatch, gib)

    def simulated(size, choices) -> float:
        blocks = [unit.name for unit in shape.blocks]
        plan = build_step_plan(blocks, False, choices, SIZES)
        return simulate(plan, op_seconds(plan, shape, rates, MicroBatch(size, 1024))).seconds

    ours = simulated(chosen.micro_batch_size, chosen.choices)
    assert min(seconds for seconds, *_ in seen) == pytest.approx(ours, rel=0.04)
    batch_splits = {}
    for _, size, choices, _ in sorted(seen, key=lambda way: way[0]):
        batch_splits.setdefault((size, choices.batching.rounds), choices)
    for (size, _), choices in [*batch_splits.items()][:3]:
        assert ours <= 1.002 * GPU_RESIDENT_COST * simulated(size, choices)
    for seconds, size, choices, _ in sorted(seen, key=lambda way: way[0])[:25:6]:
        exact = simulated(size, choices)
        assert ours <= 1.03 * exact and 0.65 * exact < seconds < 1.02 * exact


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_closed_form_counts_all_work_of_a_model_that_lives_on_the_device(rounds):
    shape, rates, micro_batch = big_shape(), FAST_RATES, MicroBatch(4, 1024)
    choices = PlanChoices().changed(
        micro_batches=rounds,
        rounds=rounds,
        gpu_resident_units=30,
        blocks_without_recompute=28,
        main_grad=MainGrad.DEVICE if rounds > 1 else MainGrad.VERTICAL,
        compiled=True,
    )
    exact = predicted_seconds(shape, choices, rates, micro_batch, "cuda")
    seconds = step_seconds(Cost(shape, rates, micro_batch, True), choices, 0.0)
    assert 0.95 * exact < seconds <= exact


@pytest.mark.parametrize(("implementation", "of_pair"), [("eager", 2), ("sdpa", 1)])
def test_a_dense_mask_is_of_bits_but_for_eager_attention(implementation, of_pair):
    shape, rows, length = big_shape(), 2, 1024
    attention = dataclasses.replace(shape.attention, implementation=implementation)

    packed = config(data__packing=True)

    def masks(implemented) -> int:
        job = Job(dataclasses.replace(shape, attention=implemented, packs=True), packed, length)
        sizer = Sizer(job, DeviceMemory("cuda", 48 * GIB, 48 * GIB, 48 * GIB), False)
        (found,) = (
            item
            for item in sizer.items(rows, PlanChoices())
            if item.kind == MemoryItem.TOKENS_AND_MASKS
        )
        return found.bytes

    without = dataclasses.replace(attention, implementation=DOCUMENTS)
    assert masks(attention) - masks(without) == of_pair * rows * length**2


def test_the_plan_of_a_job_that_does_not_fit_lacks_little_more_than_the_least():
    """Its report says how much is lacking."""
    job = Job(big_shape(), config(train__batch_size=64), 1024)
    target = Target("cuda", 80 * GIB, 20 * GIB, FAST_RATES)

    def lack(chosen) -> int:
        states = state_bytes(job.shape, chosen.choices.changed(device_updated_units=()))
        return states + chosen.offloaded_input_bytes

    least = min(lack(least) for least in least_choices(job, target))
    assert least <= lack(choose(job, target)) < 1.1 * least


def test_one_more_resident_block_would_not_have_fitted():
    for gib in (16, 20, 24, 28):
        chosen = on_gpu(gib)
        memory = DeviceMemory("cuda", gib * GIB, comfortable(gib), comfortable(gib))
        sizer = Sizer(Job(big_shape(), config(), 1024), memory, chosen.choices.kernels.compiled)
        assert sizer.total(chosen.micro_batch_size, chosen.choices) == chosen.gpu_bytes
        more = chosen.choices.changed(
            blocks_kept_in_slots=chosen.choices.placement.blocks_kept_in_slots + 1
        )
        assert sizer.fits(chosen.micro_batch_size, chosen.choices)
        assert not sizer.fits(chosen.micro_batch_size, more)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_micro_batches_saturate_but_do_not_sprawl():
    """In one round."""
    one = dict(engine__rounds=1)
    assert (
        on_gpu(139, **one).micro_batch_size == 37
    )  # 148 = 4 x 37 has no divisor near 16 rows of 1,024 tokens below it
    assert on_gpu(20, **one).micro_batch_size == 4
    assert on_gpu(139, train__batch_size=128, **one).micro_batch_size == 32
    assert on_gpu(139, train__batch_size=128, length=32768, **one).micro_batch_size == 1
    assert on_gpu(139, train__batch_size=12, **one).micro_batch_size == 12
    assert on_gpu(139, train__batch_size=12, engine__rounds=3).micro_batch_size == 4
    assert on_gpu(139, train__micro_batch_size=2, **one).micro_batch_size == 2


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_rounds_are_not_many_and_their_micro_batches_are_not_small():
    for gib, length, rows in itertools.product((48, 139), (256, 8192), (7, 148, 512)):
        chosen = on_gpu(gib, length=length, train__batch_size=rows)
        c = chosen.choices
        assert (
            c.batching.rounds <= MOST_ROUNDS
            and -(-rows // chosen.micro_batch_size) == c.batching.micro_batches
        )
        assert c.batching.rounds == 1 or chosen.micro_batch_size * length >= LEAST_TOKENS
    asked = on_gpu(139, train__micro_batch_size=4)
    assert asked.micro_batch_size == 4
    assert asked.choices.batching.micro_batches == 37
    assert asked.choices.batching.rounds in (1, 37)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_explicit_settings_are_kept():
    asked = on_gpu(
        80,
        engine__slots=3,
        engine__blocks_kept_in_slots=5,
        engine__activation_checkpointing="offload",
    ).choices
    assert (
        asked.streaming.slots,
        asked.streaming.prefetch_depth,
        asked.placement.blocks_kept_in_slots,
    ) == (3, 2, 5)
    assert (
        asked.activations.offloaded_block_inputs and asked.activations.blocks_without_recompute == 0
    )
    assert (
        on_gpu(
            24, engine__activation_checkpointing="full"
        ).choices.activations.offloaded_block_inputs
        is False
    )
    assert (
        on_gpu(
            139, engine__activation_checkpointing="none"
        ).choices.activations.blocks_without_recompute
        == 28
    )
    some = on_gpu(
        48,
        engine__activation_checkpointing="none",
        engine__blocks_kept_in_slots=0,
        engine__rounds=2,
    ).choices
    assert (
        some.activations.blocks_without_recompute > some.placement.blocks_kept_in_slots == 0
    )  # what is kept needs no residency
    assert (
        on_gpu(
            24, engine__activation_checkpointing="none", engine__blocks_kept_in_slots=3
        ).choices.activations.blocks_without_recompute
        >= 3
    )
    nothing = on_gpu(139, engine__blocks_kept_in_slots=0).choices
    assert (
        nothing.activations.blocks_without_recompute,
        nothing.placement.blocks_kept_in_slots,
    ) == (28, 0)
    assert on_gpu(139, engine__gpu_memory_gib=24.0).choices == on_gpu(24).choices
    assert on_gpu(24, engine__gpu_memory_gib=139.0).choices == on_gpu(24).choices


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_kernels_are_compiled_where_they_can_be_or_as_asked(compiler):
    def compiled(device: str = "cuda", **changes) -> bool:
        shape = big_shape(changes.get("model__dtype", "bfloat16"))
        job = Job(shape, config(**changes), 1024)
        return choose(job, Target(device, 139 * GIB, 500 * GIB)).choices.kernels.compiled

    assert compiled()
    assert not compiled(model__dtype="float32")
    assert not compiled("cpu")
    assert not compiled(engine__kernels="eager") and compiled("cpu", engine__kernels="compiled")
    compiler("there is no C compiler")
    assert not compiled() and compiled(engine__kernels="compiled")


def test_rounds_sum_on_the_device_where_they_fit():
    assert on_gpu(139, engine__rounds=2).choices.gradients.main_grad == "device"
    small = on_gpu(24, engine__rounds=2).choices
    assert (small.batching.rounds, small.gradients.main_grad, small.batching.micro_batches % 2) == (
        2,
        "host",
        0,
    )


@pytest.mark.parametrize("gib", [12, 24, 32, 48, 139])
def test_a_continued_session_rounds_alike_whatever_memory_it_finds(either, gib):
    """With a plan that can be built, on a smaller device as well as on a larger one."""
    first = on_gpu(gib)
    kept = json.loads(json.dumps(first.rounding))
    found = []
    for limit in (6, *LIMITS[::3], 200):
        again = choose(
            Job(big_shape(), config(), 1024, kept), Target("cuda", limit * GIB, 200 * GIB)
        )
        assert again.rounding == first.rounding, limit
        verify_plan(plan_of(again))
        found.append(again.choices)
    assert len(set(found)) > 1


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_an_optimizer_may_move_when_a_run_is_resumed():
    """A unit has the same bits wherever it is updated, whatever its moments are kept in."""
    shape = big_shape().with_optimizer("adamw_8bit")
    settings = config(train__optimizer="adamw_8bit", train__batch_size=16)
    first = choose(Job(shape, settings, 1024), Target("cuda", 80 * GIB, 200 * GIB))
    assert first.choices.updates.device_updated_units and first.choices.placement.gpu_resident_units
    kept = json.loads(json.dumps(first.rounding))
    again = choose(Job(shape, settings, 1024, kept), Target("cuda", 139 * GIB, 200 * GIB))
    assert again.rounding == first.rounding
    assert again.choices.placement.gpu_resident_units > first.choices.placement.gpu_resident_units


def test_a_session_is_continued_on_a_cpu(compiler):
    kept = on_gpu(48, engine__states="host").rounding
    assert kept["compiled"]
    compiler("Triton is not installed")  # nobody is asked again
    again = choose(Job(big_shape(), config(), 1024, kept), Target("cpu", None, 400 * GIB))
    assert again.rounding == kept
    verify_plan(plan_of(again))


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_logits_stay_bounded(either):
    for shape in (
        big_shape(),
        dataclasses.replace(big_shape(), vocab_size=1000),
        dataclasses.replace(big_shape(), vocab_size=262144),
    ):
        at = shape.vocab_size * (shape.compiled_logit_bytes if either else shape.logit_bytes)
        for gib, most in ((139, LOGITS_BYTES["cuda"]), (16, LOGITS_BYTES["small"])):
            chunk = on_gpu(gib, shape).loss_chunk
            assert 128 <= chunk <= 8192 and (chunk * at <= most or chunk == 128)
            assert chunk == 8192 or (chunk + 128) * at > most
        # Another chunk rounds differently: there are two, not one for every GPU.
        assert on_gpu(139, shape).loss_chunk == on_gpu(SMALL_GPU_BYTES / GIB, shape).loss_chunk
    assert (
        on_gpu(139, dataclasses.replace(big_shape(), max_position_embeddings=64)).loss_chunk == 64
    )
    on_cpu = choose(Job(big_shape(), config(), 1024), Target("cpu", None, 300 * GIB)).loss_chunk
    assert on_cpu * 152064 * 14 <= 256 << 20 or on_cpu == 128


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_on_the_cpu_a_small_model_stays_and_keeps_its_activations():
    tiny = shape_of(build_model(tiny_config("llama"), ModelConfig(source="tiny", dtype="float32")))
    settings = config(model__dtype="float32", train__batch_size=32)
    small = choose(Job(tiny, settings, 64), Target("cpu", None, 8 * GIB))
    assert (
        small.choices.placement.blocks_kept_in_slots,
        small.choices.activations.blocks_without_recompute,
    ) == (
        3,
        3,
    )
    assert not small.choices.activations.offloaded_block_inputs
    assert small.micro_batch_size == 32 and small.gpu_bytes < 2 * GIB
    large = choose(Job(big_shape(), config(), 1024), Target("cpu", None, 180 * GIB)).choices
    assert (
        large.placement.blocks_kept_in_slots,
        large.activations.blocks_without_recompute,
        large.activations.offloaded_block_inputs,
    ) == (0, 0, False)
