"""To predict how long a step will take, the plan of given choices is simulated with the rates of a
machine: `op_seconds` says how long each of its ops takes. No torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from engine.machine.link_rates import of_rank, seconds_lost
from engine.machine.rates import Rates, stored_cpu_rates
from engine.planning.fit.buffer_sizes import ring_numel, update_buffer
from engine.planning.fit.collectives import CollectiveTimes
from engine.planning.fit.cost_model import (
    FIRST_GRADIENT_BYTES,
    GRADIENT_BYTES,
    ONE_OF_TWO_PASSES,
    Cost,
    MicroBatch,
    largest_product,
)
from engine.planning.layout.disk_chunks import DISK_CHUNK_NUMEL
from engine.planning.layout.layout import PLANE_ITEM_BYTES
from engine.planning.schedule.buffers import EMBED
from engine.planning.schedule.build import build_forward_plan, build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.planning.schedule.ops import (
    DISK_LANES,
    Backward,
    DeviceUpdate,
    Embed,
    EmbedBackward,
    FetchBlockInput,
    FetchGrad,
    Forward,
    Lane,
    Loss,
    OfChunk,
    OfDiskChunk,
    Offload,
    OffloadBlockInput,
    OffloadKeptGradient,
    OfMicroBatch,
    Op,
    OpKind,
    Prefetch,
    Recompute,
    Reduce,
    Summary,
    Update,
    UpdateInPlace,
    UpdateMoments,
    WithMainGrad,
)
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.simulate import Simulated, simulate
from engine.planning.shape.model_shape import ModelShape


@functools.lru_cache(maxsize=256)
def predicted_seconds(
    shape: ModelShape,
    choices: PlanChoices,
    rates: Rates,
    micro_batch: MicroBatch,
    device: str,
) -> float:
    """Returns the predicted seconds of a step, from one applied step to the next."""
    return predicted_step(shape, choices, rates, micro_batch, device, waits=False)[1].seconds


SIMULATED_ROUNDS = 3
"""Most rounds of a step that are simulated to estimate it."""
SIMULATED_USES = 400
"""Number of uses of blocks in forward up to which all micro-batches of these rounds are."""


@functools.lru_cache(maxsize=256)
def estimated_seconds(
    shape: ModelShape, choices: PlanChoices, rates: Rates, micro_batch: MicroBatch, device: str
) -> float:
    """Returns the seconds of a step like `predicted_seconds`, from a plan with few ops. All rounds
    between the first ones and the last take as long as one of them; where a round has many
    micro-batches, several of them count as one that takes as long as all of these.
    """
    rounds, of_round = choices.batching.rounds, choices.batching.micro_batches_per_round
    few = min(rounds, SIMULATED_ROUNDS)
    room = SIMULATED_USES // (len(shape.blocks) * few)
    apart = max(n for n in range(1, of_round + 1) if of_round % n == 0 and n <= max(1, room))

    inputs = choices.activations.disk_offloaded_block_inputs * few * apart
    plan, timing = predicted_step(
        shape,
        choices.changed(
            rounds=few,
            micro_batches=few * apart,
            disk_offloaded_block_inputs=-(-inputs // choices.batching.micro_batches),
        ),
        rates,
        micro_batch,
        device,
        waits=False,
        together=of_round // apart,
    )
    if few == rounds:
        return timing.seconds
    begins = {op.micro_batch: timing.starts[op.index] for op in plan.ops if isinstance(op, Embed)}
    a_round = begins[(few - 1) * apart] - begins[(few - 2) * apart]
    return timing.seconds + (rounds - few) * a_round


def predicted_step(
    shape: ModelShape,
    choices: PlanChoices,
    rates: Rates,
    micro_batch: MicroBatch,
    device: str,
    waits: bool = True,
    together: int = 1,
) -> tuple[StepPlan, Simulated]:
    """Returns the plan of these choices, and when each of its ops would run. Of several ranks, it
    is that of the first, whose shards are the largest. A pass that goes before each step counts in
    the step's seconds; then nothing is left of the step before when an op runs. waits: as for
    `build_step_plan`. together: number of micro-batches that each one of the plan stands for.
    """
    buffer = update_buffer(shape, choices)
    numel = {unit.name: unit.numel for unit in shape.units}
    sizes = PlaneSizes(
        numel=numel,
        chunk_numel=buffer.numel,
        ring_numel=ring_numel(shape, choices.sharding.ranks),
        buffer_bytes=buffer.bytes,
        embed_chunk=shape.embed_chunk,
        item_bytes=shape.item_bytes,
        disk_chunk_numel=DISK_CHUNK_NUMEL,
        frozen=shape.frozen_units,
        has_fp32_weights=shape.has_fp32_weights,
    )
    blocks = [unit.name for unit in shape.blocks]
    plan = build_step_plan(blocks, shape.holds_embed, choices, sizes, waits=waits)
    seconds_of = op_seconds(plan, shape, rates, micro_batch, together)
    inline = device == "cpu"
    if not micro_batch.has_pass:
        return plan, simulate(plan, seconds_of, inline)
    before = predicted_pass(shape, choices, rates, micro_batch, device, together)
    alone = simulate(plan, seconds_of, inline, steps=1)
    busy = {lane: alone.busy[lane] + before.busy[lane] for lane in alone.busy}
    return plan, replace(alone, seconds=before.seconds + alone.seconds, busy=busy)


def predicted_pass(
    shape: ModelShape,
    choices: PlanChoices,
    rates: Rates,
    micro_batch: MicroBatch,
    device: str,
    together: int = 1,
) -> Simulated:
    """Returns when the ops of a pass without gradients would run, over as many rows as a step has.
    Of several ranks, each takes its part of them, and weights that it reads whole unless these are
    divided among nodes. Where block inputs are on the device, all micro-batches fit there at once.
    """
    own = choices.of_forward_passes()
    is_alike = choices.activations.offloaded_block_inputs or choices.sharding.nodes_per_replica > 1
    passed = own.changed(
        micro_batches=choices.batching.micro_batches,
        rounds=choices.batching.rounds if is_alike else 1,
        compiled=choices.kernels.compiled,
    )
    plan = build_forward_plan([unit.name for unit in shape.blocks], shape.holds_embed, passed)
    if choices.sharding.nodes_per_replica == 1:
        rates = of_rank(rates, choices.sharding.ranks)
    seconds_of = op_seconds(plan, shape, rates, micro_batch, together)
    return simulate(plan, seconds_of, inline=device == "cpu", steps=1)


def op_seconds(
    plan: StepPlan, shape: ModelShape, rates: Rates, micro_batch: MicroBatch, together: int = 1
) -> Callable[[Op], float]:
    """Returns a function that estimates the seconds of each op of `plan`.

    An op of COMPUTE takes the time of its matrix products, its attention and its other memory
    traffic. In a forward, each byte that autograd keeps for a block is written once and read once;
    a backward moves twice as much. Compiled blocks move half of that. On a GPU an op takes at least
    as long as its launch. With several ranks, the plan is that of one of them. together: number of
    micro-batches that each one of the plan stands for.
    """
    return _OpSeconds(plan, shape, rates, micro_batch, together).of


class _OpSeconds:
    """Estimates how long each op of one plan takes."""

    def __init__(
        self,
        plan: StepPlan,
        shape: ModelShape,
        rates: Rates,
        micro_batch: MicroBatch,
        together: int,
    ):
        rates, shards = of_rank(rates, plan.shards.ranks // plan.nodes_per_replica), plan.shards
        self._rates = rates
        self._together = together
        self._ranks = shards.ranks
        self._item = shape.item_bytes
        self._numel = {unit.name: shards.numel(unit.gradient_numel) for unit in shape.units}
        """Elements of each unit that have a gradient and are updated: all of it, or a shard."""
        numels = {unit.name: (unit.numel, unit.weight_numel) for unit in shape.units}
        self._exchange = CollectiveTimes(plan, numels, self._item, rates)
        low = PLANE_ITEM_BYTES[shape.dtype].get("weight_low", 0)
        self._weight_bytes = {
            unit.name: shards.numel(unit.weight_numel) * self._item
            + unit.fp32_numel * low / shards.ranks
            for unit in shape.units
        }
        """Bytes that a prefetch copies: weight_high, and weight_low of what stays in fp32."""
        micro_batch = replace(micro_batch, tile_tokens=plan.tile_tokens)
        self._cost = Cost(shape, rates, micro_batch, plan.compiled, plan.graphs > 0)
        self._with_attention = frozenset(plan.with_attention)
        self._attention_bytes = self._cost.attention_bytes(plan.attention_bytes)
        self._beside_states = bool(plan.device_updated_units)
        self._apart = ONE_OF_TWO_PASSES[shape.dtype]
        self._summary = next((op.index for op in plan.ops if isinstance(op, Summary)), 0)
        self._trains = any(isinstance(op, Summary) for op in plan.ops)
        self._slower = 1.0
        """Factor by which COMPUTE takes longer beside collectives."""
        received = sum(map(self._exchange.received, plan.ops))
        lost = seconds_lost(shards.ranks, received)
        if lost:
            compute = sum(self._of_all(op) for op in plan.ops if _computes(op))
            self._slower += lost / max(lost, compute)

    def of(self, op: Op) -> float:
        """Returns the seconds of one op."""
        return (self._slower if _computes(op) else 1.0) * self._of_all(op)

    def _of_all(self, op: Op) -> float:
        """Returns the seconds of an op for all micro-batches that it stands for."""
        seconds, others = self._of_one(op), self._together - 1
        if others and isinstance(op, OfMicroBatch):
            later = seconds
            if isinstance(op, WithMainGrad) and op.first:
                later = self._of_one(replace(op, first=False))
            return seconds + others * later
        return seconds

    def _of_one(self, op: Op) -> float:
        if isinstance(op, OfChunk):
            return self._of_chunk(op)
        if op.lane in DISK_LANES:
            return self._of_disk(op)
        if isinstance(op, UpdateInPlace):
            numel = self._numel[op.unit]
            return self._cost.in_place(numel) + self._cost.products(op.unit, numel)
        if op.lane == Lane.COMPUTE:
            return self._of_compute(op)
        if op.lane == Lane.COLLECTIVE:
            return self._exchange.seconds(op)
        return self._of_host_or_copy(op)

    def _of_chunk(self, op: OfChunk) -> float:
        start, stop = op.chunk
        if isinstance(op, DeviceUpdate):  # every plane is read and written
            numel = stop - start
            return self._cost.in_place(numel) + self._cost.products(op.unit, numel)
        return self._cost.carried(op.kind, stop - start, early=op.index < self._summary)

    def _of_disk(self, op: Op) -> float:
        cost = self._cost
        if isinstance(op, OfDiskChunk):
            return cost.on_disk(op.lane, cost.moment_bytes(op.unit, op.chunk[1] - op.chunk[0]))
        return cost.block_inputs_on_disk(op.lane, 1)

    def _of_compute(self, op: Op) -> float:
        cost = self._cost
        match op:
            case Forward() | Recompute():
                return cost.forward(op.unit)
            case Backward():
                again = cost.forward(op.unit) if op.recomputes else 0.0
                again -= cost.attention if op.unit in self._with_attention else 0.0
                touches = FIRST_GRADIENT_BYTES if op.first else GRADIENT_BYTES
                return again + cost.backward(op.unit) + cost.added(op.unit, touches)
            case Loss():
                return cost.loss(self._trains)
            case Embed() | EmbedBackward():
                return self._of_embed(op)
            case Reduce():
                return self._part(op.unit, op.chunk) * cost.gradient(op.unit, 8 + self._item)
        return 0.0

    def _part(self, unit: str, chunk: tuple[int, int] | None) -> float:
        """Returns which part of a unit's elements the chunk is."""
        return 1.0 if chunk is None else (chunk[1] - chunk[0]) / self._numel[unit]

    def _of_embed(self, op: Embed | EmbedBackward) -> float:
        cost, memory = self._cost, self._rates.device_memory
        if isinstance(op, Embed):
            return max(2 * cost.hidden_bytes / memory, cost.launch(OpKind.FORWARD))
        gradient = self._part(EMBED, op.chunk) * cost.gradient(EMBED, 8 + self._item)
        work = 4 * cost.hidden_bytes / memory + gradient
        return max(work, cost.launch(OpKind.BACKWARD)) if op.captures else work

    def _of_host_or_copy(self, op: Op) -> float:
        rates, kept_bytes = self._rates, self._cost.hidden_bytes
        if op.unit in self._with_attention:
            kept_bytes += self._attention_bytes
        match op:
            case Prefetch() | FetchGrad():
                size: float = self._numel[op.unit] * self._item
                if isinstance(op, Prefetch):
                    size = self._weight_bytes[op.unit] * (self._ranks if op.whole else 1)
                return size / rates.h2d
            case Offload() | OffloadKeptGradient():
                d2h = rates.d2h if isinstance(op, Offload) else rates.d2h_busy
                return self._numel_of(op) * self._item / d2h
            case OffloadBlockInput():
                return kept_bytes / rates.d2h
            case FetchBlockInput():
                return kept_bytes / rates.h2d
            case Update() | UpdateMoments():
                apart = isinstance(op, UpdateMoments) or op.after_weights
                seconds = self._cost.on_host(op.unit, self._numel_of(op), self._beside_states)
                return (self._apart if apart else 1.0) * seconds
        return 0.0

    def _numel_of(self, op: Offload | OffloadKeptGradient | Update | UpdateMoments) -> int:
        """Returns the number of elements of the op's chunk, or of the whole unit."""
        chunk = None if isinstance(op, Offload) else op.chunk
        return self._numel[op.unit] if chunk is None else chunk[1] - chunk[0]


def _computes(op: Op) -> bool:
    """Returns whether the op computes while ranks may exchange gradients."""
    return op.lane == Lane.COMPUTE and not isinstance(op, UpdateInPlace)


def rates_of_steps(
    shape: ModelShape, rows: int, rates: Rates | None, row_length: int, device: str
) -> Rates | None:
    """Returns the rates that determine the times of steps, with `rows` rows in a micro-batch; None
    where none are known.

    On a GPU they are `rates`, those of its machine. On the CPU, where choices do not depend on
    rates, they are the rates measured on this machine, in float32.
    """
    if device != "cpu":
        return rates
    if shape.dtype != "float32":
        return None
    return stored_cpu_rates(largest_product(shape, rows * row_length))
