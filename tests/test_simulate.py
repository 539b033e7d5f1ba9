"""The simulator: against steps whose time can be worked out by hand, and against the rules that every schedule keeps."""

from __future__ import annotations

import pytest

from engine.config import ModelConfig
from engine.model import build_model
from engine.plan import COMPUTE, D2H, H2D, HOST, LANES, Op
from engine.planner import PlanChoices, build_step_plan
from engine.shape import shape_of
from engine.cost import Rates, op_seconds, step_flops
from engine.simulate import simulate
from tests.tiny import tiny_config

BLOCKS = [f"block {k}" for k in range(6)]
CHOICES = (PlanChoices(), PlanChoices(micro_batches=4, slots=3, prefetch_depth=2),
           PlanChoices(micro_batches=4, rounds=2, gradient_sum="host"),
           PlanChoices(micro_batches=4, rounds=2, gradient_sum="device", resident_blocks=3, kept_blocks=2),
           PlanChoices(micro_batches=3, host_boundaries=True))


def of_lane(**seconds: float):
    return lambda op: seconds.get(op.lane, 0.0)


@pytest.mark.parametrize("choices", CHOICES, ids=repr)
def test_a_step_takes_no_less_than_its_busiest_lane_and_no_more_than_all(choices):
    plan = build_step_plan(BLOCKS, False, choices)
    for seconds in (of_lane(COMPUTE=1.0), of_lane(COMPUTE=1.0, H2D=0.4, D2H=0.7, HOST=0.2), of_lane(H2D=3.0, HOST=2.0)):
        found = simulate(plan, seconds)
        assert max(found.busy.values()) <= found.seconds + 1e-9
        assert found.seconds <= sum(found.busy.values()) + 1e-9
        assert simulate(plan, seconds, inline=True).seconds == pytest.approx(sum(found.busy.values()))
        assert found.exposed == pytest.approx(max(0.0, found.seconds - found.busy[COMPUTE]))


@pytest.mark.parametrize("choices", CHOICES, ids=repr)
def test_ops_keep_their_lane_and_their_waits(choices):
    plan = build_step_plan(BLOCKS, True, choices)
    seconds = of_lane(COMPUTE=1.0, H2D=0.9, D2H=1.3, HOST=0.5)
    starts = simulate(plan, seconds).starts
    ends = [start + seconds(op) for start, op in zip(starts, plan.ops)]
    for op in plan.ops:
        assert all(starts[op.index] >= ends[k] - 1e-9 for k in op.waits)
    for lane in LANES:
        own = [op.index for op in plan.ops if op.lane == lane]
        assert all(starts[b] >= ends[a] - 1e-9 for a, b in zip(own, own[1:]))


def test_compute_that_nothing_holds_up_is_the_whole_step():
    """Copies and updates that take no time: what is left is the sum of the ops of COMPUTE."""
    plan = build_step_plan(BLOCKS, False, PlanChoices(micro_batches=2))
    found = simulate(plan, of_lane(COMPUTE=2.0))
    assert found.seconds == pytest.approx(2.0 * sum(op.lane == COMPUTE for op in plan.ops)) and found.exposed == 0.0


def test_updates_run_under_the_next_forward_and_show_when_they_are_longer():
    """The forward waits for its own block's update: six updates of 1 s, then the pass that was not hidden."""
    plan = build_step_plan(BLOCKS, False, PlanChoices())

    def seconds(update: float):
        return lambda op: {"update": update, "forward": 1.0, "backward": 2.0}.get(op.kind, 0.0)

    hidden = simulate(plan, seconds(0.5))
    # Embed's and the first block's updates come before the forward that needs them; the others hide under it.
    assert hidden.seconds == pytest.approx(6 * 3.0 + 2 * 0.5)
    shown = simulate(plan, seconds(2.0))
    # All eight updates of 2 s, then the last block's forward would already be over: the head's comes last of all.
    assert shown.seconds == pytest.approx(8 * 2.0 + 6 * 2.0)


def test_a_slow_bus_is_what_a_step_takes():
    plan = build_step_plan(BLOCKS, False, PlanChoices(slots=2))
    found = simulate(plan, lambda op: {"prefetch": 5.0, "forward": 1.0, "backward": 1.0}.get(op.kind, 0.0))
    prefetches = sum(op.kind == "prefetch" for op in plan.ops)
    assert found.busy[H2D] == 5.0 * prefetches
    assert found.seconds >= found.busy[H2D] and found.seconds <= found.busy[H2D] + found.busy[COMPUTE]


@pytest.fixture(scope="module")
def shape():
    return shape_of(build_model(tiny_config("qwen2"), ModelConfig(source="tiny", dtype="float32")))


def test_ops_take_what_their_bytes_and_products_take(shape):
    plan = build_step_plan([unit.name for unit in shape.blocks], False, PlanChoices(micro_batches=2, host_boundaries=True))
    fast = 1e30
    block = shape.blocks[0]

    def of(kind: str, **rates: float) -> float:
        seconds = op_seconds(plan, shape, Rates(**{n: rates.get(n, fast) for n in
                                                   ("h2d", "d2h", "matmul", "attention", "device_memory", "adamw")}), 2, 16)
        return seconds(next(op for op in plan.ops if op.kind == kind and op.unit == block.name))

    assert of("prefetch", h2d=1.0) == pytest.approx(4 * block.numel)
    assert of("offload", d2h=1.0) == pytest.approx(4 * block.numel)
    assert of("store_boundary", d2h=1.0) == pytest.approx(4 * 2 * 16 * shape.hidden_size)
    assert of("update", adamw=1.0) == block.numel
    forward = of("forward", matmul=1.0)
    assert forward == pytest.approx(2 * 32 * block.parameter_count + 2 * 2 * 16 * 16 * shape.hidden_size)
    assert of("backward", matmul=1.0) == pytest.approx(3 * forward)


def test_flops_of_a_step_are_those_of_its_ops(shape):
    flops = step_flops(shape, 4, 16, recomputed=len(shape.blocks))
    parameters = shape.parameter_count
    assert flops["parameters"] == 6 * parameters * 64
    assert flops["model"] == pytest.approx(
        6 * (parameters - shape.embed.parameter_count) * 64 + 3 * 3 * 2 * 4 * 16 * 16 * shape.hidden_size)
    plan = build_step_plan([unit.name for unit in shape.blocks], False, PlanChoices(micro_batches=2))
    seconds = op_seconds(plan, shape, Rates(*[1e30] * 2, matmul=1.0, attention=1.0, device_memory=1e30,
                                                     adamw=1e30), 2, 16)
    assert simulate(plan, seconds).busy[COMPUTE] == pytest.approx(flops["hardware"])
    assert simulate(plan, seconds).busy[HOST] == pytest.approx(0.0) and simulate(plan, seconds).busy[D2H] < 1e-20


def test_a_mixture_counts_the_experts_that_a_token_uses():
    dense = shape_of(build_model(tiny_config("mixtral", num_experts_per_tok=4), ModelConfig(source="t", dtype="float32")))
    sparse = shape_of(build_model(tiny_config("mixtral", num_experts_per_tok=1), ModelConfig(source="t", dtype="float32")))
    assert dense.parameter_count == sparse.parameter_count
    assert step_flops(sparse, 2, 16, 0)["model"] < 0.6 * step_flops(dense, 2, 16, 0)["model"]


def test_ops_without_a_duration_take_none(shape):
    plan = build_step_plan([unit.name for unit in shape.blocks], False, PlanChoices())
    seconds = op_seconds(plan, shape, Rates(1, 1, 1, 1, 1, 1), 1, 8)
    assert {op.kind for op in plan.ops if seconds(op) == 0.0} == {"summary", "clip"}
    assert isinstance(plan.ops[0], Op)
