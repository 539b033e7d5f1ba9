"""How long the ops of a step take, from the rates of a machine and the shape of a model, and how
many FLOPs they are. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from engine.machine.rates import PACKED_BYTES, PACKED_WIDTH, Rates
from engine.model.layout import PLANE_ITEM_BYTES
from engine.model.shape import ModelShape, UnitShape
from engine.plan.buffers import EMBED, HEAD
from engine.plan.choices import PlanChoices
from engine.plan.ops import (
    Backward,
    DeviceUpdate,
    Embed,
    EmbedBackward,
    FetchBoundary,
    FetchGrad,
    Forward,
    GradientSum,
    Loss,
    Offload,
    OfPiece,
    Op,
    OpKind,
    Prefetch,
    Reduce,
    StepPlan,
    StoreBoundary,
    Summary,
    Update,
)

BUS_SHARE = 0.9
"""Of the bus to the device, what the copies of states reach: their parts make space for prefetches.
"""
GRADIENT_BYTES = 27
"""Of the device's memory, in the time that a backward takes for each parameter beside what grows
with its tokens: the gradient is written, read and added to an fp32 sum (measured:
docs/performance.md).
"""
BLOCK_CALLS = {OpKind.FORWARD: 320, OpKind.BACKWARD: 200}
"""Operations in whose time one block is launched, about; in backward torch launches most of it from
C++.
"""
HALF_SPEED_TOKENS = 300
"""Tokens at which matrix products of a block reach half of their speed on a GPU, about."""


def op_seconds(
    plan: StepPlan,
    shape: ModelShape,
    rates: Rates,
    rows: int,
    row_length: int,
    varlen: bool = False,
    loss_share: float = 1.0,
) -> Callable[[Op], float]:
    """Seconds of each op of `plan`, for micro-batches of `rows` full rows.

    An op of COMPUTE takes the time of its matrix products, of its attention and of its other
    traffic: every byte that autograd keeps of a block is written once and read once in a pass over
    it, and twice that in a backward; compiled, half of that. On a GPU it takes no less than
    launching it does. varlen: attention goes document by document in the variable-length kernel; a
    row is taken for one document. loss_share: tokens that carry loss, of all.
    """
    sizes = {unit.name: unit for unit in shape.units}
    cost = Cost(shape, rates, rows, row_length, plan.compiled, varlen)
    summary = next((op.index for op in plan.ops if isinstance(op, Summary)), 0)
    adamw = host_rate(rates, bool(plan.device_homes))

    def seconds(op: Op) -> float:
        match op:
            case Prefetch() | FetchGrad():
                return sizes[op.unit].numel * shape.item_bytes / rates.h2d
            case Offload():
                return sizes[op.unit].numel * shape.item_bytes / rates.d2h
            case DeviceUpdate(piece=(start, stop)):
                return (stop - start) * 2 * cost.state_bytes / rates.device_memory
            case OfPiece(piece=(start, stop)):
                return cost.carried(op.kind, stop - start, early=op.index < summary)
            case StoreBoundary():
                return cost.hidden_bytes / rates.d2h
            case FetchBoundary():
                return cost.hidden_bytes / rates.h2d
            case Update():
                return sizes[op.unit].numel / adamw
            case Forward():
                return cost.forward(op.unit)
            case Backward():
                again = 0.0 if op.unit in plan.kept_units else cost.forward(op.unit)
                return again + cost.backward(op.unit) + cost.gradient(op.unit, GRADIENT_BYTES)
            case Loss():
                return cost.loss(loss_share)
            case Embed():
                return max(2 * cost.hidden_bytes / rates.device_memory, cost.launch(OpKind.FORWARD))
            case EmbedBackward():
                return max(
                    4 * cost.hidden_bytes / rates.device_memory
                    + cost.gradient(EMBED, 8 + shape.item_bytes),
                    cost.launch(OpKind.BACKWARD),
                )
            case Reduce():
                return cost.gradient(op.unit, 8 + shape.item_bytes)
        return 0.0

    return seconds


def step_seconds(cost: Cost, choices: PlanChoices, waited: float) -> float:
    """About how long a step takes, in closed form: fast enough to compare hundreds of choices.
    `simulate` is exact. waited: for updates, as `choose_homes` has it.
    """
    shape, rates = cost.shape, cost.rates
    again = cost.first_forwards[len(shape.blocks) - choices.kept_blocks]
    compute = choices.micro_batches * (cost.passes + again + cost.loss(1.0))
    streamed = sum(
        unit.numel for unit in shape.blocks[: len(shape.blocks) - choices.resident_blocks]
    )
    carried = (2 * choices.rounds * streamed + (shape.plane_numel - streamed)) * shape.item_bytes
    if choices.host_boundaries:
        carried += (
            choices.micro_batches * (len(shape.blocks) - choices.kept_blocks) * cost.hidden_bytes
        )
    gradients = choices.rounds if choices.gradient_sum == GradientSum.HOST else 1
    returned = gradients * shape.plane_numel * shape.item_bytes
    return max(compute, carried / rates.h2d, returned / rates.d2h) + waited


def host_rate(rates: Rates, beside_states: bool) -> float:
    """Parameters a second of AdamW on the host. Beside states on the bus it has the bus for itself
    about half of the time (measured: docs/performance.md).
    """
    return 2 / (1 / rates.adamw + 1 / rates.adamw_busy) if beside_states else rates.adamw


class Cost:
    """Seconds of the parts of a step, for one micro-batch of full rows."""

    def __init__(
        self,
        shape: ModelShape,
        rates: Rates,
        rows: int,
        row_length: int,
        compiled: bool,
        varlen: bool = False,
    ):
        self.shape, self.rates, self.compiled = shape, rates, compiled
        self.rows, self.row_length, self.tokens = rows, row_length, rows * row_length
        self.hidden_bytes = self.tokens * shape.hidden_size * shape.item_bytes
        self._sizes = {unit.name: unit for unit in shape.units}
        self._share = block_share(shape)
        self._attention = attention_flops(shape, rows, row_length) / (
            rates.packed_attention if varlen else rates.attention
        )
        self._unpacking = 0.0
        if varlen:
            features = self.tokens * (shape.attention_width + PACKED_WIDTH * shape.attention_heads)
            self._unpacking = features * PACKED_BYTES / 3 / rates.device_memory
        self._forward = {
            unit.name: max(self._pass(unit, 1.0, 1.0), self.launch(OpKind.FORWARD))
            for unit in shape.blocks
        }
        # Attention multiplies five times in backward and twice in forward.
        self._backward = {
            unit.name: max(self._pass(unit, 2.0, 2.5), self.launch(OpKind.BACKWARD))
            for unit in shape.blocks
        }
        self.first_forwards = [0.0, *itertools.accumulate(self._forward.values())]
        """Of the first blocks, by their number."""
        self.passes = (
            sum(self._forward.values())
            + sum(self._backward.values())
            + sum(self.gradient(unit.name, GRADIENT_BYTES) for unit in shape.blocks)
        )
        """Forward and backward of all blocks."""

    def launch(self, kind: OpKind) -> float:
        """Seconds that the calls of a block take: a GPU may be done with what they ask for before
        they are through.
        """
        return BLOCK_CALLS[kind] * self.rates.call

    def forward(self, block: str) -> float:
        return self._forward[block]

    def backward(self, block: str) -> float:
        return self._backward[block]

    def _pass(self, size: UnitShape, times: float, attention_times: float) -> float:
        # On the CPU it is the overhead that makes small products slow.
        matmul = (
            self.rates.matmul
            * self.tokens
            / (self.tokens + (0 if self.rates.overhead else HALF_SPEED_TOKENS))
        )
        kept = (size.compiled_activations if self.compiled else size.activations).of(
            self.rows, self.row_length
        )
        # Written and read; compiled, what is computed again from it is neither.
        touched = times * (1 if self.compiled else 2) * kept
        return (
            times * 2 * size.parameter_count * self._share * self.tokens / matmul
            + attention_times * self._attention
            + times * self._unpacking
            + touched / self.rates.device_memory
            + times * self.rates.overhead
        )

    @property
    def state_bytes(self) -> int:
        """Of a parameter: everything that its optimizer needs."""
        return sum(PLANE_ITEM_BYTES[self.shape.dtype].values())

    def carried(self, kind: OpKind, numel: int, early: bool = False) -> float:
        """Copies of states, which share the bus with others. early: while nothing is updated yet."""
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

    def gradient(self, unit: str, touches: int) -> float:
        """Of a unit's fp32 sum and its rounding: bytes touched per element."""
        return self._sizes[unit].numel * touches / self.rates.device_memory

    def loss(self, share: float) -> float:
        """Forward and backward of the head; share: of the tokens, those that carry loss."""
        shape, positions = self.shape, self.tokens * share
        tail = shape.head.parameter_count + (shape.embed.parameter_count if shape.tied else 0)
        logit_bytes = shape.compiled_logit_bytes if self.compiled else shape.logit_bytes
        work = (
            positions * tail * 6 / self.rates.matmul
            + positions * shape.vocab_size * logit_bytes * 2 / self.rates.device_memory
            + self.gradient(HEAD, 8)
        )
        return max(work, self.launch(OpKind.FORWARD))


# ---------------------------------------------------------------------- FLOPs

_FORMULA = "6 x parameters that a token passes through x tokens"
PLANNED_FLOPS_FORMULA = f"{_FORMULA} of full rows; recompute not counted"
MEASURED_FLOPS_FORMULA = f"{_FORMULA} (padding and recompute not counted) / seconds"
"""As they are shown: of a step that is planned, and of the rate of one that was run."""


def parameter_flops(active_parameters: int, tokens: int) -> int:
    """FLOPs of forward and backward on so many tokens, by the formula that is shown."""
    return 6 * active_parameters * tokens


def largest_product(shape: ModelShape, tokens: int) -> float:
    """FLOPs of the largest matrix product of a block on so many tokens."""
    return 2.0 * tokens * shape.hidden_size * max(unit.widest for unit in shape.blocks)


def block_share(shape: ModelShape) -> float:
    """Share of the parameters of the blocks that a token passes through: less than 1 in a mixture
    of experts.
    """
    blocks = sum(unit.parameter_count for unit in shape.blocks)
    outside = shape.head.parameter_count + shape.embed.parameter_count
    return min(1.0, max(0.0, (shape.active_parameters - outside) / blocks)) if blocks else 0.0


def attention_flops(shape: ModelShape, rows: int, row_length: int) -> float:
    """FLOPs of the attention of one block in a forward pass, of two matrix products that causality
    halves.
    """
    seen = min(row_length, shape.sliding_window or row_length)
    return 2.0 * rows * row_length * seen * shape.attention_width


def step_flops(shape: ModelShape, rows: int, row_length: int, recomputed: int) -> dict[str, float]:
    """FLOPs of a step of `rows` full rows by three counts: `parameters`, those of
    `parameter_flops`; `model`, the matrix products and the causal attention of forward and
    backward, the embedding's look-up left out; `hardware`, the same and the second forward of
    `recomputed` blocks.
    """
    tokens = rows * row_length
    outside = 0 if shape.tied else shape.embed.parameter_count
    matrices = 6 * (shape.active_parameters - outside) * tokens
    attention = 3 * attention_flops(shape, rows, row_length)
    share = block_share(shape)
    again = sum(
        2 * unit.parameter_count * share * tokens + attention / 3
        for unit in shape.blocks[:recomputed]
    )
    model = matrices + attention * len(shape.blocks)
    return {
        "parameters": float(parameter_flops(shape.active_parameters, tokens)),
        "model": model,
        "hardware": model + again,
    }
