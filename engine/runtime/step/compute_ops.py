"""These are the ops of COMPUTE around the blocks: the embedding and the loss, with their gradients.

`engine.runtime.step.copy_ops` describes what each op does. Every function for an op takes the same
arguments: the context of the plan, the op, and the step under way.
"""

from __future__ import annotations

import contextlib

import torch

from engine.errors import CacheError
from engine.model.blocks.cross_layer_values import CrossLayerValues
from engine.model.build.skeleton import Capture
from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.schedule.ops import Embed, EmbedBackward, Loss
from engine.runtime.step.activation_checkpointing import seed
from engine.runtime.step.context import OpContext
from engine.runtime.step.cross_entropy import (
    LossChunks,
    LossTargets,
    TailGradients,
    chunked_loss,
    loss_without_gradients,
    scores,
)
from engine.runtime.step.embedding_grad import LookupWatch
from engine.runtime.step.main_grad import Gradients, add, add_to_main_grad, main_grad
from engine.runtime.step.preference_head import loss_of_pairs
from engine.runtime.step.step import StepUnderWay

# ---------------------------------------------------------------- embedding


def _capture(context: OpContext, op: Embed | EmbedBackward, step: StepUnderWay) -> Capture:
    """Runs the model's own forward up to its first block. Raises CacheError where the model gives
    its blocks no cache or more than one.
    """
    seed(context, op, step)
    skeleton = context.model.skeleton
    batch = step.inputs.batches[op.micro_batch]
    if step.inputs.caches is None:
        noise: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if batch.noise is not None:
            noise = batch.noise.in_lookups_of(skeleton.model)
        with noise:
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
    if context.model.cross_layer_flow is not None:
        step.cross_layer_values[op.micro_batch] = CrossLayerValues(
            context.model.cross_layer_flow, context.lowest_block
        )
    if step.graphs is not None:
        step.graphs.enter(op.micro_batch, step)


def embed_backward(context: OpContext, op: EmbedBackward, step: StepUnderWay) -> None:
    """Repeats the capture pass with gradients on, and adds the gradients of the embedding to their
    sum.
    """
    if op.chunk is not None:
        _rows_backward(context, op, step, op.chunk)
        return
    unit = context.units[EMBED]
    with torch.enable_grad():
        captured = _capture(context, op, step)
    outputs, output_gradients = [captured.hidden], [step.hidden[op.micro_batch]]
    if op.micro_batch in step.cross_layer_values:
        taken, taken_gradients = step.cross_layer_values[op.micro_batch].of_embed(
            captured.arguments
        )
        outputs, output_gradients = outputs + taken, output_gradients + taken_gradients
    gradients = torch.autograd.grad(
        outputs, context.state.trained_embed_or_head(EMBED), output_gradients, allow_unused=True
    )
    step.end_backward(op.micro_batch)
    add_to_main_grad(unit.layout, main_grad(context, EMBED, op, EMBED), gradients, op.first)


def _rows_backward(
    context: OpContext, op: EmbedBackward, step: StepUnderWay, chunk: tuple[int, int]
) -> None:
    """Adds the gradients of some rows of the table to their sum, which is theirs alone."""
    (table,) = context.state.embed_and_head_parameters[EMBED]
    if op.captures:
        with torch.enable_grad(), LookupWatch(table) as watch:
            captured = _capture(context, op, step)
        step.lookups[op.micro_batch], vectors = watch.only()
        (step.hidden[op.micro_batch],) = torch.autograd.grad(
            captured.hidden, [vectors], step.hidden[op.micro_batch]
        )
        step.forget_arguments(op.micro_batch)
    start, stop = chunk
    rows, width = table.shape
    first = start // width
    count = min(rows, -(-stop // width)) - first
    gradient = step.lookups[op.micro_batch].rows_gradient(step.hidden[op.micro_batch], first, count)
    assert op.grad is not None  # embed has no backward unless it is trained
    total = context.state.grads[op.grad][: stop - start]
    filled = total[: count * width].view(count, width)
    if op.first:
        filled.copy_(gradient)
        total[count * width :].zero_()  # the last chunk may end with elements that align the unit
    else:
        filled.add_(gradient)
    if stop == context.units[EMBED].layout.numel:
        del step.hidden[op.micro_batch], step.lookups[op.micro_batch]


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
    hidden = step.end_forward(op.micro_batch)
    total, each = loss_without_gradients(
        context.model.skeleton, hidden, _targets(op, step), _chunks(context)
    )
    step.losses[op.micro_batch] = total
    step.position_losses[op.micro_batch] = each


def _scores(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Computes the cross-entropy of each label, and whether it is the likeliest token."""
    hidden = step.end_forward(op.micro_batch)
    step.position_losses[op.micro_batch], step.likeliest[op.micro_batch] = scores(
        context.model.skeleton, hidden, _targets(op, step), context.loss_chunk
    )


def _targets(op: Loss, step: StepUnderWay) -> LossTargets:
    batch = step.inputs.batches[op.micro_batch]
    inputs = step.inputs
    scale, smoothing = inputs.loss_scale, inputs.label_smoothing
    return LossTargets(batch.loss_index, batch.labels, scale, smoothing, batch.weights)


def _chunks(context: OpContext) -> LossChunks:
    return LossChunks(context.loss_chunk, context.plan.compiled)


def _loss_with_gradients(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Adds the loss of a micro-batch to that of the step, and the gradients of the tail to their
    accumulators.
    """
    owners = [HEAD, EMBED] if context.model.holds_embed else [HEAD]
    owners = [owner for owner in owners if owner not in context.plan.frozen]
    embed_and_head = {owner: context.state.trained_embed_or_head(owner) for owner in owners}
    if op.first and step.inputs.training:  # a pass without gradients may have no accumulators
        for owner in owners:
            main_grad(context, owner, op, HEAD).zero_()
    if op.micro_batch == 0:
        context.state.norms[-1].zero_()

    def accumulate(gradients: Gradients) -> None:
        start = 0
        for owner in owners:
            stop = start + len(embed_and_head[owner])
            add(
                context.units[owner].layout,
                main_grad(context, owner, op, HEAD),
                gradients[start:stop],
            )
            start = stop

    goes_back = context.lowest != HEAD
    tail = TailGradients(
        [p for owner in owners for p in embed_and_head[owner]], accumulate, goes_back
    )
    batch, hidden = step.inputs.batches[op.micro_batch], step.hidden[op.micro_batch]
    if batch.pairs is None:
        total, gradient = chunked_loss(
            context.model.skeleton, hidden, _targets(op, step), _chunks(context), tail
        )
    else:
        found = loss_of_pairs(context.model.skeleton, hidden, batch, _chunks(context), tail)
        total, gradient = found.loss, found.gradient
        step.keep_sequence_sums(op.micro_batch, found.sums)
    balance, tokens = context.state.balance, step.balanced(op.micro_batch)
    if balance is not None and tokens is not None:
        total = total + balance.loss(op.micro_batch, tokens)
    context.state.norms[-1] += total
    if gradient is None:
        step.end_backward(op.micro_batch)
    else:
        step.hidden[op.micro_batch] = gradient


def _logits(context: OpContext, op: Loss, step: StepUnderWay, at: torch.Tensor) -> None:
    """Computes the logits at the flat positions `at`, int64 [n]."""
    hidden = step.end_forward(op.micro_batch)
    states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, at)
    with torch.no_grad():
        step.logits[op.micro_batch] = context.model.skeleton.logits(states).float()
