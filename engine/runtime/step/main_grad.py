"""Gradients of a unit are added to an fp32 accumulator here, and the op `reduce` rounds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.build.units import Unit
from engine.planning.layout.layout import UnitLayout
from engine.planning.schedule.buffers import EMBED, Buffer, BufferKind
from engine.planning.schedule.ops import Reduce, WithMainGrad
from engine.planning.schedule.shards import cut
from engine.runtime.step.context import OpContext
from engine.runtime.step.step import StepUnderWay

Gradients = Sequence[torch.Tensor | None]
"""Gradients of a unit's trained parameters, in layout order. That of an unused parameter is None.
"""


def main_grad(context: OpContext, owner: str, op: WithMainGrad, unit: str) -> torch.Tensor:
    """Returns the part [numel] of an fp32 gradient buffer that the owner uses. The loss op of a
    tied model also adds to the buffer of the embed unit.
    """
    buffer = op.grad if owner == unit else Buffer(BufferKind.MAIN_GRAD, owner)
    assert buffer is not None  # only trained units have accumulators
    return context.state.grads[buffer][: context.units[owner].layout.numel]


def as_gradient(total: torch.Tensor) -> torch.Tensor:
    """Returns a gradient in bf16 [numel] that takes the place of an accumulator [numel] in fp32: it
    begins where the accumulator does.
    """
    return total.view(torch.bfloat16)[: total.numel()]


def add_to_main_grad(
    layout: UnitLayout, buffer: torch.Tensor, gradients: Gradients, first: bool
) -> None:
    """Adds to the accumulator in `buffer` [numel]. The first gradients start the accumulator: where
    they fill the whole plane they are copied, which saves zeroing it. A buffer in bf16 must get one
    term.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    fills_plane = len(present) == len(gradients) and layout.fills_planes
    if first and fills_plane:
        for (spec, offset), gradient in zip(layout.trained, present):
            buffer[offset : offset + spec.numel].view(spec.shape).copy_(gradient)
        return
    if first:
        buffer.zero_()
    add(layout, buffer, gradients)


def add(layout: UnitLayout, buffer: torch.Tensor, gradients: Gradients) -> None:
    """Adds each gradient to its place in the fp32 accumulator `buffer` [numel]. Torch upcasts a
    bf16 gradient first.
    """
    for (spec, offset), gradient in zip(layout.trained, gradients):
        if gradient is not None:
            buffer[offset : offset + spec.numel].view(spec.shape).add_(gradient)


def add_shared(context: OpContext, unit: Unit, gradients: Gradients) -> None:
    """Adds the gradients of what the unit shares with other blocks to the fp32 accumulator of
    embed, which the loss op has begun.
    """
    layout = context.units[EMBED].layout
    places = {spec.name: (spec, offset) for spec, offset in layout.trained}
    total = context.state.grads[Buffer(BufferKind.MAIN_GRAD, EMBED)]
    for name, gradient in zip(unit.shared.values(), gradients, strict=True):
        if gradient is not None:
            spec, offset = places[name]
            total[offset : offset + spec.numel].view(spec.shape).add_(gradient)


SUMMED = 4096
"""Number of squares that are added in fp32 on the CPU; their sums are added in fp64."""


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the squares of float32 `values` [n], a scalar that is right to 1e-7. It
    has the same bits for any number of threads.
    """
    if values.device.type != "cpu":
        # On a GPU, torch adds in a tree: no thread adds more than a few hundred squares in a row.
        return torch.linalg.vector_norm(values).square()
    # On the CPU, each lane of a vector register adds its share of all squares in a row. From some
    # millions on, a square is lost in the rounding of the sum that it is added to.
    rows = len(values) // SUMMED
    whole, rest = values.split([rows * SUMMED, len(values) - rows * SUMMED])
    norms = torch.linalg.vector_norm(whole.view(rows, SUMMED), dim=1)
    of_rest = torch.linalg.vector_norm(rest)
    return norms.double().square().sum() + of_rest.double().square()


def add_squares(context: OpContext, unit: str, grad: torch.Tensor, start: int) -> None:
    """Adds the squared norm of `grad` [n] to that of the unit, in which `grad` begins at `start`.

    The norm of embed is that of its chunks in every plan: as a whole it would be rounded otherwise,
    and so would the clip factor.
    """
    norm = context.state.norms[context.positions[unit]]
    size = context.plan.embed_chunk if unit == EMBED else 0
    # The head of some tied models has no parameters, but a norm.
    for begin, end in cut(len(grad), size) if size and len(grad) else [(0, len(grad))]:
        square = squared_norm(grad[begin:end])
        if start + begin == 0:
            norm.copy_(square)
        else:
            norm.add_(square)


def reduce(context: OpContext, op: Reduce, _step: StepUnderWay) -> None:
    """Rounds a unit's fp32 accumulator to the staging buffer, once a round. Torch's `copy_` rounds
    ties to even. In the last round the op also computes the norm of the whole gradient.
    """
    start, stop = op.chunk or (0, context.units[op.unit].layout.numel)
    grad = context.state.grads[op.grad][: stop - start]
    staging = context.state.stagings[op.staging][start:stop]
    # With several gradient-accumulation rounds and the accumulator kept on the host, `staging` has
    # what the earlier rounds left, which comes before the norm: the norm is of the whole gradient,
    # and norms of rounds do not add up to it. It is taken in fp32, before the gradient is rounded.
    if op.adds:
        grad.add_(staging)
    if op.last:
        add_squares(context, op.unit, grad, start)
    # A staging buffer may be in the memory of the accumulator, so the accumulator is rounded
    # elsewhere first.
    in_main_grad = op.unit in context.plan.rounded_in_main_grads
    staging.copy_(grad.to(staging.dtype) if in_main_grad else grad)
