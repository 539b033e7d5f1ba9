"""Law 2 with the attention kernel that runs use: cuDNN's, which deterministic mode excludes.

Its forward pass sums in a fixed order, so losses and evaluations have the same bits in any plan.
Its backward pass adds up in the order in which thread blocks end, so the same plan run twice has
gradients that differ in their last bits. No plan may differ by more than that.
"""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 4, 512
BASE = PlanChoices().changed(micro_batches=2)
PLANS = {
    "one slot": dict(slots=1),
    "three slots": dict(slots=3, prefetch_depth=2),
    "one resident, two kept": dict(blocks_kept_in_slots=1, blocks_without_recompute=2),
    "all kept": dict(blocks_without_recompute=3),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "rounds": dict(rounds=2, main_grad="device", blocks_without_recompute=3),
}
AGAIN = 3
"""The base plan runs this many times, which shows how far the kernel differs from itself."""
LAST_BITS = 5e-4
"""The noise of the kernel varies from run to run by less than half a bf16 rounding, 2**-9 / 2 of
the norm.
"""


@dataclasses.dataclass
class Step:
    """What one step leaves."""

    loss: float
    gradient: torch.Tensor
    """The gradients of all units are float32 [parameters and gaps]."""
    evaluation: float


@pytest.fixture(scope="module")
def plain() -> torch.nn.Module:
    """Returns a model with heads of a real size, for which cuDNN has kernels."""
    config = tiny_config(
        "llama",
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
    )
    return plain_model(config)


def step_of(plain: torch.nn.Module, choices: PlanChoices) -> Step:
    run, device_updates = streamed_on_gpu(plain, choices), []
    batches = random_batches(2, rows=ROWS, length=LENGTH, seed=1)
    evaluation = run.engine.evaluate(batches)
    run.engine.train_step(1, batches, 0.0, device_updates.append)
    run.engine.drain()
    gradient = torch.cat(
        [run.host_states.tensor(unit.name, "grad").float() for unit in run.model.units]
    )
    run.close()
    gc.collect()
    torch.cuda.empty_cache()
    return Step(device_updates[0].loss, gradient, evaluation)


def streamed_on_gpu(plain: torch.nn.Module, choices: PlanChoices):
    return streamed(
        plain,
        choices,
        backend=CudaBackend(),
        dtype="bfloat16",
        tokens=ROWS * LENGTH,
        loss_chunk=1024,
    )


def apart(one: Step, other: Step) -> float:
    """Returns the norm of the difference of two gradients over the norm of one."""
    return float((one.gradient - other.gradient).norm() / one.gradient.norm())


@pytest.fixture(scope="module")
def same_plan(plain) -> list[Step]:
    """Returns the steps of one plan that was run again and again."""
    assert not torch.are_deterministic_algorithms_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        first = step_of(plain, BASE)
    if not any("cudnn" in event.key.lower() for event in profile.key_averages()):
        pytest.skip("cuDNN has no attention kernel for this GPU")
    return [first, *(step_of(plain, BASE) for _ in range(AGAIN - 1))]


@pytest.mark.parametrize("name", PLANS)
def test_any_plan_is_within_the_rules_of_the_kernel(plain, same_plan, name):
    first, *others = same_plan
    found = step_of(plain, BASE.changed(**PLANS[name]))
    assert found.loss == first.loss and found.evaluation == first.evaluation
    assert apart(first, found) <= 2 * max(apart(first, o) for o in others) + LAST_BITS


def test_the_kernel_differs_from_itself_by_last_bits_alone(same_plan):
    first, *others = same_plan
    for other in others:
        assert other.loss == first.loss and other.evaluation == first.evaluation
        assert apart(first, other) < 2**-8
