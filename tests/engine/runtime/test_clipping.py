"""The clip factor is that of torch's clip_grad_norm_, and the host's is the device's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.ops import OpKind
from engine.planning.schedule.schedule import StepPlan
from engine.runtime.step.copy_ops import WORK
from engine.runtime.step.step import StepInputs, StepUnderWay

UNITS = ([3e-6, 0.0], [0.0, 4e-6, 0.0])
"""Two units have these gradients. Their norm is 5e-6, so 1e-6 beside it is not lost."""


def torch_factor(limit: float) -> float:
    """Returns the factor by which clip_grad_norm_ scales gradients like those of UNITS."""
    parameters = [torch.nn.Parameter(torch.zeros(len(values))) for values in UNITS]
    for parameter, values in zip(parameters, UNITS):
        parameter.grad = torch.tensor(values)
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    return float(parameters[0].grad[0]) / UNITS[0][0]


@pytest.mark.parametrize("limit", [1e-6, 2e-6, 5e-6, 5.9e-6, 1.0])
def test_the_factor_is_that_of_torch_even_for_tiny_gradients(limit):
    squares = [sum(value * value for value in values) for values in UNITS]
    norms = torch.tensor([*squares, 2.5], dtype=torch.float64)
    step = StepUnderWay(StepInputs(number=1, batches=[], loss_scale=1.0, max_grad_norm=limit))
    state = SimpleNamespace(norms=norms, clip=torch.ones(2))
    context = SimpleNamespace(
        state=state,
        summary=SimpleNamespace(
            norms=torch.zeros(3, dtype=torch.float64), clip_factor=torch.zeros(1)
        ),
        plan=StepPlan(()),
    )
    for kind in (OpKind.SUMMARY, OpKind.CLIP):
        WORK[kind](context, None, step)
    assert step.result.clip_factor == pytest.approx(torch_factor(limit), rel=1e-5)
    # The host takes the factor of the device, to the bit.
    assert step.result.clip_factor == float(state.clip[0])
    assert step.result.grad_norm == pytest.approx(5e-6, rel=1e-5)
    assert step.result.unit_norms == pytest.approx([3e-6, 4e-6], rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place, what", [(0, "gradient norm"), (1, "gradient norm"), (2, "loss")])
def test_a_loss_or_a_norm_that_is_not_finite_ends_the_step(bad, place, what):
    norms = torch.tensor([9e-12, 16e-12, 2.5])
    norms[place] = bad
    step = StepUnderWay(StepInputs(number=3, batches=[], loss_scale=1.0, max_grad_norm=1.0))
    with pytest.raises(NonFiniteError, match=f"The {what} of step 3 is not a finite number"):
        summary = SimpleNamespace(norms=norms)
        WORK[OpKind.CLIP](SimpleNamespace(summary=summary), None, step)
    assert step.result is None
