"""The ops of optimizers on the device are implemented here.

- `fetch_states` and `fetch_gradient` (STATES IN) bring a chunk of a unit's planes to an update
  buffer. `device_update` (UPDATE) applies the step there, and refreshes the weights of a slot that
  still holds them. `offload_weights` and `offload_states` (STATES OUT) copy the updated planes
  back.
- `update_in_place` (COMPUTE) applies the step to a unit that lives on the device, where its planes
  are.

The optimizer on the host is called in `engine/runtime/step/copy_ops.py`. Moments on the disk are
updated by the host, in chunks: `read_states` (READ) brings a chunk to a
ring buffer on the host, and `write_states` (WRITE) takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.optimizers import OPTIMIZERS
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.schedule.ops import (
    DeviceUpdate,
    FetchGradient,
    FetchStates,
    OfChunk,
    OffloadStates,
    OffloadWeights,
    ReadStates,
    UpdateInPlace,
    WriteStates,
)
from engine.runtime.optimizer.device_adamw import StepFactors
from engine.runtime.optimizer.device_optimizer import DeviceChunk, DeviceStep
from engine.runtime.step.context import OpContext
from engine.runtime.step.step import StepUnderWay


def fetch_states(context: OpContext, op: FetchStates, _step: StepUnderWay) -> None:
    """Brings all planes of the chunk except the gradient to its update buffer."""
    names = [plane for plane in context.host_states.planes if plane != "grad"]
    _copy_states(context, op, names, to_device=True)


def fetch_gradient(context: OpContext, op: FetchGradient, _step: StepUnderWay) -> None:
    """Brings the gradient plane of the chunk to its update buffer."""
    _copy_states(context, op, ["grad"], to_device=True)


def device_update(context: OpContext, op: DeviceUpdate, step: StepUnderWay) -> None:
    """Applies the step to the chunk in its update buffer, and to a slot that holds the unit."""
    start, stop = op.chunk
    buffer = context.state.states[op.buffer]
    if op.staging is None:
        grad = buffer["grad"][: stop - start]
    else:
        first = context.shard(op.unit)[0]
        grad = context.state.stagings[op.staging][start - first : stop - first]
    planes = {name: buffer[name][: stop - start] for name in WEIGHT_PLANES if name in buffer}
    states = {name: buffer[name] for name in OPTIMIZERS[context.host_states.optimizer].planes}
    layout = context.units[op.unit].layout
    _apply(context, op.unit, step, DeviceChunk(layout, start, grad, planes, states))
    if op.slot is not None:
        # The write goes through `data`, as in a prefetch.
        high = planes["weight_high"]
        context.state.slots[op.slot].data[start:stop].copy_(high)
        for part in layout.fp32_within(start, stop):
            inside = slice(part.start - start, part.stop - start)
            context.state.keep_in_fp32[op.slot].join(
                part, high[inside], planes["weight_low"][inside]
            )


def _apply(context: OpContext, unit: str, step: StepUnderWay, chunk: DeviceChunk) -> None:
    """Applies the step to a chunk of a unit's planes."""
    assert step.inputs.scalars is not None  # a step of such a plan always has them
    factors = StepFactors(context.state.clip, step.inputs.scalars)
    values = DeviceStep(factors, step.inputs.keys[unit], context.plan.compiled)
    context.state.optimizer.update(chunk, values)


def update_in_place(context: OpContext, op: UpdateInPlace, step: StepUnderWay) -> None:
    """Applies the step to the planes of a unit that lives on the device."""
    states, layout = context.host_states, context.units[op.unit].layout
    states.held.begin(step.inputs.number, op.unit)
    start, stop = context.shard(op.unit)
    # The writes go through `data`, as in a prefetch: the slot is the plane of weights. It is there
    # whole, and of the other planes the shard of this rank.
    weights = {"weight_high": states.tensor(op.unit, "weight_high").data[start:stop]}
    if "weight_low" in states.planes:
        weights["weight_low"] = states.tensor(op.unit, "weight_low")[: stop - start]
    planes = OPTIMIZERS[states.optimizer].planes
    gradient = context.state.stagings[op.staging][: stop - start]
    if stop > start:
        own = {name: states.tensor(op.unit, name) for name in planes}
        _apply(context, op.unit, step, DeviceChunk(layout, start, gradient, weights, own))
    for part in layout.fp32_parts:
        inside = slice(part.start, part.stop)
        high, low = weights["weight_high"][inside], weights["weight_low"][inside]
        context.state.keep_in_fp32[op.slot].join(part, high, low)


def offload_weights(context: OpContext, op: OffloadWeights, step: StepUnderWay) -> None:
    """Sends what a prefetch of the unit reads: weight_high, and weight_low of the weights that stay
    in fp32.
    """
    context.host_states.held.begin(step.inputs.number, op.unit)
    _copy_states(context, op, ["weight_high"], to_device=False)
    for part in context.units[op.unit].layout.fp32_within(*op.chunk):
        _send_range(context, op, "weight_low", (part.start, part.stop))


def offload_states(context: OpContext, op: OffloadStates, step: StepUnderWay) -> None:
    """Sends the updated planes that `offload_weights` has not sent."""
    context.host_states.held.begin(step.inputs.number, op.unit)
    sent = context.units[op.unit].layout.fp32_within(*op.chunk)
    if not sent:
        names = [
            plane for plane in context.host_states.planes if plane not in ("weight_high", "grad")
        ]
        _copy_states(context, op, names, to_device=False)
        return
    # What was sent with the weights is not written again, since a prefetch may be reading it.
    bounds = [op.chunk[0]]
    for part in sent:
        bounds += [part.start, part.stop]
    bounds.append(op.chunk[1])
    for between in zip(bounds[::2], bounds[1::2]):
        _send_range(context, op, "weight_low", between)
    states = OPTIMIZERS[context.host_states.optimizer].planes
    _copy_states(context, op, states, to_device=False)


def read_states(context: OpContext, op: ReadStates, _step: StepUnderWay) -> None:
    """Reads the moments of the chunk from the disk into its ring buffer."""
    ring = context.state_rings[op.states]
    context.host_states.placement.disk.read_chunk(op.unit, op.chunk[0], ring)


def write_states(context: OpContext, op: WriteStates, _step: StepUnderWay) -> None:
    """Writes the updated moments of the chunk from its ring buffer to the disk."""
    ring = context.state_rings[op.states]
    context.host_states.placement.disk.write_chunk(op.unit, op.chunk[0], ring)


def _send_range(context: OpContext, op: OfChunk, name: str, between: tuple[int, int]) -> None:
    """Copies a plane between two elements from the op's update buffer to the host."""
    start, stop = between
    begin = op.chunk[0]
    on_device = context.state.states[op.buffer][name][start - begin : stop - begin]
    on_host = context.host_states.tensor(op.unit, name)[start:stop]
    context.backend.copy_in_chunks(on_host, on_device)


def _copy_states(context: OpContext, op: OfChunk, names: Sequence[str], to_device: bool) -> None:
    """Copies the op's chunk of some planes between the host and the op's update buffer."""
    states, layout = context.host_states, context.units[op.unit].layout
    for name in names:
        on_host = states.tensor(op.unit, name)
        begin, end = op.chunk
        if name in OPTIMIZERS[states.optimizer].planes:
            place, stop = layout.state_bounds(states.optimizer, name, begin, end)
            begin, end = place // on_host.element_size(), stop // on_host.element_size()
        on_device = context.state.states[op.buffer][name][: end - begin]
        if to_device:
            context.backend.copy_in_chunks(on_device, on_host[begin:end])
        else:
            context.backend.copy_in_chunks(on_host[begin:end], on_device)
