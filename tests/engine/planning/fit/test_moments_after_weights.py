"""The planner has moments updated after all weights where several GPUs wait for updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.machine.link_rates import of_rank
from engine.machine.rates import Rates
from engine.planning.fit.choose import choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import Cost, MicroBatch
from engine.planning.fit.fastest import fastest
from engine.planning.fit.fill_memory import Candidate
from engine.planning.fit.job import Job, Target
from engine.planning.fit.optimizer_placement import place_optimizers
from engine.planning.fit.simulate_step import predicted_step
from engine.planning.fit.step_times import TimedCandidate
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Lane, MainGrad
from engine.planning.schedule.simulate import Simulated
from engine.planning.shape.catalog import entry_of
from engine.planning.shape.model_shape import ModelShape
from engine.text import GIB

MEASURED = Rates(
    h2d=52e9,
    d2h=51e9,
    attention=507e12,
    device_memory=4.1e12,
    packed_attention=330e12,
    matmul=665e12,
    adamw=6.0e9,
    adamw_busy=4.3e9,
    h2d_busy=28.6e9,
    d2h_busy=44.8e9,
    link=372e9,
)
"""The rates of a node with four H200 on which plans were compared."""


def test_shards_and_late_moments_make_a_vertical_step_shorter():
    """32.8 billion parameters on four GPUs; docs/performance.md has what was measured. The second
    pass over the planes moves 18 of 26 bytes again, while the host has nothing else to do.
    """
    shape = entry_of("Qwen/Qwen2.5-32B").shape("bfloat16")
    settings = {"model.source": "Qwen/Qwen2.5-32B", "data.source": "starter"}
    settings |= {"train.batch_size": 256, "engine.gpus": 4, "output.checkpoint": "none"}
    asked = TrainConfig().with_values(settings)
    job = Job(shape, asked, 1024, ranks=4)
    target = Target("cuda", 139 * GIB, 500 * GIB, MEASURED, here=False)

    def simulated(chosen: Chosen, choices: PlanChoices) -> Simulated:
        micro_batch = MicroBatch(chosen.micro_batch_size, 1024)
        return predicted_step(shape, choices, MEASURED, micro_batch, "cuda")[1]

    chosen = choose(job, target)
    choices = chosen.choices
    assert choices.gradients.main_grad == MainGrad.SHARDS and choices.updates.moments_after_weights
    assert choices.activations.blocks_without_recompute == 64  # nothing is recomputed
    vertical = choose(
        replace(job, rounding=chosen.rounding | {"main_grad": "vertical", "rounds": 1}), target
    )
    assert vertical.choices.gradients.main_grad == MainGrad.VERTICAL
    late, at_once = (
        simulated(chosen, choices.changed(moments_after_weights=at)) for at in (True, False)
    )
    assert late.seconds < 0.98 * simulated(vertical, vertical.choices).seconds
    assert late.seconds < at_once.seconds - 1
    assert late.busy[Lane.HOST] / at_once.busy[Lane.HOST] == pytest.approx(36 / 26, rel=1e-3)


def cost_of(shape: ModelShape, slower: float = 1.0) -> Cost:
    rates = replace(MEASURED, adamw=MEASURED.adamw / slower)
    return Cost(shape, of_rank(rates, 4), MicroBatch(8, 1024), True)


@pytest.mark.parametrize(
    "changes",
    [
        dict(main_grad=MainGrad.DEVICE),
        dict(gradients_on_gpu=True),
        dict(ranks=1),
        dict(gpu_resident_units=64),
    ],
    ids=str,
)
def test_moments_are_updated_at_once_where_that_costs_little(changes):
    shape = entry_of("Qwen/Qwen2.5-32B").shape("bfloat16")
    shards = PlanChoices().changed(
        micro_batches=8, rounds=8, ranks=4, main_grad=MainGrad.SHARDS, blocks_without_recompute=64
    )
    cost = cost_of(shape)
    assert place_optimizers(cost, shards).moments_after_weights
    assert not place_optimizers(cost, shards, "cpu").moments_after_weights
    assert not place_optimizers(cost, shards.changed(**changes)).moments_after_weights
    # Two passes of a slow host would take most of a step.
    assert not place_optimizers(cost_of(shape, slower=4), shards).moments_after_weights
    rounded = cost_of(shape.with_optimizer("adamw_8bit"))
    assert not place_optimizers(rounded, shards).moments_after_weights


class FixedTimes:
    """Step times that are known from the start."""

    def __init__(self, **seconds: float):
        self.seconds = {MainGrad(kind): value for kind, value in seconds.items()}

    def bound(self, candidate: Candidate) -> float:
        return self.seconds[candidate.choices.gradients.main_grad]

    def placed(self, candidate: Candidate) -> TimedCandidate:
        return TimedCandidate(self.bound(candidate), *candidate)

    def simulated(self, timed: TimedCandidate) -> TimedCandidate:
        return timed


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"vertical": 10.0, "device": 10.2}, "vertical"),  # without shards, the fastest
        ({"vertical": 10.0, "device": 10.2, "shards": 9.9}, "vertical"),
        ({"vertical": 10.3, "device": 10.2, "shards": 9.9}, "device"),
        ({"vertical": 10.0, "device": 10.2, "shards": 9.6}, "shards"),
        ({"vertical": 10.0, "shards": 9.9}, "shards"),
    ],
)
def test_shards_must_be_clearly_faster_than_main_grads_on_the_device_alone(seconds, expected):
    candidates = [
        Candidate(8, PlanChoices().changed(main_grad=MainGrad(kind), ranks=4)) for kind in seconds
    ]
    found = fastest(candidates, FixedTimes(**seconds), units=30, simulates=True).best
    assert found.choices.gradients.main_grad == expected
