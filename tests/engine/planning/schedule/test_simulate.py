"""The simulator: against steps whose time can be worked out by hand, and against the rules that
every schedule keeps.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from engine.config.settings import ModelConfig
from engine.machine.rates import PACKED_BYTES, PACKED_WIDTH, Rates
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit import cost_model
from engine.planning.fit.cost_model import (
    BLOCK_CALLS,
    BLOCK_KERNELS,
    BUS_SHARE,
    FIRST_GRADIENT_BYTES,
    GRADIENT_BYTES,
    GRAPH_CALLS,
    HALF_SPEED_TOKENS,
    HALF_SPEED_WIDTH,
    KERNEL_SECONDS,
    MEASURED_WIDTH,
    Cost,
    MicroBatch,
    step_seconds,
)
from engine.planning.fit.optimizer_placement import place_optimizers
from engine.planning.fit.simulate_step import op_seconds
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import Lane, Op
from engine.planning.schedule.simulate import simulate
from engine.planning.shape.active_parameters import parameter_flops
from engine.tools.bench.step_flops import step_flops
from tests.support.tiny import tiny_config

BLOCKS = [f"block {k}" for k in range(6)]
CHOICES = (
    PlanChoices(),
    PlanChoices().changed(micro_batches=4, slots=3, prefetch_depth=2),
    PlanChoices().changed(micro_batches=4, rounds=2, main_grad="host"),
    PlanChoices().changed(
        micro_batches=4,
        rounds=2,
        main_grad="device",
        blocks_kept_in_slots=3,
        blocks_without_recompute=2,
    ),
    PlanChoices().changed(micro_batches=3, offloaded_block_inputs=True),
    PlanChoices().changed(
        micro_batches=2,
        device_updated_units=("embed", "block 0", "block 2", "head"),
        update_buffers=2,
    ),
    PlanChoices().changed(
        micro_batches=4,
        rounds=2,
        main_grad="device",
        device_updated_units=tuple(BLOCKS),
        update_buffers=3,
        blocks_kept_in_slots=2,
        blocks_without_recompute=6,
    ),
)
NAMES = (
    "one micro-batch",
    "three slots",
    "rounds on the host",
    "rounds on the device",
    "block inputs on the host",
    "some updates on the device",
    "all updates on the device",
)
NUMEL = dict.fromkeys(BLOCKS, 100) | {"embed": 250, "head": 250}


def of_lane(**seconds: float):
    return lambda op: seconds.get(op.lane.replace(" ", "_"), 0.0)


@pytest.mark.parametrize("choices", CHOICES, ids=NAMES)
def test_a_step_takes_no_less_than_its_busiest_lane_and_no_more_than_all(choices):
    plan = build_step_plan(BLOCKS, False, choices, PlaneSizes(numel=NUMEL))
    for seconds in (
        of_lane(COMPUTE=1.0),
        of_lane(COMPUTE=1.0, H2D=0.4, D2H=0.7, HOST=0.2),
        of_lane(H2D=3.0, HOST=2.0),
        of_lane(COMPUTE=1.0, STATES_IN=2.0, UPDATE=0.5, STATES_OUT=1.5),
    ):
        found = simulate(plan, seconds)
        assert max(found.busy.values()) <= found.seconds + 1e-9
        assert found.seconds <= sum(found.busy.values()) + 1e-9
        assert simulate(plan, seconds, inline=True).seconds == pytest.approx(
            sum(found.busy.values())
        )
        assert found.exposed == pytest.approx(max(0.0, found.seconds - found.busy[Lane.COMPUTE]))


@pytest.mark.parametrize("choices", CHOICES, ids=NAMES)
def test_ops_keep_their_lane_and_their_waits(choices):
    plan = build_step_plan(BLOCKS, True, choices, PlaneSizes(numel=NUMEL))
    seconds = of_lane(
        COMPUTE=1.0, H2D=0.9, D2H=1.3, HOST=0.5, STATES_IN=0.8, UPDATE=0.4, STATES_OUT=1.1
    )
    found = simulate(plan, seconds)
    starts = found.starts
    assert [end - start for start, end in zip(starts, found.ends)] == pytest.approx(
        [seconds(op) for op in plan.ops]
    )
    ends = [start + seconds(op) for start, op in zip(starts, plan.ops)]
    for op in plan.ops:
        assert all(starts[op.index] >= ends[k] - 1e-9 for k in op.waits)
    for lane in Lane:
        own = [op.index for op in plan.ops if op.lane == lane]
        assert all(starts[b] >= ends[a] - 1e-9 for a, b in pairwise(own))


def test_compute_that_nothing_holds_up_is_the_whole_step():
    """Copies and updates that take no time: what is left is the sum of the ops of COMPUTE."""
    plan = build_step_plan(BLOCKS, False, PlanChoices().changed(micro_batches=2))
    found = simulate(plan, of_lane(COMPUTE=2.0))
    assert found.seconds == pytest.approx(2.0 * sum(op.lane == Lane.COMPUTE for op in plan.ops))
    assert found.exposed == 0.0


def test_updates_run_under_the_next_forward_and_show_when_they_are_longer():
    """The forward waits for its own block's update: six updates of 1 s, then the pass that was not
    hidden.
    """
    plan = build_step_plan(BLOCKS, False, PlanChoices())

    def seconds(update: float):
        return lambda op: {"update": update, "forward": 1.0, "backward": 2.0}.get(op.kind, 0.0)

    hidden = simulate(plan, seconds(0.5))
    # Embed's and the first block's updates come before the forward that needs them; the others hide
    # under it.
    assert hidden.seconds == pytest.approx(6 * 3.0 + 2 * 0.5)
    shown = simulate(plan, seconds(2.0))
    # All eight updates of 2 s, then the last block's forward would already be over: the head's
    # comes last of all.
    assert shown.seconds == pytest.approx(8 * 2.0 + 6 * 2.0)


def test_a_slow_bus_is_what_a_step_takes():
    plan = build_step_plan(BLOCKS, False, PlanChoices().changed(slots=2))
    found = simulate(
        plan, lambda op: {"prefetch": 5.0, "forward": 1.0, "backward": 1.0}.get(op.kind, 0.0)
    )
    prefetches = sum(op.kind == "prefetch" for op in plan.ops)
    assert found.busy[Lane.H2D] == 5.0 * prefetches
    assert found.seconds >= found.busy[Lane.H2D]
    assert found.seconds <= found.busy[Lane.H2D] + found.busy[Lane.COMPUTE]


@pytest.fixture(scope="module")
def shape():
    return shape_of(build_model(tiny_config("qwen2"), ModelConfig(source="tiny", dtype="float32")))


FAST = 1e30


def only(**rates: float) -> Rates:
    """A machine that does all else in no time."""
    return Rates(
        **dict.fromkeys(Rates.__dataclass_fields__, FAST)
        | {"overhead": 0.0, "call": 0.0, "others": ()}
        | rates
    )


def bus(rate: float) -> dict[str, float]:
    """As fast whatever runs beside it."""
    return dict.fromkeys(("h2d", "d2h", "h2d_busy", "d2h_busy"), rate)


def test_ops_take_what_their_bytes_and_products_take(shape):
    block, blocks = shape.blocks[0], [unit.name for unit in shape.blocks]
    plan = build_step_plan(
        blocks, False, PlanChoices().changed(micro_batches=2, offloaded_block_inputs=True)
    )
    kept_plan = build_step_plan(
        blocks, False, PlanChoices().changed(micro_batches=2, blocks_without_recompute=3)
    )

    def of(kind: str, plan=plan, **rates: float) -> float:
        seconds = op_seconds(plan, shape, only(**rates), MicroBatch(2, 16))
        return seconds(next(op for op in plan.ops if op.kind == kind and op.unit == block.name))

    assert of("prefetch", h2d=1.0) == pytest.approx(4 * block.numel)
    assert of("offload", d2h=1.0) == pytest.approx(4 * block.numel)
    assert of("offload_block_input", d2h=1.0) == pytest.approx(4 * 2 * 16 * shape.hidden_size)
    assert of("update", adamw=1.0) == block.numel
    # 32 tokens and a narrow model are too few for full speed, which the attention's rate has in it
    # already.
    forward = of("forward", matmul=1.0)
    slow = (1 + HALF_SPEED_WIDTH / shape.hidden_width) / (1 + HALF_SPEED_WIDTH / MEASURED_WIDTH)
    assert forward == pytest.approx(2 * block.parameter_count * (32 + HALF_SPEED_TOKENS) * slow)
    assert of("backward", matmul=1.0) == pytest.approx(3 * forward)
    assert of("backward", kept_plan, matmul=1.0) == pytest.approx(2 * forward)
    attention = of("forward", attention=1.0)
    assert attention == pytest.approx(2 * 2 * 16 * 16 * shape.attention.width)
    assert of("backward", attention=1.0) == pytest.approx(3.5 * attention)
    assert of("backward", kept_plan, attention=1.0) == pytest.approx(2.5 * attention)
    between = BLOCK_KERNELS["forward"] * KERNEL_SECONDS
    assert of("forward", packed_attention=1.0) == pytest.approx(between)
    assert of("backward", kept_plan) == pytest.approx(BLOCK_KERNELS["backward"] * KERNEL_SECONDS)
    assert of("forward", overhead=2.0) == 2.0  # a CPU has no gaps between kernels
    traffic = of("forward", device_memory=1.0)
    assert traffic == pytest.approx(2 * block.activations.of(2, 16))
    assert of("backward", kept_plan, device_memory=1.0) == pytest.approx(
        2 * traffic + FIRST_GRADIENT_BYTES * block.numel
    )
    later = [op for op in kept_plan.ops if op.kind == "backward" and not op.first]
    seconds = op_seconds(kept_plan, shape, only(device_memory=1.0), MicroBatch(2, 16))
    assert seconds(later[0]) == pytest.approx(2 * traffic + GRADIENT_BYTES * block.numel)
    compiled = dataclasses.replace(plan, compiled=True)
    assert of("forward", compiled, device_memory=1.0) == pytest.approx(
        block.compiled_activations.of(2, 16)
    )
    assert block.compiled_activations.of(2, 16) < block.activations.of(2, 16)


def test_packed_rows_have_a_kernel_of_their_own(shape):
    rates = only(packed_attention=1.0)
    packed = Cost(shape, rates, MicroBatch(2, 16, varlen=True), False)
    assert packed.forward("block 0") == pytest.approx(2 * 2 * 16 * 16 * shape.attention.width)
    assert packed.backward("block 0") == pytest.approx(2.5 * packed.forward("block 0"))
    plain, packed = (
        Cost(shape, only(device_memory=1.0), MicroBatch(2, 16, varlen), False)
        for varlen in (False, True)
    )
    more = PACKED_BYTES / 3 * 32 * (shape.attention.width + PACKED_WIDTH * shape.attention.heads)
    assert packed.forward("block 0") - plain.forward("block 0") == pytest.approx(more)
    assert packed.backward("block 0") - plain.backward("block 0") == pytest.approx(2 * more)


def test_nothing_on_a_gpu_is_faster_than_its_launch(shape):
    plan = build_step_plan(
        [unit.name for unit in shape.blocks], False, PlanChoices().changed(micro_batches=2)
    )
    seconds = op_seconds(plan, shape, only(call=1.0), MicroBatch(2, 16))
    took = {op.kind: seconds(op) for op in plan.ops if op.lane == Lane.COMPUTE}
    forward, backward = BLOCK_CALLS["forward"], BLOCK_CALLS["backward"]
    assert [took[kind] for kind in ("embed", "forward", "loss", "embed_backward")] == [
        forward,
        forward,
        forward,
        backward,
    ]
    assert took["backward"] == pytest.approx(forward + backward)
    slow = op_seconds(plan, shape, only(call=1e-30, matmul=1.0), MicroBatch(2, 16))
    free = op_seconds(plan, shape, only(matmul=1.0), MicroBatch(2, 16))
    assert all(slow(op) == free(op) for op in plan.ops if op.kind in ("forward", "backward"))


@pytest.mark.parametrize("dtype,weight,states", [("float32", 4, 8), ("bfloat16", 2, 10)])
def test_optimizers_on_the_device_take_what_their_planes_take(dtype, weight, states):
    """states: bytes of an element beside its weight and its gradient, which have as many each."""
    shape = shape_of(build_model(tiny_config("qwen2"), ModelConfig(source="tiny", dtype=dtype)))
    numel = {unit.name: unit.numel for unit in shape.units}
    device_updates = ("embed", "block 1", "block 2")
    plan = build_step_plan(
        [unit.name for unit in shape.blocks],
        False,
        PlanChoices().changed(device_updated_units=device_updates, update_buffers=2),
        PlaneSizes(
            numel=numel,
            chunk_numel=shape.update_buffer(1).numel,
            buffer_bytes=shape.update_buffer(1).bytes,
        ),
    )

    def of(kind: str, unit: str, **rates: float) -> float:
        seconds = op_seconds(plan, shape, only(**rates), MicroBatch(2, 16))
        return sum(seconds(op) for op in plan.ops if op.kind == kind and op.unit == unit)

    for unit in device_updates:
        assert of("fetch_states", unit, h2d=1.0, h2d_busy=1.0) == pytest.approx(
            (weight + states) * numel[unit] / BUS_SHARE
        )
        assert of("offload_weights", unit, d2h_busy=1.0) == pytest.approx(weight * numel[unit])
        assert of("offload_states", unit, d2h_busy=1.0) == pytest.approx(states * numel[unit])
        assert of("device_update", unit, device_memory=1.0) == pytest.approx(
            2 * (2 * weight + states) * numel[unit]
        )
        assert of("update", unit, adamw_busy=1.0) == 0
    assert of("fetch_gradient", "block 2", h2d=1.0, h2d_busy=1.0) == pytest.approx(
        weight * numel["block 2"] / BUS_SHARE
    )
    assert (
        of("fetch_gradient", "embed", h2d=1.0) == of("fetch_gradient", "block 1", h2d=1.0) == 0
    )  # they never left
    # Half of the time beside them.
    assert (
        of("update", "block 0", adamw_busy=1.0)
        == of("update", "block 0", adamw=1.0)
        == numel["block 0"] / 2
    )


def test_flops_of_a_step_are_those_of_its_ops(shape, monkeypatch):
    flops = step_flops(shape, 4, 16, recomputed=len(shape.blocks))
    parameters = shape.parameter_count
    assert (
        flops["parameters"] == parameter_flops(shape.active_parameters, 64) == 6 * parameters * 64
    )
    assert flops["model"] == pytest.approx(
        6 * (parameters - shape.embed.parameter_count) * 64
        + 3 * 3 * 2 * 4 * 16 * 16 * shape.attention.width
    )
    monkeypatch.setattr(cost_model, "HALF_SPEED_TOKENS", 0)
    monkeypatch.setattr(cost_model, "HALF_SPEED_WIDTH", 0)
    plan = build_step_plan(
        [unit.name for unit in shape.blocks], False, PlanChoices().changed(micro_batches=2)
    )
    found = simulate(
        plan, op_seconds(plan, shape, only(matmul=1.0, attention=1.0), MicroBatch(2, 16))
    )
    # Attention's backward multiplies its scores once more, which nobody counts.
    again = 0.5 * shape.attention.flops(4, 16) * len(shape.blocks)
    assert found.busy[Lane.COMPUTE] == pytest.approx(flops["hardware"] + again)
    assert found.busy[Lane.HOST] == pytest.approx(0.0) and found.busy[Lane.D2H] < 1e-20


def test_recorded_blocks_launch_little(shape):
    """A block that launching bounds takes a few calls as a graph, and what is around the blocks is
    launched ahead.
    """
    plain, recorded = (
        Cost(shape, only(call=1.0), MicroBatch(2, 16), True, graphs) for graphs in (False, True)
    )
    for seconds in (Cost.forward, Cost.backward):
        assert seconds(recorded, "block 0") == GRAPH_CALLS
        assert seconds(plain, "block 0") > 10 * GRAPH_CALLS
    assert plain.loss() > 10 * GRAPH_CALLS > 1 > recorded.loss()


def test_small_micro_batches_are_slower_by_the_token(shape):
    rates = only(matmul=1.0)
    few, many = (
        step_seconds(
            Cost(shape, rates, MicroBatch(64 // m, 16), False),
            PlanChoices().changed(micro_batches=m),
            0.0,
        )
        for m in (16, 1)
    )
    assert few > 3 * many
    even = [
        step_seconds(
            Cost(shape, rates, MicroBatch(4096 // m, 1024), False),
            PlanChoices().changed(micro_batches=m),
            0.0,
        )
        for m in (16, 1)
    ]
    assert even[0] == pytest.approx(even[1], rel=0.01)


def test_a_mixture_counts_the_experts_that_a_token_uses():
    dense = shape_of(
        build_model(
            tiny_config("mixtral", num_experts_per_tok=4), ModelConfig(source="t", dtype="float32")
        )
    )
    sparse = shape_of(
        build_model(
            tiny_config("mixtral", num_experts_per_tok=1), ModelConfig(source="t", dtype="float32")
        )
    )
    assert dense.parameter_count == sparse.parameter_count
    assert step_flops(sparse, 2, 16, 0)["model"] < 0.6 * step_flops(dense, 2, 16, 0)["model"]


def test_ops_without_a_duration_take_none(shape):
    plan = build_step_plan([unit.name for unit in shape.blocks], False, PlanChoices())
    seconds = op_seconds(
        plan, shape, Rates(*[1] * len(Rates.__dataclass_fields__)), MicroBatch(1, 8)
    )
    assert {op.kind for op in plan.ops if seconds(op) == 0.0} == {"summary", "clip"}
    assert isinstance(plan.ops[0], Op)


# ---------------------------------------------------------------------- where optimizers run


def device_updates_of(
    shape, rates: Rates, buffers: int = 2, **changes
) -> tuple[tuple[str, ...], float]:
    device_updates = place_optimizers(
        Cost(shape, rates, MicroBatch(2, 16), False),
        PlanChoices().changed(update_buffers=buffers, **changes),
    )
    assert not device_updates.moments_after_weights  # of one rank
    return device_updates.units, device_updates.waited


def test_optimizers_run_where_weights_are_ready_first(shape):
    everything = tuple(unit.name for unit in shape.units)
    slow_host = only(adamw=1.0, adamw_busy=1.0)
    assert device_updates_of(shape, slow_host)[0] == everything
    assert device_updates_of(shape, slow_host, buffers=0) == (
        (),
        pytest.approx(shape.gradient_numel),
    )
    assert device_updates_of(shape, only(**bus(1.0))) == device_updates_of(
        shape, only(**bus(1.0)), buffers=0
    )
    # Neither is fast: both work, and are done sooner than the host alone.
    both = only(**bus(100.0), adamw=10.0, adamw_busy=8.0)
    device_updates, waited = device_updates_of(shape, both)
    assert 0 < len(device_updates) < len(everything)
    assert waited < device_updates_of(shape, both, buffers=0)[1]


def test_a_node_that_the_bus_slows_down_is_left_alone(shape):
    """Homes on the device would gain less than the host loses."""
    assert device_updates_of(
        shape, only(**bus(20.0), adamw=10.0, adamw_busy=0.1)
    ) == device_updates_of(shape, only(**bus(20.0), adamw=10.0, adamw_busy=0.1), buffers=0)


def test_what_the_first_pass_hides_is_not_waited_for(shape):
    update = only(adamw=1.0, adamw_busy=1.0)
    alone = device_updates_of(shape, update, buffers=0)[1]
    hidden = device_updates_of(shape, dataclasses.replace(update, matmul=1e-3), buffers=0)[1]
    assert alone == pytest.approx(shape.gradient_numel)
    first = (
        shape.embed.numel + shape.blocks[0].numel
    )  # the first block's pass waits for these; all others are hidden
    assert hidden == pytest.approx(first)
