"""These are the ops of COMPUTE: embedding, forward, loss, backward and the sums of gradients.

`engine.runtime.block_ops` describes what each op does. Every function for an op takes the same
arguments: the context of the plan, the op, and the step under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.errors import CacheError
from engine.model.skeleton import Capture
from engine.plan.buffers import EMBED, HEAD, Buffer, BufferKind
from engine.plan.ops import (
    Backward,
    Embed,
    EmbedBackward,
    Forward,
    Keeps,
    Loss,
    OfMicroBatch,
    OfSum,
    Recompute,
    Reduce,
)
from engine.plan.pieces import cut
from engine.planes.layout import UnitLayout
from engine.runtime.embed_rows import LookupWatch
from engine.runtime.loss import (
    LossChunks,
    LossTargets,
    TailGradients,
    chunked_loss,
    loss_without_gradients,
    scores,
)
from engine.runtime.op_context import OpContext
from engine.runtime.step import StepUnderWay

Gradients = Sequence[torch.Tensor | None]
"""The gradients of a unit's parameters are in layout order. The gradient of an unused parameter is
None.
"""


# ---------------------------------------------------------------- embedding


def _seed(context: OpContext, op: OfMicroBatch, step: StepUnderWay) -> None:
    """Seeds dropout from the run, the step, the unit and the micro-batch, so that a recompute or a
    resumed run draws the same numbers.

    The generator is global to the process. A pass without dropout does not touch it, since another
    engine may be training at the same time.
    """
    if not step.inputs.training:
        return
    position = context.positions[op.unit]
    place = (step.inputs.seed, step.inputs.number, position, op.micro_batch)
    # The hash of a tuple of integers is the same in every process.
    context.backend.seed(hash(place) & 0x7FFFFFFF)


def _capture(context: OpContext, op: Embed | EmbedBackward, step: StepUnderWay) -> Capture:
    """Runs the model's own forward up to its first block. Raises CacheError where the model gives
    its blocks no cache or more than one.
    """
    _seed(context, op, step)
    skeleton = context.model.skeleton
    batch = step.inputs.batches[op.micro_batch]
    if step.inputs.caches is None:
        return skeleton.capture(batch.input_ids, batch.position_ids, documents=batch.documents)
    captured = skeleton.capture(
        batch.input_ids, batch.position_ids, True, step.inputs.caches[op.micro_batch]
    )
    caches = skeleton.caches(captured)
    if len(caches) != 1:
        raise CacheError(
            f"{context.model.config.model_type} gives its blocks {len(caches)} caches, not one."
        )
    step.inputs.caches[op.micro_batch] = caches[0]
    return captured


def embed(context: OpContext, op: Embed, step: StepUnderWay) -> None:
    """Captures the first hidden state and the arguments of every block."""
    with torch.no_grad():
        captured = _capture(context, op, step)
    step.hidden[op.micro_batch] = captured.hidden
    step.shapes[op.micro_batch] = captured.hidden.shape
    step.arguments[op.micro_batch] = captured.arguments


def embed_backward(context: OpContext, op: EmbedBackward, step: StepUnderWay) -> None:
    """Repeats the capture pass with gradients on, and adds the gradients of the embedding to their
    sum.
    """
    if op.piece is not None:
        _rows_backward(context, op, step, op.piece)
        return
    unit = context.units[EMBED]
    with torch.enable_grad():
        captured = _capture(context, op, step)
    gradients = torch.autograd.grad(
        captured.hidden,
        context.state.outer_parameters[EMBED],
        step.hidden.pop(op.micro_batch),
        allow_unused=True,
    )
    del step.arguments[op.micro_batch]  # the masks and rotary tables are no longer needed
    _add_to_sum(unit.layout, _sum_of(context, EMBED, op, EMBED), gradients, op.first)


def _rows_backward(
    context: OpContext, op: EmbedBackward, step: StepUnderWay, piece: tuple[int, int]
) -> None:
    """Adds the gradients of some rows of the table to their sum, which is theirs alone."""
    (table,) = context.state.outer_parameters[EMBED]
    if op.captures:
        with torch.enable_grad(), LookupWatch(table) as watch:
            captured = _capture(context, op, step)
        step.lookups[op.micro_batch], vectors = watch.only()
        (step.hidden[op.micro_batch],) = torch.autograd.grad(
            captured.hidden, [vectors], step.hidden[op.micro_batch]
        )
        del step.arguments[op.micro_batch]  # the masks and rotary tables are no longer needed
    start, stop = piece
    rows, width = table.shape
    first = start // width
    count = min(rows, -(-stop // width)) - first
    gradient = step.lookups[op.micro_batch].rows_gradient(step.hidden[op.micro_batch], first, count)
    total = context.state.grads[op.grad][: stop - start]
    filled = total[: count * width].view(count, width)
    if op.first:
        filled.copy_(gradient)
        total[count * width :].zero_()  # the last piece may end with elements that align the unit
    else:
        filled.add_(gradient)
    if stop == context.units[EMBED].layout.numel:
        del step.hidden[op.micro_batch], step.lookups[op.micro_batch]


# ---------------------------------------------------------------- blocks


def _run(
    context: OpContext,
    op: Forward | Recompute | Backward,
    step: StepUnderWay,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Returns the output of the op's block on `hidden`, both [rows, tokens, width]."""
    _seed(context, op, step)
    unit = context.units[op.unit]
    arguments = step.arguments[op.micro_batch][context.block_positions[op.unit]]
    block: Callable[..., Any] = context.state.template(op.slot, unit)
    if context.plan.compiled and step.inputs.training:
        block = context.state.compiled[op.slot, unit.kind]
    elif context.plan.compiled:
        block = context.state.compiled_alone(op.slot, unit)
    gave_up = getattr(block, "problem", "")
    out = arguments.call(block, hidden)
    if getattr(block, "problem", "") != gave_up:
        # The block may have drawn random numbers before it could not be compiled further. A
        # recompute draws from the seed.
        _seed(context, op, step)
        out = arguments.call(block, hidden)
    return out


def forward(context: OpContext, op: Forward, step: StepUnderWay) -> None:
    """Runs a block, and keeps its activations or its boundary for the backward."""
    hidden = step.hidden[op.micro_batch]
    kept = op.keeps == Keeps.ACTIVATIONS
    if not (step.inputs.training and (kept or context.plan.compiled)):
        _keep_boundary(context, op, step, hidden)
        with torch.no_grad():
            step.hidden[op.micro_batch] = _run(context, op, step, hidden)
        return
    # A compiled block that will be recomputed also runs with gradients, and the tensors that
    # autograd keeps are freed at once. Without gradients the block would be compiled differently,
    # and its results would differ in their last bits.
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        out = _run(context, op, step, leaf)
    if kept:
        step.saved[op.unit, op.micro_batch] = (leaf, out)
    else:
        _keep_boundary(context, op, step, hidden)
    step.hidden[op.micro_batch] = out.detach()


def _keep_boundary(
    context: OpContext, op: Forward, step: StepUnderWay, hidden: torch.Tensor
) -> None:
    """Keeps the block's input for its recompute: as a copy in a ring buffer that is sent to the
    host, or as the tensor itself.
    """
    if op.ring is not None:
        context.state.rings[op.ring][: hidden.numel()].copy_(hidden.reshape(-1))
    elif op.keeps == Keeps.BOUNDARY:
        step.saved[op.unit, op.micro_batch] = (hidden,)


def recompute(context: OpContext, op: Recompute, step: StepUnderWay) -> None:
    """Runs a block again on its boundary, and keeps its activations. Its output is kept as the
    boundary of the next block.
    """
    leaf = _boundary(context, op, step).detach().requires_grad_()
    with torch.enable_grad():
        out = _run(context, op, step, leaf)
    step.saved[op.unit, op.micro_batch] = (leaf, out)
    step.saved[op.following, op.micro_batch] = (out.detach(),)


def backward(context: OpContext, op: Backward, step: StepUnderWay) -> None:
    """Recomputes the block where its activations were not kept, runs its backward, and adds the
    gradients of its parameters to their sum.
    """
    unit = context.units[op.unit]
    if not op.recomputes:
        leaf, out = step.saved.pop((op.unit, op.micro_batch))
    else:
        leaf = _boundary(context, op, step).detach().requires_grad_()
        with torch.enable_grad():
            out = _run(context, op, step, leaf)
    try:
        hidden_gradient, *gradients = _block_gradients(context, op, step, (leaf, out))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not context.plan.compiled:
            raise
        # If compiling backward failed, the block runs uncompiled from now on. An error with another
        # cause is raised again.
        context.state.compiled[op.slot, unit.kind].give_up(error)
        with torch.enable_grad():
            out = _run(context, op, step, leaf)
        hidden_gradient, *gradients = _block_gradients(context, op, step, (leaf, out))
    step.hidden[op.micro_batch] = hidden_gradient
    _add_to_sum(unit.layout, _sum_of(context, op.unit, op, op.unit), gradients, op.first)


def _boundary(context: OpContext, op: Backward | Recompute, step: StepUnderWay) -> torch.Tensor:
    """Returns the input [rows, tokens, width] that the block had in forward."""
    if op.ring is not None:
        shape = step.shapes[op.micro_batch]
        return context.state.rings[op.ring][: shape.numel()].view(shape)
    (boundary,) = step.saved.pop((op.unit, op.micro_batch))
    return boundary


def _block_gradients(
    context: OpContext,
    op: Backward,
    step: StepUnderWay,
    ends: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of a block's input and of its parameters. `ends` holds the block's
    input and output.
    """
    leaf, out = ends
    parameters = context.state.parameters(op.slot, context.units[op.unit])
    return torch.autograd.grad(
        out, [leaf, *parameters], step.hidden[op.micro_batch], allow_unused=True
    )


# ---------------------------------------------------------------- loss


def loss(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Computes the loss and, in training, its gradients; for sampling, the logits alone."""
    if step.inputs.logits_at is not None:
        _logits(context, op, step, step.inputs.logits_at[op.micro_batch])
    elif step.inputs.scored:
        _scores(context, op, step)
    elif step.inputs.training:
        _loss_with_gradients(context, op, step)
    else:
        _loss_alone(context, op, step)


def _loss_alone(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Computes the loss of a micro-batch of a pass without gradients."""
    hidden = step.hidden.pop(op.micro_batch)
    del step.arguments[op.micro_batch]  # the next group of micro-batches needs the memory
    total, each = loss_without_gradients(
        context.model.skeleton, hidden, _targets(op, step), _chunks(context)
    )
    step.losses[op.micro_batch] = total
    step.position_losses[op.micro_batch] = each


def _scores(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Computes the cross-entropy of each label, and whether it is the likeliest token."""
    hidden = step.hidden.pop(op.micro_batch)
    del step.arguments[op.micro_batch]
    step.position_losses[op.micro_batch], step.likeliest[op.micro_batch] = scores(
        context.model.skeleton, hidden, _targets(op, step), context.loss_chunk
    )


def _targets(op: Loss, step: StepUnderWay) -> LossTargets:
    batch = step.inputs.batches[op.micro_batch]
    return LossTargets(batch.loss_index, batch.labels, step.inputs.loss_scale)


def _chunks(context: OpContext) -> LossChunks:
    return LossChunks(context.loss_chunk, context.plan.compiled)


def _loss_with_gradients(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Adds the loss of a micro-batch to that of the step, and the gradients of the tail to their
    sums.
    """
    outer = context.state.outer_parameters
    owners = [HEAD, EMBED] if context.model.tied else [HEAD]
    if op.first and step.inputs.training:  # a pass without gradients may have no sums
        for owner in owners:
            _sum_of(context, owner, op, HEAD).zero_()
    if op.micro_batch == 0:
        context.state.norms[-1].zero_()

    def accumulate(gradients: Gradients) -> None:
        start = 0
        for owner in owners:
            stop = start + len(outer[owner])
            _add(
                context.units[owner].layout,
                _sum_of(context, owner, op, HEAD),
                gradients[start:stop],
            )
            start = stop

    tail = TailGradients([p for owner in owners for p in outer[owner]], accumulate)
    total, gradient = chunked_loss(
        context.model.skeleton,
        step.hidden[op.micro_batch],
        _targets(op, step),
        _chunks(context),
        tail,
    )
    assert gradient is not None  # with `tail`, there always is one
    context.state.norms[-1] += total
    step.hidden[op.micro_batch] = gradient


def _logits(context: OpContext, op: Loss, step: StepUnderWay, at: torch.Tensor) -> None:
    """Computes the logits at the flat positions `at`, int64 [n]."""
    hidden = step.hidden.pop(op.micro_batch)
    del step.arguments[op.micro_batch]
    states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, at)
    with torch.no_grad():
        step.logits[op.micro_batch] = context.model.skeleton.logits(states).float()


# ---------------------------------------------------------------- sums of gradients


def _sum_of(context: OpContext, owner: str, op: OfSum, unit: str) -> torch.Tensor:
    """Returns the part [numel] of an fp32 gradient buffer that the owner uses. The loss op of a
    tied model also adds to the buffer of the embed unit.
    """
    buffer = op.grad if owner == unit else Buffer(BufferKind.SUM, owner)
    return context.state.grads[buffer][: context.units[owner].layout.numel]


def _add_to_sum(
    layout: UnitLayout, buffer: torch.Tensor, gradients: Gradients, first: bool
) -> None:
    """Adds to the sum in `buffer` [numel]. The first gradients start the sum: where they fill the
    whole plane they are copied, which saves zeroing it.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    fills_plane = len(present) == len(gradients) and layout.numel == layout.parameter_count
    if first and fills_plane:
        for spec, offset, gradient in zip(layout.parameters, layout.offsets, present):
            buffer[offset : offset + spec.numel].view(spec.shape).copy_(gradient)
        return
    if first:
        buffer.zero_()
    _add(layout, buffer, gradients)


def _add(layout: UnitLayout, buffer: torch.Tensor, gradients: Gradients) -> None:
    """Adds each gradient to its place in the fp32 sum. Torch upcasts a bf16 gradient first."""
    for spec, offset, gradient in zip(layout.parameters, layout.offsets, gradients):
        if gradient is not None:
            buffer[offset : offset + spec.numel].view(spec.shape).add_(gradient)


def _add_squares(context: OpContext, unit: str, grad: torch.Tensor, start: int) -> None:
    """Adds the squared norm of `grad` [n] to that of the unit, in which `grad` begins at `start`.

    The norm of embed is that of its pieces in every plan: as a whole it would be rounded otherwise,
    and so would the clip factor.
    """
    norm = context.state.norms[context.positions[unit]]
    size = context.plan.embed_piece if unit == EMBED else 0
    # The head of some tied models has no parameters, but a norm.
    for begin, end in cut(len(grad), size) if size else [(0, len(grad))]:
        square = torch.linalg.vector_norm(grad[begin:end]).square()
        if start + begin == 0:
            norm.copy_(square)
        else:
            norm.add_(square)


def reduce(context: OpContext, op: Reduce, _step: StepUnderWay) -> None:
    """Rounds a unit's fp32 sum to the staging buffer, once a round. Torch's `copy_` rounds ties to
    even. In the last round the op also computes the norm of the whole gradient.
    """
    start, stop = op.piece or (0, context.units[op.unit].layout.numel)
    grad = context.state.grads[op.grad][: stop - start]
    staging = context.state.stagings[op.staging][start:stop]
    if op.adds:
        grad.add_(staging)
    if op.last:
        _add_squares(context, op.unit, grad, start)
    # A staging buffer may be in the memory of the sum, so the sum is rounded elsewhere first.
    in_sum = op.unit in context.plan.rounded_in_sums
    staging.copy_(grad.to(staging.dtype) if in_sum else grad)
