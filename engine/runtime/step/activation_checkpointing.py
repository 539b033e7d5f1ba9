"""Activation checkpointing: the ops of COMPUTE that run a block forward, recompute its activations
from the saved input, and run it backward.

`engine.runtime.step.copy_ops` describes what each op does. Where the step has recordings
(`engine.runtime.device`), what was recorded of an op is launched in its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from engine.model.blocks.saved_attention import ReplaysAttention, SavesAttention
from engine.planning.schedule.ops import Backward, Forward, Keeps, OfMicroBatch, Recompute
from engine.runtime.step.context import OpContext
from engine.runtime.step.main_grad import (
    Gradients,
    add_shared,
    add_to_main_grad,
    as_gradient,
    main_grad,
)
from engine.runtime.step.step import StepUnderWay

BlockOp = TypeVar("BlockOp", Forward, Recompute, Backward)


def seed(context: OpContext, op: OfMicroBatch, step: StepUnderWay) -> None:
    """Gives dropout a seed of the run, the step, the unit and the micro-batch, so that a recompute
    or a resumed run draws the same numbers.

    The generator is global to the process. A pass without dropout does not touch it, since another
    engine may be training at the same time.
    """
    if not step.inputs.training or (step.graphs is not None and step.graphs.is_recording):
        return  # nothing that draws numbers is recorded
    position = context.positions[op.unit]
    micro_batch = step.inputs.first + op.micro_batch
    place = (step.inputs.seed, step.inputs.number, position, micro_batch)
    # The hash of a tuple of integers is the same in every process.
    context.backend.seed(hash(place) & 0x7FFFFFFF)


def _run(
    context: OpContext,
    op: Forward | Recompute | Backward,
    step: StepUnderWay,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Returns the output of the op's block on `hidden`, both [rows, tokens, width]."""
    seed(context, op, step)
    unit = context.units[op.unit]
    micro_batch, position = step.micro_batches[op.micro_batch], context.block_positions[op.unit]
    arguments = micro_batch.arguments[position]
    block: Callable[..., Any] = context.templates.template(op.slot, unit)
    if context.templates.balance is not None:
        context.templates.balance.enter(op.unit, micro_batch.balanced, isinstance(op, Forward))
    if context.plan.compiles_blocks and step.inputs.training:
        block = context.templates.compiled[op.slot, unit.kind]
    elif context.plan.compiles_blocks:
        block = context.templates.compiled_alone(op.slot, unit)
    call: Callable[[Any, torch.Tensor], torch.Tensor] = arguments.call
    if micro_batch.cross_layer_values is not None:
        call = partial(micro_batch.cross_layer_values.run, position, arguments)
    gave_up = getattr(block, "problem", "")
    out = call(block, hidden)
    if getattr(block, "problem", "") != gave_up:
        # The block may have drawn random numbers before it could not be compiled further. A
        # recompute draws from the seed.
        seed(context, op, step)
        out = call(block, hidden)
    return out


def forward(context: OpContext, op: Forward, step: StepUnderWay) -> None:
    """Runs a block, and keeps its activations or its input for the backward."""
    _run_or_replay(_forward, context, op, step)


def _run_or_replay(
    run: Callable[[OpContext, BlockOp, StepUnderWay], None],
    context: OpContext,
    op: BlockOp,
    step: StepUnderWay,
) -> None:
    """Runs an op of a block, or launches what was recorded of it."""
    if step.graphs is None:
        run(context, op, step)
        return
    step.graphs.run(op, step, lambda: run(context, op, step), lambda: _renew(context, op, step))


def _renew(context: OpContext, op: Forward | Recompute | Backward, step: StepUnderWay) -> None:
    """Computes the activations of a block again, for a backward that has used them up."""
    saved = step.micro_batches[op.micro_batch].saved
    kept = saved.get(op.unit)
    if not isinstance(op, Backward) or op.recomputes or kept is None:
        return
    leaf = _leaf(context, op, kept[0])
    with torch.enable_grad():
        out = _run(context, op, step, leaf)
    saved[op.unit] = (leaf, out)


def _forward(context: OpContext, op: Forward, step: StepUnderWay) -> None:
    micro_batch = step.micro_batches[op.micro_batch]
    hidden = micro_batch.hidden
    kept = op.keeps == Keeps.ACTIVATIONS
    goes_back = step.inputs.training and op.unit not in context.plan.forward_only
    if not (goes_back and (kept or context.plan.compiles_blocks)):
        _save_block_input(context, op, step, hidden)
        with torch.no_grad(), _keeping_attention(context, op, step):
            micro_batch.hidden = _run(context, op, step, hidden)
        return
    # A compiled block that will be recomputed also runs with gradients, and the tensors that
    # autograd keeps are freed at once. Without gradients the block would be compiled differently,
    # and its results would differ in their last bits.
    leaf = _leaf(context, op, hidden)
    with torch.enable_grad():
        out = _run(context, op, step, leaf)
    if kept:
        micro_batch.saved[op.unit] = (leaf, out)
    else:
        _save_block_input(context, op, step, hidden)
        if micro_batch.cross_layer_values is not None:
            micro_batch.cross_layer_values.forget_run(context.block_positions[op.unit])
    micro_batch.hidden = out.detach()


def _save_block_input(
    context: OpContext, op: Forward, step: StepUnderWay, hidden: torch.Tensor
) -> None:
    """Keeps the block's input for its recompute: as a copy in a ring buffer that is sent to the
    host, or as the tensor itself.
    """
    if op.ring is not None:
        # The ring holds the bits: a state may be in float32 beside weights in bfloat16.
        ring = context.state.rings[op.ring]
        bits = hidden.reshape(-1).view(ring.dtype)
        ring[: bits.numel()].copy_(bits)
        step.state_dtypes[op.unit] = hidden.dtype
    elif op.keeps == Keeps.BLOCK_INPUT:
        step.micro_batches[op.micro_batch].saved[op.unit] = (hidden,)


@contextlib.contextmanager
def _keeping_attention(context: OpContext, op: Forward, step: StepUnderWay) -> Iterator[None]:
    """Keeps what attention returns, behind the block's input, if the plan says so."""
    if op.ring is None or op.unit not in context.plan.with_attention:
        yield
        return
    ring, micro_batch = context.state.rings[op.ring], step.micro_batches[op.micro_batch]
    with SavesAttention(context.attention_room(op.unit, ring, micro_batch.shape)) as keeping:
        yield
    micro_batch.attention[op.unit] = keeping.calls


@contextlib.contextmanager
def _returning_attention(context: OpContext, op: Backward, step: StepUnderWay) -> Iterator[None]:
    """Returns what was kept of attention, while the block is recomputed."""
    micro_batch = step.micro_batches[op.micro_batch]
    calls = micro_batch.attention.pop(op.unit, None)
    if calls is None or op.ring is None:
        yield
        return
    ring = context.state.rings[op.ring]
    with ReplaysAttention(context.attention_room(op.unit, ring, micro_batch.shape), calls):
        yield


def recompute(context: OpContext, op: Recompute, step: StepUnderWay) -> None:
    """Runs a block again on its input, and keeps its activations. Its output is kept as the
    input of the next block.
    """
    _run_or_replay(_recompute, context, op, step)


def _recompute(context: OpContext, op: Recompute, step: StepUnderWay) -> None:
    leaf = _leaf(context, op, _block_input(context, op, step))
    with torch.enable_grad():
        out = _run(context, op, step, leaf)
    saved = step.micro_batches[op.micro_batch].saved
    saved[op.unit] = (leaf, out)
    saved[op.following] = (out.detach(),)


def backward(context: OpContext, op: Backward, step: StepUnderWay) -> None:
    """Recomputes the block where its activations were not kept, runs its backward, and adds the
    gradients of its parameters to their sum.
    """
    _run_or_replay(_backward, context, op, step)
    if op.unit == context.lowest:
        step.micro_batches[op.micro_batch].end_backward()


def _backward(context: OpContext, op: Backward, step: StepUnderWay) -> None:
    unit, micro_batch = context.units[op.unit], step.micro_batches[op.micro_batch]
    if not op.recomputes:
        leaf, out = micro_batch.saved.pop(op.unit)
    else:
        leaf = _leaf(context, op, _block_input(context, op, step))
        with torch.enable_grad(), _returning_attention(context, op, step):
            out = _run(context, op, step, leaf)
    try:
        hidden_gradient, gradients = _block_gradients(context, op, step, leaf, out)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        is_recording = step.graphs is not None and step.graphs.is_recording
        if is_recording or not context.plan.compiles_blocks:
            raise
        # If compiling backward failed, the block runs uncompiled from now on. An error with another
        # cause is raised again.
        context.templates.compiled[op.slot, unit.kind].abort(error)
        with torch.enable_grad():
            out = _run(context, op, step, leaf)
        hidden_gradient, gradients = _block_gradients(context, op, step, leaf, out)
    if op.unit != context.lowest:
        assert hidden_gradient is not None  # the output of a block depends on its input
        micro_batch.hidden = hidden_gradient
    own = len(gradients) - len(unit.shared)
    if op.grad is not None:
        total = main_grad(context, op.unit, op, op.unit)
        if op.unit in context.plan.without_main_grad:
            total = as_gradient(total)
        add_to_main_grad(unit.layout, total, gradients[:own], op.first)
    if unit.shared:
        add_shared(context, unit, gradients[own:])


def _leaf(context: OpContext, op: BlockOp, hidden: torch.Tensor) -> torch.Tensor:
    """Returns a block's input `hidden`, in its shape, as the leaf of a graph. It has a gradient
    unless nothing below the block is trained.
    """
    return hidden.detach().requires_grad_(op.unit != context.lowest)


def _block_input(context: OpContext, op: Backward | Recompute, step: StepUnderWay) -> torch.Tensor:
    """Returns the input [rows, tokens, width] that the block had in forward."""
    micro_batch = step.micro_batches[op.micro_batch]
    if op.ring is not None:
        shape, ring = micro_batch.shape, context.state.rings[op.ring]
        dtype = step.state_dtypes[op.unit]
        return ring[: shape.numel() * dtype.itemsize // ring.itemsize].view(dtype).view(shape)
    (block_input,) = micro_batch.saved.pop(op.unit)
    return block_input


def _block_gradients(
    context: OpContext,
    op: Backward,
    step: StepUnderWay,
    leaf: torch.Tensor,
    out: torch.Tensor,
) -> tuple[torch.Tensor | None, Gradients]:
    """Returns the gradients of a block's input, None where nothing below the block is trained, and
    of its parameters that are trained, with those that it shares at the end. leaf, out: the block's
    input and output.
    """
    parameters = context.templates.parameters(op.slot, context.units[op.unit])
    micro_batch, place = step.micro_batches[op.micro_batch], context.block_positions[op.unit]
    cross_layer_values = micro_batch.cross_layer_values
    taken: list[torch.Tensor] = []
    outputs, output_gradients = [out], [micro_batch.hidden]
    if cross_layer_values is not None:
        taken = cross_layer_values.leaves(place)
        given, given_gradients = cross_layer_values.outputs(place)
        outputs, output_gradients = outputs + given, output_gradients + given_gradients
    found: list[torch.Tensor | None] = [None] * (1 + len(parameters) + len(taken))
    inputs = [leaf, *parameters, *taken]
    wanted = [number for number, each in enumerate(inputs) if each.requires_grad]
    # Without the gradient of a leaf, no parameter that is trained may take part.
    if wanted and out.requires_grad:
        gradients = torch.autograd.grad(
            outputs, [inputs[number] for number in wanted], output_gradients, allow_unused=True
        )
        for number, gradient in zip(wanted, gradients, strict=True):
            found[number] = gradient
    if cross_layer_values is not None:
        cross_layer_values.end_backward(place, found[1 + len(parameters) :])
    return found[0], found[1 : 1 + len(parameters)]
