"""The cost of a step is estimated from the rates of a machine and the shape of a model. No torch.

- `Cost` gives the seconds of a step's parts: matrix products and attention by their FLOPs,
  everything else by the bytes that it reads and writes.
- `step_seconds` gives the time of a whole step from them in closed form, fast enough to compare
  hundreds of choices. `engine.planning.fit.simulate_step` simulates it op by op.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.config.optimizers import (
    ADAMW,
    MEASURED_SIDE,
    OPTIMIZERS,
    Optimizer,
    orthogonalization_flops,
)
from engine.config.preference_settings import Objective
from engine.machine.disk_rates import ASSUMED_RATE
from engine.machine.link_rates import (
    seconds_between_nodes,
    seconds_lost,
    seconds_to_receive_across,
)
from engine.machine.rates import PACKED_BYTES, PACKED_WIDTH, Rates
from engine.planning.layout.layout import PLANE_ITEM_BYTES
from engine.planning.schedule.buffers import HEAD
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import (
    Lane,
    MainGrad,
    OpKind,
)
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.unit_shape import UnitShape

BUS_SHARE = 0.9
"""Fraction of the bandwidth of the bus to the device that copies of states reach, because
prefetches can run between their chunks.
"""
GRADIENT_BYTES = 27
"""Bytes of device memory for each parameter whose movement a backward takes time for, in addition
to the time that grows with its tokens: the gradient is written, read and added to an fp32
accumulator (measured: docs/performance.md).
"""
FIRST_GRADIENT_BYTES = 9
"""The same for the first gradient of an accumulator, which is written, read and copied there."""
BLOCK_CALLS = {OpKind.FORWARD: 320, OpKind.BACKWARD: 200}
"""Number of operations whose launch takes as long as that of one block. In backward, torch launches
most of them from C++.
"""
BLOCK_KERNELS = {OpKind.FORWARD: 30, OpKind.BACKWARD: 58}
"""Approximate number of kernels that a block runs on a GPU."""
KERNEL_SECONDS = 3.3e-6
"""Seconds for which a kernel leaves the GPU idle while it begins and ends (measured with 0.5B
parameters and 2,048 to 151,552 tokens: docs/performance.md).
"""
GRAPH_CALLS = 6
"""Number of operations whose launch takes as long as that of a block that is a CUDA graph."""
HALF_SPEED_TOKENS = 300
"""Tokens with which a block's matrix products reach half of their full speed on a GPU."""
HALF_SPEED_WIDTH = 400
"""Width of the hidden state with which matrix products reach half of the speed that they reach at a
large width on a GPU (measured with 0.5B and 3.1B parameters).
"""
MEASURED_WIDTH = 4096
"""Inner width with which the rate of matrix products is measured
(`engine.runtime.measure.machine_rates`).
"""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch has `rows` full rows of `row_length` tokens."""

    rows: int
    row_length: int
    varlen: bool = False
    """Whether attention runs document by document in the variable-length kernel. The estimate
    assumes one document per row.
    """
    tile_tokens: int = 0
    """Most tokens of a sequence chunk of blocks; it is 0 without sequence chunks
    (`PlanChoices`).
    """
    has_pass: bool = False
    """Whether each step waits until all earlier ones are applied, and as many rows pass without
    gradients.
    """
    sequences: int = 1
    """Number of lines of equal length in a row. Tokens attend to those of their own line."""
    compared: int = 0
    """Number of positions that the head computes at once where answers are compared; 0 for other
    rows.
    """

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length

    @property
    def sequence_length(self) -> int:
        return self.row_length // self.sequences

    @property
    def head_again(self) -> bool:
        """Whether the head computes all positions once more for their gradients, because one row
        has more of them than it computes at once (`engine.runtime.step.preference_head`).
        """
        return 0 < self.compared < self.row_length

    def learning(self, objective: Objective, loss_chunk: int) -> MicroBatch:
        """Returns the micro-batch in a training with this objective, whose head computes
        `loss_chunk` positions at once.
        """
        compared = loss_chunk if objective.is_preference else 0
        return replace(
            self, has_pass=objective.has_pass, sequences=objective.sequences, compared=compared
        )


def step_seconds(cost: Cost, choices: PlanChoices, waited: float) -> float:
    """Returns an estimate of a step's seconds in closed form: the longest of compute, the two ways
    of the bus, and what ranks and nodes exchange. It is fast; `simulate` runs the ops one by one.

    waited: seconds in which the first forward pass waits for updates (`place_optimizers`), and
    blocks for block inputs on the disk (`wait_for_block_inputs`).
    """
    shape, rates = cost.shape, cost.rates
    activations, placement = choices.activations, choices.placement
    micro_batches, rounds = choices.batching.micro_batches, choices.batching.rounds
    ranks, main_grad = choices.sharding.ranks, choices.gradients.main_grad
    without = len(shape.blocks) - activations.blocks_without_recompute
    recomputed = without - shape.forward_blocks
    again = cost.first_forwards[without] - cost.first_forwards[shape.forward_blocks]
    again -= activations.attention_blocks * cost.attention
    gpu_resident = shape.first_weights[placement.gpu_resident_units]
    updated = shape.first_gradients[placement.gpu_resident_units]
    in_place = cost.in_place(updated // ranks) + cost.first_products[placement.gpu_resident_units]
    first_adds = 1 if main_grad == MainGrad.DEVICE else rounds
    compute = micro_batches * (cost.passes + again + cost.loss()) + in_place
    compute -= first_adds * cost.saved_by_first
    stop = len(shape.blocks) - placement.blocks_kept_in_slots
    first = max(gpu_resident, shape.embed.weight_numel)
    # Where the head lives on the device too, all blocks do.
    streamed = max(0, shape.first_weights[1 + stop] - first)
    # Blocks without a backward are fetched once a round, the others twice.
    forward = shape.first_weights[1 + min(stop, shape.forward_blocks)] - first
    largest = max(unit.weight_numel for unit in shape.blocks)
    once = shape.first_weights[-1] - streamed - gpu_resident
    fetched = rounds * (2 * streamed - max(0, forward)) + once
    fetched *= shape.item_bytes
    # Of several ranks, each copies its shards, and receives those of the others, and their
    # accumulators.
    whole = choices.sharding.unsharded_reads
    carried = fetched if whole else fetched / ranks
    gathered = updated * shape.item_bytes + (0 if whole else fetched)
    scattered = rounds if main_grad == MainGrad.SHARDS else 1
    is_half = choices.has_one_term and shape.item_bytes == 2 and not shape.has_fp32_weights
    of_blocks = 2 if is_half else 4
    embed_and_head = shape.embed.gradient_numel + shape.head.gradient_numel
    reduced = 4 * embed_and_head + of_blocks * (shape.gradient_numel - embed_and_head)
    received = (1 - 1 / ranks) * (gathered + scattered * reduced)
    compute += seconds_lost(ranks, received)
    if activations.offloaded_block_inputs:
        stored = recomputed - len(activations.seconds_of_pairs(len(shape.blocks)))
        of_token = cost.attention_bytes(activations.attention_bytes)
        attention = activations.attention_blocks * of_token
        carried += micro_batches * (stored * cost.hidden_bytes + attention)
    # While two blocks are recomputed together, as many others are fetched as there are slots left.
    pairs = len(activations.seconds_of_pairs(len(shape.blocks)))
    lacking = max(0, 4 - choices.streaming.slots) * min(pairs, streamed // max(1, 2 * largest))
    waited += rounds * lacking * largest * shape.item_bytes / rates.h2d
    gradients = rounds if main_grad == MainGrad.HOST else 1
    returned = gradients * (shape.gradient_numel - updated) * shape.item_bytes / ranks
    # Ranks add up the accumulators of all rounds in the last one, or those of each round in it.
    nodes_per_replica = choices.sharding.nodes_per_replica
    between = seconds_between_nodes(rates, choices.sharding.replicas, 4 * shape.gradient_numel)
    added = between + seconds_to_receive_across(rates, nodes_per_replica, (1 - 1 / ranks) * reduced)
    exchanged = seconds_to_receive_across(rates, nodes_per_replica, received) + scattered * between
    exchanged = max(exchanged, added + compute - compute / rounds)
    return max(compute, carried / rates.h2d, returned / rates.d2h, exchanged) + waited


ONE_OF_TWO_PASSES = {"bfloat16": 18 / 26, "float32": 20 / 28}
"""Fraction of the bytes of one update pass that each of two moves. The host updates weights and
moments of a unit in one pass over its planes, or one after the other in two
(`moments_after_weights`).
"""


def host_rate(rates: Rates, optimizer: Optimizer, beside_states: bool) -> float:
    """Returns the number of parameters that the host updates in a second. Even while states are
    streamed, there are no copies on the bus about half of the time (measured: docs/performance.md).
    """
    alone = rates.updates(optimizer)
    return 2 / (1 / alone + 1 / rates.updates(optimizer, busy=True)) if beside_states else alone


STACK_TOUCHES = {OpKind.FORWARD: 3, OpKind.BACKWARD: 3}
"""Stacked experts are read, and their accumulators with what adapters add written and read, which
takes longer than the small products. Backward writes the gradients of these accumulators and reads
them twice.
"""
ADAPTER_TOUCHES = {OpKind.FORWARD: 2.5, OpKind.BACKWARD: 3.0}
"""How many times the products of an adapter's factors move the features of their layer. The factors
are so small that their products take as long as the device's memory takes for that (measured:
docs/performance.md).
"""


class _Pass(NamedTuple):
    """Cost of a pass over a block in multiples of a forward, but for its matrix products."""

    of: OpKind
    other: float
    attention: float


_FORWARD = _Pass(OpKind.FORWARD, 1.0, 1.0)
_BACKWARD = _Pass(OpKind.BACKWARD, 2.0, 2.5)
"""Attention has five matrix products in backward and two in forward."""


class Cost:
    """Estimates the seconds of the parts of a step, for one micro-batch."""

    def __init__(
        self,
        shape: ModelShape,
        rates: Rates,
        micro_batch: MicroBatch,
        compiled: bool,
        graphs: bool = False,
    ):
        self.shape = shape
        self.rates = rates
        self._graphs = graphs
        self._micro_batch = micro_batch
        self._compiled = compiled
        self._compiles_blocks = compiled and not micro_batch.tile_tokens
        self.hidden_bytes = micro_batch.tokens * shape.hidden_width * shape.item_bytes
        self._numel = {unit.name: unit.gradient_numel for unit in shape.units}
        self._flops = {
            unit.name: unit.state_counts.orthogonalization_flops(shape.optimizer)
            for unit in shape.units
        }
        all_products = (self.products(unit.name, unit.gradient_numel) for unit in shape.units)
        self.first_products = [0.0, *itertools.accumulate(all_products)]
        """Seconds of the products of matrices in updates of the first n units, for every n."""
        self._shared = {unit.name: unit.shared_count for unit in shape.blocks}
        self._disk_bytes = {
            unit.name: sum(unit.state_counts.bytes(shape.optimizer).values()) / max(1, unit.numel)
            for unit in shape.units
        }
        """Bytes that the optimizer's states of an element of each unit take, on average."""
        # On the CPU the overhead already accounts for the slowness of small products.
        slow = 0 if rates.overhead else HALF_SPEED_WIDTH
        at_width = shape.hidden_width / (shape.hidden_width + slow)
        at_measured = MEASURED_WIDTH / (MEASURED_WIDTH + slow)
        self._matmul = rates.matmul * min(1.0, at_width / at_measured)
        self._attention, self._unpacking = self._attention_seconds()
        self._forward = {
            unit.name: max(
                self._pass(unit, unit.called_count, _FORWARD),
                self._launch_block(OpKind.FORWARD),
            )
            for unit in shape.blocks
        }
        # A backward has a product for the gradient of the inputs of each matrix, and another one
        # for the gradient of the matrix.
        self._backward = {
            unit.name: max(
                self._pass(
                    unit,
                    unit.called_count + _with_gradient(unit) + self._run_again(unit),
                    _BACKWARD,
                ),
                self._launch_block(OpKind.BACKWARD),
            )
            for unit in shape.blocks[shape.forward_blocks :]
        }
        self.first_forwards = [0.0, *itertools.accumulate(self._forward.values())]
        """Seconds of a forward through the first n blocks, for every n."""
        self.passes = (
            sum(self._forward.values())
            + sum(self._backward.values())
            + sum(self.added(unit.name, GRADIENT_BYTES) for unit in shape.blocks)
        )
        """Seconds of forward and of backward of all blocks."""
        less = GRADIENT_BYTES - FIRST_GRADIENT_BYTES
        self.saved_by_first = sum(self.gradient(unit.name, less) for unit in shape.blocks)
        """Seconds that they take less where an accumulator begins."""

    def launch(self, kind: OpKind) -> float:
        """Returns the seconds that launching the operations around the blocks takes. A GPU may
        finish each operation before the next one is launched, unless blocks are recorded: then
        launching is far ahead of it.
        """
        return 0.0 if self._graphs else BLOCK_CALLS[kind] * self.rates.call

    def _launch_block(self, kind: OpKind) -> float:
        return (GRAPH_CALLS if self._graphs else BLOCK_CALLS[kind]) * self.rates.call

    def forward(self, block: str) -> float:
        return self._forward[block]

    def backward(self, block: str) -> float:
        return self._backward[block]

    @property
    def attention(self) -> float:
        """Seconds that a recompute takes less if a block's attention does not run."""
        return self._attention

    def attention_bytes(self, of_token: int) -> int:
        """Returns the bytes of what attention returned, which takes that number for each token."""
        return self._micro_batch.tokens * of_token

    def _attention_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a block's attention in forward, and of the copies that packed rows
        need around the variable-length kernel.
        """
        shape, rates, micro_batch = self.shape, self.rates, self._micro_batch
        sequences = micro_batch.sequences * micro_batch.rows
        flops = shape.attention.flops(sequences, micro_batch.sequence_length)
        if not micro_batch.varlen:
            return flops / rates.attention, 0.0
        width = shape.attention.width + PACKED_WIDTH * shape.attention.heads
        features = micro_batch.tokens * width
        return flops / rates.packed_attention, features * PACKED_BYTES / 3 / rates.device_memory

    def _pass(self, unit: UnitShape, parameters: int, kind: _Pass) -> float:
        """Returns the seconds of a pass over a block. parameters: number that a token passes
        through in all matrix products, if it passes through all of the block.
        """
        rates, times = self.rates, kind.other
        tokens = self._micro_batch.tokens
        slow_tokens = 0 if rates.overhead else HALF_SPEED_TOKENS
        matmul = self._matmul * tokens / (tokens + slow_tokens)
        compiled = self._compiles_blocks
        activations = unit.compiled_activations if compiled else unit.activations
        sequences = self._micro_batch.sequences * self._micro_batch.rows
        kept = activations.of(sequences, self._micro_batch.sequence_length)
        # Kept tensors are written and read. In a compiled block, recomputed tensors are neither.
        touched = times * (1 if compiled else 2) * kept
        adapters = ADAPTER_TOUCHES[kind.of] * unit.adapter_features * tokens
        adapters += STACK_TOUCHES[kind.of] * unit.adapted_numel
        return (
            2 * parameters * self.shape.block_share * tokens / matmul
            + kind.attention * self._attention
            + adapters * self.shape.item_bytes / rates.device_memory
            + times * self._unpacking
            + touched / rates.device_memory
            + times * rates.overhead
            + (0.0 if rates.overhead else BLOCK_KERNELS[kind.of] * KERNEL_SECONDS)
        )

    def _run_again(self, unit: UnitShape) -> int:
        """Returns the parameters of the parts of a block that backward runs again in sequence
        chunks.
        """
        if not self._micro_batch.tile_tokens or unit.tiled is None:
            return 0
        return round(unit.tiled.parameter_count)

    @property
    def state_bytes(self) -> float:
        """Bytes of everything that the optimizer needs for one parameter."""
        return self.shape.states.state_item_bytes

    def in_place(self, numel: int) -> float:
        """Returns the seconds in which `numel` elements on the device are updated in place, not
        counting products of matrices.
        """
        return numel * 2 * self.state_bytes / self.rates.device_memory

    def products(self, unit: str, numel: int) -> float:
        """Returns the seconds of the products of matrices where the device updates `numel`
        elements of a unit.
        """
        return self._flops[unit] * numel / max(1, self._numel[unit]) / self.rates.matmul

    def on_host(self, unit: str, numel: int, beside_states: bool) -> float:
        """Returns the seconds in which the host updates `numel` elements of a unit.
        beside_states: as for `host_rate`.
        """
        flops, optimizer = self._flops[unit], self.shape.optimizer
        if not OPTIMIZERS[optimizer].orthogonalizes:
            return numel / host_rate(self.rates, optimizer, beside_states)
        measured = (MEASURED_SIDE, MEASURED_SIDE)
        work = flops / orthogonalization_flops(measured) * math.prod(measured)
        work *= numel / max(1, self._numel[unit])
        others = numel / host_rate(self.rates, ADAMW, beside_states)
        return others + work / self.rates.updates(optimizer)

    def carried(self, kind: OpKind, numel: int, early: bool = False) -> float:
        """Returns the seconds of a copy of states, which shares the bus with other copies. early:
        the copy begins before the first update.
        """
        item = PLANE_ITEM_BYTES[self.shape.dtype]
        weight, grad = item["weight_high"], item["grad"]
        h2d = BUS_SHARE * (self.rates.h2d if early else self.rates.h2d_busy)
        match kind:
            case OpKind.FETCH_STATES:
                return numel * (self.state_bytes - grad) / h2d
            case OpKind.FETCH_GRADIENT:
                return numel * grad / h2d
            case OpKind.OFFLOAD_WEIGHTS:
                return numel * weight / self.rates.d2h_busy
        return numel * (self.state_bytes - grad - weight) / self.rates.d2h_busy

    def moment_bytes(self, unit: str, numel: int) -> float:
        """Returns the bytes of the optimizer's states of `numel` elements of a unit."""
        return numel * self._disk_bytes[unit]

    def on_disk(self, lane: Lane, size: float) -> float:
        """Returns the seconds in which a number of bytes of moments are read from the disk, or
        written. Both happen at once.
        """
        rate = self.rates.disk_read if lane == Lane.READ else self.rates.disk_write
        return size / (rate or ASSUMED_RATE)

    def block_inputs_on_disk(self, lane: Lane, count: int) -> float:
        """Returns the seconds in which a number of block inputs are read from the disk, or written.
        They are written during forward and read during backward, so each has the disk alone.
        """
        rates = self.rates
        rate = rates.disk_read_alone if lane == Lane.READ else rates.disk_write_alone
        return count * self.hidden_bytes / (rate or ASSUMED_RATE)

    def gradient(self, unit: str, touches: int) -> float:
        """Returns the seconds of work on a unit's fp32 accumulator. touches: bytes that are read or
        written for each element.
        """
        return self._numel[unit] * touches / self.rates.device_memory

    def added(self, block: str, touches: int) -> float:
        """Returns the seconds that adding a block's gradients to accumulators takes. touches: as
        above, for its own accumulator. What blocks share is added to an accumulator that another op
        has begun.
        """
        shared = self._shared[block] * GRADIENT_BYTES / self.rates.device_memory
        return self.gradient(block, touches) + shared

    def loss(self, trains: bool = True) -> float:
        """Returns the seconds of forward and backward of the head on all tokens. trains: False for
        a pass without gradients.
        """
        shape, tokens = self.shape, float(self._micro_batch.tokens)
        units = [shape.head, shape.embed] if shape.tied else [shape.head]
        shared = shape.embed.shared_count if shape.tied else 0  # the head does not use it
        alone = sum(unit.parameter_count for unit in units) - shared
        again = trains and self._micro_batch.head_again
        passed = (1 + trains + again) * alone
        if trains:
            passed += sum(unit.trained_count for unit in units) - shared
        logit_bytes = shape.compiled_logit_bytes if self._compiled else shape.logit_bytes
        memory = self.rates.device_memory
        work = (
            tokens * passed * 2 / self._matmul
            + tokens * shape.vocab_size * logit_bytes * (1 + trains + again) / memory
            + (self.gradient(HEAD, 8) if trains else 0.0)
        )
        return max(work, self.launch(OpKind.FORWARD))


def _with_gradient(unit: UnitShape) -> int:
    """Returns how many elements have a gradient in a block: stacked experts with adapters, too."""
    return unit.trained_count + unit.shared_count + unit.adapted_numel


def largest_product(shape: ModelShape, tokens: int) -> float:
    """Returns the FLOPs of the largest matrix product of a block on `tokens` tokens."""
    return 2.0 * tokens * shape.hidden_size * max(unit.widest for unit in shape.blocks)
