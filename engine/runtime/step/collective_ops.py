"""The ops between ranks are implemented here (lane COLLECTIVE).

- `all_gather` completes the weights in a slot, of which every rank of a node has brought its own
  shard.
- `barrier` waits until every rank of a node has updated its shard of a unit in RAM.
- `reduce_scatter` adds the fp32 accumulators of all ranks. Each rank of a node rounds its own shard
  and computes its norm. An accumulator of one term is a gradient in bf16, and is exchanged
  in bf16.
- `all_reduce` adds the losses and the squared norms, so that every rank finds the same clip factor,
  and gives every rank the sums of all answers of pairs.

All ranks run the same plan, and a lane runs its ops in plan order, so every rank calls the same
collectives in the same order. A collective has no name by which it could find its partner: with two
orders, ranks would add gradients of different units, or wait for each other forever.
"""

from __future__ import annotations

import torch

from engine.planning.layout.layout import UnitLayout
from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.ops import AllGather, AllReduce, Barrier, ReduceScatter
from engine.runtime.step.context import OpContext
from engine.runtime.step.main_grad import add_squares
from engine.runtime.step.step import StepUnderWay


def all_gather(context: OpContext, op: AllGather, _step: StepUnderWay) -> None:
    """Completes the weights of a unit in its slot. The frozen ones come first: the last shard of
    the others may reach beyond them, and then brings with it what is there on its rank.
    """
    layout, shards = context.units[op.unit].layout, context.plan.shards
    # `data` has its own version counter, so autograd does not notice this write, as in a prefetch.
    slot = context.state.slots[op.slot].data
    frozen = shards.padded(layout.high_numel - layout.numel)
    lives_there = (op.unit, op.slot) in context.plan.gpu_resident  # what is frozen stays complete
    if frozen and not lives_there:
        context.process_group.all_gather(slot[layout.numel : layout.numel + frozen])
    if layout.numel:
        context.process_group.all_gather(slot[: shards.padded(layout.numel)])
    if layout.fp32_parts:
        _gather_fp32(context, op.slot, layout)


def _gather_fp32(context: OpContext, slot: Buffer, layout: UnitLayout) -> None:
    """Completes the weights that stay in fp32. There are few of them, and none has to begin where a
    shard does: every rank adds what it has to zeros.
    """
    keep_in_fp32, high = context.state.keep_in_fp32[slot], context.state.slots[slot].data
    low = torch.zeros(keep_in_fp32.low.numel(), dtype=torch.int32, device=keep_in_fp32.low.device)
    for part in layout.fp32_within(*context.plan.shards.bounds(layout.numel)):
        here = slice(part.place, part.place + part.numel)
        low[here] = keep_in_fp32.low[here]
    keep_in_fp32.low.copy_(context.process_group.all_reduce(low))
    for part in layout.fp32_parts:
        here = slice(part.place, part.place + part.numel)
        keep_in_fp32.join(part, high[part.start : part.stop], keep_in_fp32.low[here])


def barrier(context: OpContext, _op: Barrier, _step: StepUnderWay) -> None:
    """Waits for the other ranks. Each gets here once its own update is in RAM."""
    context.process_group.all_reduce(context.state.one)


def reduce_scatter(context: OpContext, op: ReduceScatter, _step: StepUnderWay) -> None:
    """Adds the accumulators of all ranks, and the shard of this one to that of the earlier rounds,
    if any. After the last round it is rounded. Torch's `copy_` rounds ties to even.
    """
    start, stop = context.plan.shards.bounds(context.units[op.unit].layout.numel)
    shard = _sum_of_ranks(context, op)[: stop - start]
    if op.total is not None:
        kept = context.state.grads[op.total][: stop - start]
        if op.staging is None:
            kept.copy_(shard) if op.first else kept.add_(shard)
            return
        shard.add_(kept)
    assert op.staging is not None
    add_squares(context, op.unit, shard, 0)
    context.state.stagings[op.staging][: stop - start].copy_(shard)


def _sum_of_ranks(context: OpContext, op: ReduceScatter) -> torch.Tensor:
    """Returns this rank's shard [n] of the sum of all ranks, in fp32."""
    numel, shards = context.units[op.unit].layout.numel, context.plan.shards
    total = context.state.grads[op.grad][: shards.padded(numel)]
    if op.unit not in context.plan.without_main_grad:
        total[numel:].zero_()  # another unit may have left something beyond this one
        context.process_group.reduce_scatter(total)
        start, stop = shards.bounds(shards.padded(numel))
        return total[start:stop]
    # The gradient is in the first half of the memory. What the others send comes to the second.
    gradient, room = total.view(torch.bfloat16).chunk(2)
    gradient[numel:].zero_()
    shard = total[: total.numel() // shards.ranks]  # within the first half, which is sent by then
    context.process_group.add_gradients(gradient, room, shard)
    return shard


def all_reduce(context: OpContext, _op: AllReduce, step: StepUnderWay) -> None:
    """Adds the losses of all ranks, and the squared norms of those of a node: the shards of another
    host are the same. Each line of a pair has its sums on one rank, and zeros on all
    others, so adding these rounds nothing.
    """
    totals = context.process_group.all_reduce(context.state.norms)
    totals[-1:] = context.process_group.all_reduce_nodes(totals[-1:])
    context.state.totals.copy_(totals)
    sums = step.own_sequence_sums_among_all()
    if sums is not None:
        of_node = context.process_group.all_reduce(sums)
        step.sequence_sums_of_ranks = context.process_group.all_reduce_nodes(of_node)
