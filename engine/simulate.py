"""`simulate`: when every op of a plan would run, from how long each takes. Pure arithmetic, no torch.

Lanes are what the backends are: each runs its ops in plan order, an op starts once its lane is free and all that it waits
for has ended. `op_seconds` estimates how long an op takes from the rates of a machine and the shape of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.plan import COMPUTE, EMBED, HEAD, LANES, Op, StepPlan
from engine.shape import ModelShape

_STEPS = 4
"""Steps in a row after which the time of one no longer depends on the first."""


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, measured: bytes of the two directions of the bus, FLOPs of large matrix products,
    bytes that the device's memory moves (read and written), parameters that AdamW updates."""

    h2d: float
    d2h: float
    matmul: float
    device_memory: float
    adamw: float


@dataclass(frozen=True)
class Simulated:
    """A step in the steady state."""

    seconds: float
    """From one step's home to the next one's."""
    busy: dict[str, float]
    """Seconds of work by lane."""
    starts: tuple[float, ...]
    """When each op begins, in seconds from the first op of its step, in plan order."""

    @property
    def exposed(self) -> float:
        """Seconds in which COMPUTE had nothing to do."""
        return max(0.0, self.seconds - self.busy[COMPUTE])


def simulate(plan: StepPlan, seconds_of: Callable[[Op], float], inline: bool = False) -> Simulated:
    """`seconds_of`: how long an op runs on its lane. inline: all lanes are one thread, as on the CPU."""
    durations = [seconds_of(op) for op in plan.ops]
    free = dict.fromkeys(LANES, 0.0)
    previous: Sequence[float] = ()
    homes, starts = [0.0], []
    for _ in range(_STEPS):
        starts, ends = [], []
        for op, duration in zip(plan.ops, durations):
            lane = COMPUTE if inline else op.lane
            start = max([free[lane], *(ends[k] for k in op.waits)]
                        + ([previous[k] for k in op.waits_previous] if previous else []))
            starts.append(start)
            ends.append(start + duration)
            free[lane] = start + duration
        homes.append(max(ends))
        previous = ends
    busy = {lane: sum(d for op, d in zip(plan.ops, durations) if op.lane == lane) for lane in LANES}
    begin = min(starts, default=0.0)
    return Simulated(homes[-1] - homes[-2], busy, tuple(start - begin for start in starts))


# ---------------------------------------------------------------------- how long an op takes

def op_seconds(plan: StepPlan, shape: ModelShape, rates: Rates, rows: int, row_length: int,
               loss_share: float = 1.0) -> Callable[[Op], float]:
    """Seconds of each op of `plan`, for micro-batches of `rows` full rows.

    An op of COMPUTE takes the time of its matrix products and that of its other traffic: every byte that autograd would
    keep of a block is written once and read once in a pass over it, and twice that in a backward. loss_share: tokens
    that carry loss, of all.
    """
    tokens, item = rows * row_length, shape.item_bytes
    sizes = {unit.name: unit for unit in shape.units}
    share = block_share(shape)

    def copy(elements: float, rate: float) -> float:
        return elements * item / rate

    def block(unit: str, passes: int) -> float:
        matrices = 2 * sizes[unit].parameter_count * share * tokens
        traffic = 2 * sizes[unit].activations.of(rows, row_length)
        return passes * ((matrices + attention_flops(shape, rows, row_length)) / rates.matmul
                         + traffic / rates.device_memory)

    def gradient(unit: str, touches: int) -> float:
        """Of a unit's fp32 sum and its rounding: bytes touched per element."""
        return sizes[unit].numel * touches / rates.device_memory

    def loss(op: Op) -> float:
        positions, tail = tokens * loss_share, shape.head.parameter_count + (shape.embed.parameter_count if shape.tied else 0)
        training = op.grad is not None
        return (positions * tail * (6 if training else 2) / rates.matmul
                + positions * shape.vocab_size * shape.logit_bytes * 2 / rates.device_memory
                + (gradient(HEAD, 8) if training else 0.0))

    def seconds(op: Op) -> float:
        hidden = tokens * shape.hidden_size
        match op.kind:
            case "prefetch" | "fetch_grad":
                return copy(sizes[op.unit].numel, rates.h2d)
            case "offload":
                return copy(sizes[op.unit].numel, rates.d2h)
            case "store_boundary":
                return copy(hidden, rates.d2h)
            case "fetch_boundary":
                return copy(hidden, rates.h2d)
            case "update":
                return sizes[op.unit].numel / rates.adamw
            case "forward":
                return block(op.unit, 1)
            case "backward":
                return block(op.unit, 2 if op.unit in plan.kept_units else 3) + gradient(op.unit, 8 + item)
            case "loss":
                return loss(op)
            case "embed":
                return 2 * hidden * item / rates.device_memory
            case "embed_backward":
                return 4 * hidden * item / rates.device_memory + gradient(EMBED, 8 + item)
            case "reduce":
                return gradient(op.unit, 8 + item)
        return 0.0

    return seconds


def block_share(shape: ModelShape) -> float:
    """Share of the parameters of the blocks that a token passes through: less than 1 in a mixture of experts."""
    blocks = sum(unit.parameter_count for unit in shape.blocks)
    outside = shape.head.parameter_count + shape.embed.parameter_count
    return min(1.0, max(0.0, (shape.active_parameters - outside) / blocks)) if blocks else 0.0


def attention_flops(shape: ModelShape, rows: int, row_length: int) -> float:
    """FLOPs of the attention of one block in a forward pass, of two matrix products that causality halves."""
    seen = min(row_length, shape.sliding_window or row_length)
    return 2.0 * rows * row_length * seen * shape.hidden_size


def step_flops(shape: ModelShape, rows: int, row_length: int, recomputed: int) -> dict[str, float]:
    """FLOPs of a step of `rows` full rows by three counts: `parameters`, 6 for each parameter that a token passes
    through; `model`, the matrix products and the causal attention of forward and backward, the embedding's look-up left
    out; `hardware`, the same and the second forward of `recomputed` blocks."""
    tokens = rows * row_length
    outside = 0 if shape.tied else shape.embed.parameter_count
    matrices = 6 * (shape.active_parameters - outside) * tokens
    attention = 3 * attention_flops(shape, rows, row_length)
    share = block_share(shape)
    again = sum(2 * unit.parameter_count * share * tokens + attention / 3 for unit in shape.blocks[:recomputed])
    model = matrices + attention * len(shape.blocks)
    return {"parameters": 6.0 * shape.active_parameters * tokens, "model": model, "hardware": model + again}

