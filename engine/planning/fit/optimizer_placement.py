"""`place_optimizers` decides where each unit's optimizer runs: on the host, or on the device, to
which the unit's states are streamed. No torch.

It processes the units in the order in which the next forward pass needs them. For each unit it
estimates when the updated weights are ready if the host updates the unit, and if the device does,
and chooses the earlier. All times are seconds from the end of the step's backward.

The order decides: the forward pass runs through the units in turn, so one that is late delays all
that come after it, while one that is early gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.config.optimizers import OPTIMIZERS
from engine.machine.link_rates import START_SECONDS, collective_seconds
from engine.planning.fit.buffer_sizes import (
    disk_offloaded_units,
    shared_main_grad_bytes,
    update_buffer,
)
from engine.planning.fit.cost_model import ONE_OF_TWO_PASSES, Cost, step_seconds
from engine.planning.schedule.arena import lay_out_arena
from engine.planning.schedule.buffers import EMBED, HEAD
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.device_updates import LEAD
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.planning.schedule.ops import DISK_LANES, Lane, MainGrad, OpKind
from engine.planning.schedule.shards import Shards
from engine.planning.shape.unit_shape import UnitShape

MOMENTS_AFTER_WEIGHTS_GAIN = 0.02
"""Fraction by which a step must be shorter for moments to be updated after all weights."""
MOMENTS_AFTER_WEIGHTS_ROOM = 0.5
"""Fraction of a step that the two passes over the planes on the host may take."""
LEAST_BUFFERS = 4
"""Number of update buffers with which copies to the device and back and an update can run at
once.
"""


class OptimizerPlacement(NamedTuple):
    """Where each unit's optimizer runs."""

    units: tuple[str, ...]
    """Units whose optimizers run on the device; all others run on the host."""
    moments_after_weights: bool
    """Whether the host updates the moments of its units after the weights of all of them."""
    waited: float
    """Estimated seconds for which the first forward pass waits for updates."""


def place_optimizers(cost: Cost, choices: PlanChoices, device: str = "cuda") -> OptimizerPlacement:
    """Returns where each unit's optimizer runs.

    States are streamed through `updates.update_buffers` buffers. No optimizer runs on the device
    where the host alone is faster, because copies of states on the bus slow the host down. Those of
    `ModelShape.device_only` run there in any case.

    Several ranks update moments after weights where their steps are clearly shorter then. That
    needs planes of gradients, which one rank mostly has not. Where the accumulators of all rounds
    are on the devices, it was never measured and is not done. device: blocks compute on this.
    """
    device_only = cost.shape.device_only(device)
    numbers = {choices.updates.update_buffers} | (set() if device_only else {0})
    placements = [_Placement(cost, choices, buffers, device_only) for buffers in numbers]
    best = min(placements, key=lambda placement: placement.waited)
    if device == "cuda" and choices.sharding.ranks > 1 and _may_update_weights_first(cost, choices):
        late = _Placement(cost, choices.changed(moments_after_weights=True), 0, ())
        step = step_seconds(cost, choices, late.waited)
        # The second pass over the planes must end long before the next gradients arrive.
        if (
            late.host_seconds < MOMENTS_AFTER_WEIGHTS_ROOM * step
            and best.waited - late.waited > MOMENTS_AFTER_WEIGHTS_GAIN * step
        ):
            return OptimizerPlacement((), True, late.waited)
    return OptimizerPlacement(best.units, False, best.waited)


def _may_update_weights_first(cost: Cost, choices: PlanChoices) -> bool:
    """Returns whether moments may be updated after weights."""
    if not OPTIMIZERS[cost.shape.optimizer].has_two_passes:
        return False
    gradients = choices.gradients
    return not gradients.gradients_on_gpu and gradients.main_grad != MainGrad.DEVICE


def wait_for_disk(cost: Cost, choices: PlanChoices) -> float:
    """Returns how long the first forward pass waits for moments that go to the disk and back. The
    disk works while the units before them go forward, unless block inputs of these go there, too:
    they wait until the moments are written.
    """
    shape = cost.shape
    offloaded_to_disk = disk_offloaded_units(shape, choices)
    size = sum(cost.moment_bytes(unit.name, unit.gradient_numel) for unit in offloaded_to_disk)
    seconds = max(cost.on_disk(lane, size) for lane in DISK_LANES)
    if choices.activations.disk_offloaded_block_inputs:
        return seconds
    before = max(0, len(shape.blocks) - max(0, choices.placement.disk_offloaded_units - 1))
    passes = choices.batching.micro_batches_per_round
    return max(0.0, seconds - passes * cost.first_forwards[before])


def wait_for_block_inputs(cost: Cost, choices: PlanChoices) -> float:
    """Returns the seconds of a step in which blocks wait for block inputs on the disk: they are
    written while their blocks go forward, and read while these go backward. The second block of a
    pair goes forward while the last few of the first one are written.
    """
    activations = choices.activations
    if not activations.disk_offloaded_block_inputs:
        return 0.0
    blocks, first = len(cost.shape.blocks), cost.shape.forward_blocks
    pairs = len(activations.seconds_of_pairs(blocks))
    last_with_saved_input = blocks - activations.blocks_without_recompute
    recomputed = last_with_saved_input - first
    below = cost.first_forwards[first]
    forward = choices.batching.micro_batches * (cost.first_forwards[last_with_saved_input] - below)
    backward = choices.batching.micro_batches * (cost.passes - cost.first_forwards[-1])
    backward *= recomputed / (blocks - first)
    seconds = forward * pairs / recomputed
    last = choices.batching.rounds * pairs * DISK_RINGS * cost.block_inputs_on_disk(Lane.WRITE, 1)
    hiding = {Lane.WRITE: forward - seconds + min(seconds, last), Lane.READ: forward + backward}
    count = activations.disk_offloaded_block_inputs
    return sum(max(0.0, cost.block_inputs_on_disk(ln, count) - hiding[ln]) for ln in DISK_LANES)


class _Placement:
    """One pass over the units with a given number of update buffers. device_only: units whose
    optimizers must run on the device.

    `units` are those whose optimizers run on the device. `waited` is how long the first forward
    pass waits for updates. `host_seconds` is how long the host updates all others.
    """

    def __init__(
        self, cost: Cost, choices: PlanChoices, buffers: int, device_only: Collection[str]
    ):
        shape = cost.shape
        self._cost = cost
        self._rates = cost.rates
        self._shape = shape
        self._shards = Shards(choices.sharding.ranks)
        self._device_only = device_only
        self._late = choices.updates.moments_after_weights
        self._reads_unsharded = choices.sharding.unsharded_reads
        self._shard_seconds: dict[tuple[int, int], _ShardSeconds] = {}
        self._seconds: dict[int, _ChunkSeconds] = {}
        first_resident = len(shape.blocks) - choices.placement.blocks_kept_in_slots
        gpu_resident = self._gpu_resident = {
            *choices.placement.gpu_resident([unit.name for unit in shape.blocks])
        }
        elsewhere = [unit for unit in shape.blocks if unit.name not in gpu_resident]
        resident = shape.blocks[first_resident:]
        streamed = elsewhere[: len(elsewhere) - len(resident)]
        of_resident = choices.placement.gpu_resident_units
        self._in_place = cost.first_products[of_resident] + cost.in_place(
            shape.first_gradients[of_resident] // choices.sharding.ranks
        )
        in_slots = (*resident, *streamed[: choices.streaming.slots])
        # These units are updated in the slot that they are still in when the step ends.
        self._placed = {EMBED, HEAD, *(unit.name for unit in in_slots)}
        if choices.sharding.ranks > 1:  # the other ranks need the updated weights, too
            self._placed = set()
        # The gradients of these units are still in their staging buffers.
        trained = [unit for unit in elsewhere if not unit.is_frozen]
        self._staged = {unit.name for unit in (shape.embed, *trained[:2])}
        if choices.gradients.gradients_on_gpu:
            self._staged = {unit.name for unit in shape.units}
        self._passes = choices.batching.micro_batches_per_round
        # Where there are many buffers, several chunks count as one, which takes less time to plan.
        buffer = update_buffer(shape, choices)
        together = max(1, min(choices.updates.update_chunks, buffers // LEAST_BUFFERS))
        self._chunk = together * buffer.numel
        self._size = together * buffer.bytes
        buffers //= together
        self._free = self._buffers_free(choices, buffers) if buffers else []
        self._lanes = _Lanes()
        device_updated, ready_at = self._place(buffers)
        self.units = tuple(device_updated)
        self.waited = self._waits(ready_at)

    def _place(self, buffers: int) -> tuple[list[str], dict[str, float]]:
        """Returns the units whose optimizers run on the device, and when each unit is ready."""
        passes = ONE_OF_TWO_PASSES[self._shape.dtype] if self._late else 1.0
        lanes = self._lanes
        host = 0.0
        device_updated: list[str] = []
        ready_at: dict[str, float] = {}
        # Units that live on the device are updated where they are, before the forward pass begins.
        # Several ranks then gather their weights.
        gathered = self._in_place
        others = []
        for unit in self._shape.units:
            if unit.name not in self._gpu_resident:
                others.append(unit)
                continue
            gathered += self._shard(unit).gather
            ready_at[unit.name] = gathered
        for unit in others:
            shard = self._shard(unit)
            if unit.is_frozen:  # its weights can be fetched at any time
                lanes.prefetch(shard.prefetch)
                ready_at[unit.name] = 0.0
                continue
            updated = host + passes * self._cost.on_host(unit.name, shard.numel, buffers > 0)
            on_host = updated + shard.arrival
            if buffers:
                before = lanes.mark()
                on_device = self._on_device(unit, shard)
                if on_device < on_host or unit.name in self._device_only:
                    device_updated.append(unit.name)
                    ready_at[unit.name] = on_device
                    continue
                lanes.back_to(before)
                lanes.prefetch(shard.prefetch)
            host = updated
            ready_at[unit.name] = on_host
        self.host_seconds = 2 * host if self._late else host
        return device_updated, ready_at

    def _waits(self, ready_at: dict[str, float]) -> float:
        """Returns how long the first forward pass waits for units that are not ready yet."""
        now, waited = self._in_place, 0.0
        for unit in self._shape.units:
            waited += max(0.0, ready_at[unit.name] - now)
            now = max(now, ready_at[unit.name])
            if unit.name not in (EMBED, HEAD):
                now += self._passes * self._cost.forward(unit.name)
        return waited

    def _buffers_free(self, choices: PlanChoices, buffers: int) -> list[float]:
        """Returns when the first states can be fetched into each of `buffers` buffers. Those that
        use the memory of fp32 accumulators must wait for backward.
        """
        blocks = list(reversed(self._shape.blocks))
        ends = []  # when backward is done with each block
        blocks = blocks[: len(blocks) - self._shape.forward_blocks]
        time = -self._passes * sum(self._cost.backward(unit.name) for unit in blocks)
        for unit in blocks:
            time += self._passes * self._cost.backward(unit.name)
            ends.append(time)
        ends = ends or [0.0]
        free: list[float] = []
        main_grads = shared_main_grad_bytes(self._shape, choices)
        main_grad = choices.gradients.main_grad
        arena = lay_out_arena(main_grads, self._size, buffers, main_grad)
        for main_grads_there in map(arena.main_grads_under, range(buffers)):
            if not main_grads_there:
                free.append(-math.inf)
            elif main_grad == MainGrad.DEVICE:
                free.append(ends[min(main_grads_there[-1], len(ends) - 1)])
            else:  # buffers over these accumulators wait for embed, the last unit of backward
                free.append(0.0)
        return free

    def _on_device(self, unit: UnitShape, shard: _ShardSeconds) -> float:
        """Returns when the unit's weights are ready if the device updates it. The lanes' clocks
        advance.
        """
        lanes, ready = self._lanes, 0.0
        placed, staged = unit.name in self._placed, unit.name in self._staged
        for start in range(0, shard.numel, self._chunk):
            seconds = self._seconds_of(min(self._chunk, shard.numel - start))
            number = len(lanes.updated)
            earlier = number - len(self._free)  # the chunk that was in the buffer before
            if earlier < 0:
                free = self._free[number]
            else:
                while len(lanes.freed) < earlier + min(LEAD, len(self._free)):
                    lanes.send_states()
                free = lanes.freed[earlier]
            # The chunk is fetched once its buffer is free, and updated.
            there = lanes.fetch(free, seconds, staged)
            products = self._cost.products(unit.name, min(self._chunk, shard.numel - start))
            updated = max(0.0, there) + seconds.update + products
            if placed:  # its weights are sent with the states
                lanes.update(updated, seconds.states + seconds.weights)
                ready = max(ready, updated)
            else:
                lanes.update(updated, seconds.states)
                ready = max(ready, lanes.send_weights(updated, seconds.weights))
        if placed:
            return ready
        # The prefetch shares the bus with the states that come after it.
        lanes.prefetch(shard.prefetch)
        return ready + shard.arrival

    def _seconds_of(self, numel: int) -> _ChunkSeconds:
        """Returns the seconds of a chunk of `numel` elements."""
        if numel not in self._seconds:
            carried = self._cost.carried
            self._seconds[numel] = _ChunkSeconds(
                carried(OpKind.FETCH_STATES, numel, early=True),
                carried(OpKind.FETCH_GRADIENT, numel, early=True),
                carried(OpKind.FETCH_STATES, numel),
                carried(OpKind.FETCH_GRADIENT, numel),
                numel * 2 * self._cost.state_bytes / self._rates.device_memory,
                carried(OpKind.OFFLOAD_STATES, numel),
                carried(OpKind.OFFLOAD_WEIGHTS, numel),
            )
        return self._seconds[numel]

    def _shard(self, unit: UnitShape) -> _ShardSeconds:
        """Returns this rank's shard of a unit."""
        numel, weights = unit.gradient_numel, unit.weight_numel
        if (numel, weights) not in self._shard_seconds:
            item = self._shape.item_bytes
            fetched = weights if self._reads_unsharded else self._shards.numel(weights)
            prefetch = fetched * item / self._rates.h2d_busy
            received = self._shards.received(weights) * item
            gather = collective_seconds(self._rates, received) if received else 0.0
            arrival = prefetch + (START_SECONDS if self._reads_unsharded else gather)
            self._shard_seconds[numel, weights] = _ShardSeconds(
                self._shards.numel(numel), prefetch, gather, arrival
            )
        return self._shard_seconds[numel, weights]


class _ShardSeconds(NamedTuple):
    """What the shard of one rank costs for a unit, which is whole where there is one rank."""

    numel: int
    """Number of elements that the rank updates."""
    prefetch: float
    """Seconds of the copy of the weights to a slot: those of the shard, or of the whole unit where
    each rank reads it.
    """
    gather: float
    """Seconds of the gather of the weights."""
    arrival: float
    """Seconds after which the unit's weights are complete: those of other ranks come after the
    copy.
    """


class _ChunkSeconds(NamedTuple):
    """The lanes take these seconds for one chunk. Copies are slower once updates have begun."""

    early_states: float
    early_gradient: float
    fetched_states: float
    fetched_gradient: float
    update: float
    states: float
    weights: float
    """Seconds in which the states and the weights are sent back."""


class _Mark(NamedTuple):
    """A mark stores a state of the lanes, so that it can be restored."""

    inward: float
    outward: float
    chunks: int
    freed: int


@dataclass
class _Lanes:
    """Simulates the lanes of optimizers on the device, in the order of
    `engine.planning.schedule.device_updates`.
    """

    inward: float = -math.inf
    """Time at which the lane of states to the device becomes free."""
    outward: float = 0.0
    """Time at which the lane of states to the host becomes free."""
    updated: list[float] = field(default_factory=list)
    """Time at which each chunk was updated."""
    owed: list[float] = field(default_factory=list)
    """Seconds in which the rest of each chunk is sent."""
    freed: list[float] = field(default_factory=list)
    """Time at which each chunk that was sent left its buffer."""

    def fetch(self, free: float, seconds: _ChunkSeconds, staged: bool) -> float:
        """Fetches a chunk into a buffer that is free at the time `free`, and returns when it has
        arrived. staged: its gradient is on the device already.
        """
        if free > self.inward:
            self.inward = free
        early = self.inward < 0  # no chunk has been updated by then
        self.inward += seconds.early_states if early else seconds.fetched_states
        if not staged:
            self.inward += seconds.early_gradient if early else seconds.fetched_gradient
        return self.inward

    def prefetch(self, seconds: float) -> None:
        """Gives the bus to weights for the forward pass for `seconds`."""
        self.inward = max(0.0, self.inward) + seconds

    def update(self, at: float, owed: float) -> None:
        """Notes the time at which the next chunk is updated. Sending its rest takes `owed`
        seconds.
        """
        self.updated.append(at)
        self.owed.append(owed)

    def send_weights(self, updated: float, seconds: float) -> float:
        """Returns the time at which the weights of a chunk are on the host."""
        self.outward = max(self.outward, updated) + seconds
        return self.outward

    def send_states(self) -> None:
        """Sends the states of the next chunk."""
        chunk = len(self.freed)
        self.outward = max(self.outward, self.updated[chunk]) + self.owed[chunk]
        self.freed.append(self.outward)

    def mark(self) -> _Mark:
        """Returns the current state, for `back_to`."""
        return _Mark(self.inward, self.outward, len(self.updated), len(self.freed))

    def back_to(self, mark: _Mark) -> None:
        """Restores the state at `mark`."""
        self.inward = mark.inward
        self.outward = mark.outward
        del self.updated[mark.chunks :]
        del self.owed[mark.chunks :]
        del self.freed[mark.freed :]
