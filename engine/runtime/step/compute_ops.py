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
        how_many = f"{len(caches)} caches, not one" if caches else "no cache"
        raise CacheError(f"Its blocks are given {how_many}.")
    step.inputs.caches[op.micro_batch] = caches[0]
    return captured


def embed(context: OpContext, op: Embed, step: StepUnderWay) -> None:
    """Captures the first hidden state and the arguments of every block."""
    with torch.no_grad():
        captured = _capture(context, op, step)
    micro_batch = step.micro_batches[op.micro_batch]
    micro_batch.hidden, micro_batch.shape = captured.hidden, captured.hidden.shape
    micro_batch.arguments = captured.arguments
    if context.model.cross_layer_flow is not None:
        micro_batch.cross_layer_values = CrossLayerValues(
            context.model.cross_layer_flow, context.lowest_block
        )
    if context.templates.balance is not None and step.inputs.training:
        batch, scale = step.inputs.batches[op.micro_batch], step.inputs.loss_scale
        micro_batch.balanced = context.templates.balance.tokens_of(batch, scale)
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
    micro_batch = step.micro_batches[op.micro_batch]
    outputs, output_gradients = [captured.hidden], [micro_batch.hidden]
    if micro_batch.cross_layer_values is not None:
        taken, taken_gradients = micro_batch.cross_layer_values.of_embed(captured.arguments)
        outputs, output_gradients = outputs + taken, output_gradients + taken_gradients
    gradients = torch.autograd.grad(
        outputs, context.templates.trained_embed_or_head(EMBED), output_gradients, allow_unused=True
    )
    micro_batch.end_backward()
    add_to_main_grad(unit.layout, main_grad(context, EMBED, op, EMBED), gradients, op.first)


def _rows_backward(
    context: OpContext, op: EmbedBackward, step: StepUnderWay, chunk: tuple[int, int]
) -> None:
    """Adds the gradients of some rows of the table to their sum, which is theirs alone."""
    (table,) = context.templates.embed_and_head_parameters[EMBED]
    micro_batch = step.micro_batches[op.micro_batch]
    if op.captures:
        with torch.enable_grad(), LookupWatch(table) as watch:
            captured = _capture(context, op, step)
        micro_batch.lookup, vectors = watch.only()
        (micro_batch.hidden,) = torch.autograd.grad(captured.hidden, [vectors], micro_batch.hidden)
        micro_batch.forget_arguments()
    start, stop = chunk
    rows, width = table.shape
    first = start // width
    count = min(rows, -(-stop // width)) - first
    gradient = micro_batch.lookup.rows_gradient(micro_batch.hidden, first, count)
    assert op.grad is not None  # embed has no backward unless it is trained
    total = context.state.grads[op.grad][: stop - start]
    filled = total[: count * width].view(count, width)
    if op.first:
        filled.copy_(gradient)
        total[count * width :].zero_()  # the last chunk may end with elements that align the unit
    else:
        filled.add_(gradient)
    if stop == context.units[EMBED].layout.numel:
        # The gradients of the vectors are as large as the hidden states.
        del micro_batch.hidden, micro_batch.lookup


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
    micro_batch = step.micro_batches[op.micro_batch]
    hidden = micro_batch.end_forward()
    micro_batch.loss, micro_batch.position_losses = loss_without_gradients(
        context.model.skeleton, hidden, _targets(op, step), _chunks(context)
    )


def _scores(context: OpContext, op: Loss, step: StepUnderWay) -> None:
    """Computes the cross-entropy of each label, and whether it is the likeliest token."""
    micro_batch = step.micro_batches[op.micro_batch]
    hidden = micro_batch.end_forward()
    micro_batch.position_losses, micro_batch.likeliest = scores(
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
    embed_and_head = {owner: context.templates.trained_embed_or_head(owner) for owner in owners}
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
    batch, micro_batch = step.inputs.batches[op.micro_batch], step.micro_batches[op.micro_batch]
    hidden = micro_batch.hidden
    if batch.pairs is None:
        total, gradient = chunked_loss(
            context.model.skeleton, hidden, _targets(op, step), _chunks(context), tail
        )
    else:
        found = loss_of_pairs(context.model.skeleton, hidden, batch, _chunks(context), tail)
        total, gradient = found.loss, found.gradient
        micro_batch.sequence_sums = found.sums
    balance, tokens = context.templates.balance, micro_batch.balanced
    if balance is not None and tokens is not None:
        total = total + balance.loss(tokens)
    context.state.norms[-1] += total
    if gradient is None:
        micro_batch.end_backward()
    else:
        micro_batch.hidden = gradient


def _logits(context: OpContext, op: Loss, step: StepUnderWay, at: torch.Tensor) -> None:
    """Computes the logits at the flat positions `at`, int64 [n]."""
    micro_batch = step.micro_batches[op.micro_batch]
    hidden = micro_batch.end_forward()
    states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, at)
    with torch.no_grad():
        micro_batch.logits = context.model.skeleton.logits(states).float()
