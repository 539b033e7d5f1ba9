"""The ops of a plan are implemented here, in `engine.runtime.step.compute_ops` and in
`engine.runtime.step.optimizer_ops`, as work on tensors. Each kind of op does one thing.

Copies between host and device (lanes H2D and D2H):

- `prefetch` copies the plane weight_high of a unit to its slot, and completes the weights that
  stay in fp32 (`engine.runtime.step.device_state`).
- `offload_block_input` and `fetch_block_input` copy a block's input to the host and back, and with
  it what attention returned, where that is kept.
- `offload` copies a rounded gradient from its staging buffer to the plane grad. Where the sum over
  rounds is kept on the host, `fetch_grad` copies the gradient back.
- `offload_kept_gradient` (lane GRADIENTS OUT) copies a gradient that has waited on the device to a
  ring buffer on the host.

COMPUTE (those of blocks are in `engine.runtime.step.activation_checkpointing`, `reduce` is in
`engine.runtime.step.main_grad`):

- `embed` runs the model's own code up to its first block, and captures the first hidden state and
  the arguments of every block.
- `forward` runs a block on the weights in its slot. It keeps the block's activations, or the
  block's input for a recompute.
- `recompute` runs a block again and keeps its activations, where only every second block keeps its
  input.
- `loss` runs final norm, head and cross-entropy in chunks, with their backward in training.
- `backward` recomputes the block if needed, runs its backward, and adds the gradients of its
  parameters to an fp32 accumulator. Where ranks exchange a gradient in bf16, it takes the place of
  the accumulator. `embed_backward` does the same for the embedding.
- `reduce` rounds an fp32 accumulator to a staging buffer, and computes its norm in the last round.
- `summary` computes the clip factor on the device, and copies loss and norms to the host.
- `update_in_place` applies the step to a unit that lives on the device, where its planes are.

Between ranks (lane COLLECTIVE, `engine.runtime.step.collective_ops`): `all_gather`, `barrier`,
`reduce_scatter` and `all_reduce`.

Optimizers on the device (lanes STATES IN, UPDATE and STATES OUT) work on chunks of a unit's planes:

- `fetch_states` and `fetch_gradient` bring a chunk to an update buffer.
- `device_update` applies the step there, and refreshes the weights of a slot that still holds them.
- `offload_weights` and `offload_states` copy the updated planes back.

HOST:

- `clip` reads loss and norms, stops the run where one is not finite, and computes the clip factor.
- `update` applies the step to the planes of a unit, or to a chunk of them.
- `optimizer_step` does no work: by its waits, it finishes once all chunks of a step are on the
  host.

READ and WRITE: `read_states` and `write_states` move moments between the disk and ring buffers on
the host, in which `update` changes them. `write_block_input` and `read_block_input` take a block's
input to the disk and back, through ring buffers of their own.

The executor has the backend run the function of `WORK` for each op on the op's lane. Copies are
submitted without waiting (`non_blocking`). Every op that reads their target waits for them by the
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from engine.errors import NonFiniteError
from engine.planning.schedule.offloaded_activations import ReadBlockInput, WriteBlockInput
from engine.planning.schedule.ops import (
    Clip,
    FetchBlockInput,
    FetchGrad,
    Offload,
    OffloadBlockInput,
    OffloadKeptGradient,
    OpKind,
    OptimizerStep,
    Prefetch,
    Summary,
    Update,
    UpdateMoments,
)
from engine.runtime.host.host_optimizer import GradientChunk, HostStep
from engine.runtime.optimizer.device_adamw import clip_of
from engine.runtime.step import (
    activation_checkpointing,
    collective_ops,
    compute_ops,
    main_grad,
    optimizer_ops,
)
from engine.runtime.step.context import OpContext
from engine.runtime.step.step import StepResult, StepUnderWay

Work = Callable[[OpContext, Any, StepUnderWay], None]
"""Type of a function that runs one op of a step."""


# ---------------------------------------------------------------- H2D and D2H


def _prefetch(context: OpContext, op: Prefetch, _step: StepUnderWay) -> None:
    layout, shards = context.units[op.unit].layout, context.plan.shards
    is_whole = op.whole or shards.ranks == 1
    start, stop = (0, layout.high_numel) if is_whole else context.shard(op.unit)
    plane = context.host_states.tensor(op.unit, "weight_high")
    # `data` has its own version counter, so autograd does not notice this write. Kept blocks have
    # saved views of this slot. By their backward, the slot holds the same weights again, which the
    # contents in the plan prove.
    slot = context.state.slots[op.slot].data
    slot[start:stop].copy_(plane[start:stop], non_blocking=True)
    if not is_whole and layout.high_numel > layout.numel:
        first, last = shards.frozen_bounds(layout.numel, layout.high_numel)
        slot[first:last].copy_(plane[first:last], non_blocking=True)
    for part in layout.fp32_within(start, stop):
        low = context.host_states.tensor(op.unit, "weight_low")
        context.state.keep_in_fp32[op.slot].fetch(part, slot, low)


def _offload_block_input(context: OpContext, op: OffloadBlockInput, step: StepUnderWay) -> None:
    numel = context.kept_numel(op.unit, step.micro_batches[op.micro_batch].shape)
    context.saved_block_inputs.on_host(op)[:numel].copy_(
        context.state.rings[op.ring][:numel], non_blocking=True
    )


def _fetch_block_input(context: OpContext, op: FetchBlockInput, step: StepUnderWay) -> None:
    numel = context.kept_numel(op.unit, step.micro_batches[op.micro_batch].shape)
    host = context.saved_block_inputs.on_host(op)
    context.state.rings[op.ring][:numel].copy_(host[:numel], non_blocking=True)


def _fetch_grad(context: OpContext, op: FetchGrad, _step: StepUnderWay) -> None:
    plane = context.host_states.tensor(op.unit, "grad")
    context.state.stagings[op.staging][: plane.numel()].copy_(plane, non_blocking=True)


def _offload(context: OpContext, op: Offload, _step: StepUnderWay) -> None:
    start, stop = context.shard(op.unit)
    plane = context.host_states.tensor(op.unit, "grad")[start:stop]
    plane.copy_(context.state.stagings[op.staging][: plane.numel()], non_blocking=True)


def _offload_kept_gradients(
    context: OpContext, op: OffloadKeptGradient, _step: StepUnderWay
) -> None:
    (start, stop), first = op.chunk, context.shard(op.unit)[0]
    gradient = context.state.stagings[op.staging][start - first : stop - first]
    context.backend.copy_in_chunks(context.gradient_rings[op.ring][: stop - start], gradient)


# ---------------------------------------------------------------- COMPUTE


def _summary(context: OpContext, _op: Summary, step: StepUnderWay) -> None:
    if step.graphs is not None:
        step.graphs.finish()
    clip, state = context.state.clip, context.state
    norms = state.totals if context.plan.is_shared else state.norms
    clip.copy_(clip_of(norms, step.inputs.max_grad_norm, clip))
    # The target is pinned memory, so the launching thread does not wait. `clip` waits for this op.
    context.summary.norms.copy_(norms, non_blocking=True)
    context.summary.clip_factor.copy_(clip[:1], non_blocking=True)
    sums = step.sequence_sums_in_order()
    if sums is not None:
        context.summary.sequence_sums(len(sums)).copy_(sums, non_blocking=True)


# ---------------------------------------------------------------- HOST


def _applied(_context: OpContext, _op: OptimizerStep, _step: StepUnderWay) -> None:
    """Does nothing: all ops that it waits for have finished."""


def _clip(context: OpContext, _op: Clip, step: StepUnderWay) -> None:
    *squares, loss = context.summary.norms.tolist()
    grad_norm = math.nan
    if all(math.isfinite(square) for square in squares):
        grad_norm = math.sqrt(math.fsum(squares))
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise NonFiniteError(
                f"The {what} of step {step.inputs.number} is not a finite number, so that step was "
                "not applied. If its rows are bad, resume with train.nonfinite=skip; if they are "
                "not, start a new run with a lower train.learning_rate.",
                step.inputs.number,
                what,
            )
    # The factor is the device's, so that every unit gets the same, wherever it is updated.
    factor = context.summary.clip_factor.item()
    unit_norms = [math.sqrt(square) for square in squares]
    sequences = step.inputs.sequences
    sums = context.summary.sequence_sums(sequences).tolist() if sequences else []
    step.result = StepResult(loss, grad_norm, unit_norms, factor, sums)


def _update(context: OpContext, op: Update, step: StepUnderWay) -> None:
    optimizer = context.optimizer
    assert optimizer is not None  # an engine without an optimizer has no plan with updates
    context.host_states.held.begin(step.inputs.number, op.unit)
    # With moments after weights, the first pass computes the new weights from the old moments and
    # the gradient and stores the weights alone, so the prefetch of the next step waits for less.
    # The second pass (`_update_moments`) needs the same gradient and the same old moments: the
    # gradient plane is never scaled in place, and the plan lets no later op write it before then.
    # With the next step's gradient in it, moments would miss this step and count the next twice.
    update = optimizer.update_weights if op.after_weights else optimizer.update
    update(op.unit, _host_step(context, step), _chunk(context, op))


def _update_moments(context: OpContext, op: UpdateMoments, step: StepUnderWay) -> None:
    optimizer = context.optimizer
    assert optimizer is not None  # the weights are updated
    chunk = None
    if op.chunk is not None:
        chunk = _chunk_of_plane(context, op.unit, op.chunk)
    optimizer.update_moments(op.unit, _host_step(context, step), chunk)


def _host_step(context: OpContext, step: StepUnderWay) -> HostStep:
    assert step.result is not None  # every update waits for `clip`
    number = context.host_states.held.update_number(step.inputs.number)
    return HostStep(number, step.inputs.learning_rate, step.result.clip_factor)


def _chunk_of_plane(context: OpContext, unit: str, chunk: tuple[int, int]) -> GradientChunk:
    """Returns a chunk of a unit whose gradient is in its plane."""
    start, stop = chunk
    return GradientChunk(start, context.host_states.array(unit, "grad")[start:stop])


def _chunk(context: OpContext, op: Update) -> GradientChunk | None:
    """Returns the chunk that an update is of, or None if it is of a whole unit."""
    if op.chunk is None:
        return None
    start, stop = op.chunk
    if op.ring is None:
        gradient = _chunk_of_plane(context, op.unit, op.chunk).grad
    else:
        ring = context.gradient_rings[op.ring][: stop - start]
        # Numpy has no bf16, so the kernels read its bits as uint16.
        is_bf16 = ring.dtype == torch.bfloat16
        gradient = ring.view(torch.uint16).numpy() if is_bf16 else ring.numpy()
    if op.states is None:
        return GradientChunk(start, gradient)
    ring_of_states = context.state_rings[op.states]
    states = context.host_states.placement.disk.states_in(op.unit, start, ring_of_states)
    return GradientChunk(start, gradient, states)


# ---------------------------------------------------------------------- READ and WRITE


def _write_block_input(context: OpContext, op: WriteBlockInput, step: StepUnderWay) -> None:
    context.saved_block_inputs.write(
        op, context.block_input_numel(step.micro_batches[op.micro_batch].shape)
    )


def _read_block_input(context: OpContext, op: ReadBlockInput, step: StepUnderWay) -> None:
    context.saved_block_inputs.read(
        op, context.block_input_numel(step.micro_batches[op.micro_batch].shape)
    )


WORK: dict[OpKind, Work] = {
    OpKind.PREFETCH: _prefetch,
    OpKind.OFFLOAD_BLOCK_INPUT: _offload_block_input,
    OpKind.FETCH_BLOCK_INPUT: _fetch_block_input,
    OpKind.WRITE_BLOCK_INPUT: _write_block_input,
    OpKind.READ_BLOCK_INPUT: _read_block_input,
    OpKind.FETCH_GRAD: _fetch_grad,
    OpKind.OFFLOAD: _offload,
    OpKind.OFFLOAD_KEPT_GRADIENT: _offload_kept_gradients,
    OpKind.EMBED: compute_ops.embed,
    OpKind.FORWARD: activation_checkpointing.forward,
    OpKind.RECOMPUTE: activation_checkpointing.recompute,
    OpKind.LOSS: compute_ops.loss,
    OpKind.BACKWARD: activation_checkpointing.backward,
    OpKind.EMBED_BACKWARD: compute_ops.embed_backward,
    OpKind.REDUCE: main_grad.reduce,
    OpKind.ALL_GATHER: collective_ops.all_gather,
    OpKind.BARRIER: collective_ops.barrier,
    OpKind.REDUCE_SCATTER: collective_ops.reduce_scatter,
    OpKind.ALL_REDUCE: collective_ops.all_reduce,
    OpKind.SUMMARY: _summary,
    OpKind.UPDATE_IN_PLACE: optimizer_ops.update_in_place,
    OpKind.FETCH_STATES: optimizer_ops.fetch_states,
    OpKind.FETCH_GRADIENT: optimizer_ops.fetch_gradient,
    OpKind.DEVICE_UPDATE: optimizer_ops.device_update,
    OpKind.OFFLOAD_WEIGHTS: optimizer_ops.offload_weights,
    OpKind.OFFLOAD_STATES: optimizer_ops.offload_states,
    OpKind.READ_STATES: optimizer_ops.read_states,
    OpKind.WRITE_STATES: optimizer_ops.write_states,
    OpKind.OPTIMIZER_STEP: _applied,
    OpKind.CLIP: _clip,
    OpKind.UPDATE: _update,
    OpKind.UPDATE_MOMENTS: _update_moments,
}
"""Function that runs each kind of op."""
