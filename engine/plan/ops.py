"""The ordered ops of one training step as plain data.

An op runs on one lane. Ops of one lane run in plan order; between lanes, only `waits` order them.
Every op declares what it reads and writes, so `validate` can show, without running anything, that
no op reads a buffer before it is filled or overwrites one that is still needed - within a step and
across two consecutive steps.

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from engine.plan.buffers import Buffer, Content, Word


class Lane(Word):
    """One of the things that go on at once; each does its ops one by one, in plan order."""

    H2D = "H2D"
    COMPUTE = "COMPUTE"
    D2H = "D2H"
    HOST = "HOST"
    STATES_IN = "STATES IN"
    UPDATE = "UPDATE"
    STATES_OUT = "STATES OUT"


UPDATE_LANES = (Lane.STATES_IN, Lane.UPDATE, Lane.STATES_OUT)
"""Lanes of optimizers on the device."""


class OpKind(Word):
    """What an op does. The values stand in records of runs."""

    PREFETCH = "prefetch"
    EMBED = "embed"
    FORWARD = "forward"
    STORE_BOUNDARY = "store_boundary"
    FETCH_BOUNDARY = "fetch_boundary"
    LOSS = "loss"
    BACKWARD = "backward"
    EMBED_BACKWARD = "embed_backward"
    FETCH_GRAD = "fetch_grad"
    REDUCE = "reduce"
    OFFLOAD = "offload"
    LEND = "lend"
    RECLAIM = "reclaim"
    SUMMARY = "summary"
    CLIP = "clip"
    UPDATE = "update"
    FETCH_STATES = "fetch_states"
    FETCH_GRADIENT = "fetch_gradient"
    DEVICE_UPDATE = "device_update"
    OFFLOAD_WEIGHTS = "offload_weights"
    OFFLOAD_STATES = "offload_states"
    APPLIED = "home"


class GradientSum(Word):
    """Where gradients add up over the rounds of a step, and how often they are rounded."""

    VERTICAL = "vertical"
    """One round: one fp32 sum, one rounding."""
    DEVICE = "device"
    """fp32 sums of every unit stay on the device over the rounds; one rounding."""
    HOST = "host"
    """One rounding to bf16 a round."""


Uses = tuple[tuple[Buffer, Content], ...]
"""Buffers, with what is in each."""


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work of one unit on one lane. Each kind is a class of its own, with the fields
    that it needs.
    """

    kind: ClassVar[OpKind]
    lane: ClassVar[Lane]

    index: int
    """Place in the plan."""
    unit: str
    reads: Uses = ()
    writes: Uses = ()
    waits: tuple[int, ...] = ()
    """Ops of this step, on other lanes, that must have finished."""
    waits_previous: tuple[int, ...] = ()
    """The same for ops of the step before (plans of consecutive steps are equal)."""

    @property
    def label(self) -> str:
        at = f"[{self.micro_batch}]" if isinstance(self, OfMicroBatch) else ""
        return f"{self.kind} {self.unit}{at}"


@dataclass(frozen=True, slots=True)
class OfMicroBatch(Op):
    """An op on one micro-batch."""

    micro_batch: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class OfSum(OfMicroBatch):
    """An op with a backward: it computes from the weights in `slot` and sums the gradient in
    `grad`.
    """

    slot: Buffer = field(kw_only=True)
    grad: Buffer = field(kw_only=True)
    first: bool = field(kw_only=True)
    """It begins the sum rather than adding to it."""


@dataclass(frozen=True, slots=True)
class OfPiece(Op):
    """An op on one piece of the planes of a unit whose optimizer runs on the device."""

    piece: tuple[int, int] = field(kw_only=True)
    """Elements of the planes, from and to."""
    buffer: Buffer = field(kw_only=True)
    """The update buffer."""


# ---------------------------------------------------------------------- the kinds, lane by lane


@dataclass(frozen=True, slots=True)
class Prefetch(Op):
    """The `weight_high` plane of the unit, to its slot."""

    kind, lane = OpKind.PREFETCH, Lane.H2D
    slot: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class FetchBoundary(OfMicroBatch):
    """A boundary on the host, to a ring buffer."""

    kind, lane = OpKind.FETCH_BOUNDARY, Lane.H2D
    ring: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class FetchGrad(Op):
    """The gradient plane, to a staging buffer: a sum over rounds on the host goes on."""

    kind, lane = OpKind.FETCH_GRAD, Lane.H2D
    staging: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Embed(OfMicroBatch):
    """Capture pass: token ids to the first hidden state and the arguments of every block."""

    kind, lane = OpKind.EMBED, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Forward(OfMicroBatch):
    """A block on its boundary. It keeps the boundary, or all activations; `ring` is where a
    boundary waits for its way to the host.
    """

    kind, lane = OpKind.FORWARD, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)
    ring: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class Loss(OfSum):
    """Final norm, head and loss, forward and (in training) backward, in chunks."""

    kind, lane = OpKind.LOSS, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Backward(OfSum):
    """Recompute from the boundary if needed, then backward."""

    kind, lane = OpKind.BACKWARD, Lane.COMPUTE
    ring: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class EmbedBackward(OfSum):
    """Capture again with gradients on, then backward."""

    kind, lane = OpKind.EMBED_BACKWARD, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """Rounds the fp32 sum into a staging buffer."""

    kind, lane = OpKind.REDUCE, Lane.COMPUTE
    grad: Buffer = field(kw_only=True)
    staging: Buffer = field(kw_only=True)
    adds: bool = field(kw_only=True)
    """To what the rounds before left in the staging buffer."""
    last: bool = field(kw_only=True)
    """Of the last round: it also computes the norm."""


@dataclass(frozen=True, slots=True)
class Lend(Op):
    """Memory of activations becomes spare update buffers."""

    kind, lane = OpKind.LEND, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Reclaim(Op):
    """And the other way round."""

    kind, lane = OpKind.RECLAIM, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Summary(Op):
    """The clip factor on the device; loss and norms to pinned memory."""

    kind, lane = OpKind.SUMMARY, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class StoreBoundary(OfMicroBatch):
    """A ring buffer, to the boundary on the host."""

    kind, lane = OpKind.STORE_BOUNDARY, Lane.D2H
    ring: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Offload(Op):
    """A staging buffer, to the gradient plane."""

    kind, lane = OpKind.OFFLOAD, Lane.D2H
    staging: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """The clip factor on the host. A loss or norm that is not finite stops the run here."""

    kind, lane = OpKind.CLIP, Lane.HOST


@dataclass(frozen=True, slots=True)
class Update(Op):
    """AdamW on the planes of the unit."""

    kind, lane = OpKind.UPDATE, Lane.HOST


@dataclass(frozen=True, slots=True)
class Applied(Op):
    """Nothing: it waits until all pieces are on the host."""

    kind, lane = OpKind.APPLIED, Lane.HOST


@dataclass(frozen=True, slots=True)
class FetchStates(OfPiece):
    """All planes of the piece but the gradient, to its update buffer."""

    kind, lane = OpKind.FETCH_STATES, Lane.STATES_IN


@dataclass(frozen=True, slots=True)
class FetchGradient(OfPiece):
    """The gradient plane of the piece, to its update buffer."""

    kind, lane = OpKind.FETCH_GRADIENT, Lane.STATES_IN


@dataclass(frozen=True, slots=True)
class DeviceUpdate(OfPiece):
    """AdamW in the update buffer, with the gradient of `staging` where that still holds it; into
    `slot` too where the unit is still in one.
    """

    kind, lane = OpKind.DEVICE_UPDATE, Lane.UPDATE
    staging: Buffer | None = field(kw_only=True, default=None)
    slot: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class OffloadWeights(OfPiece):
    """Updated weights, to the plane of the piece. First of all: a prefetch may wait for them."""

    kind, lane = OpKind.OFFLOAD_WEIGHTS, Lane.STATES_OUT


@dataclass(frozen=True, slots=True)
class OffloadStates(OfPiece):
    """The other updated planes, to the planes of the piece."""

    kind, lane = OpKind.OFFLOAD_STATES, Lane.STATES_OUT


OP_TYPES: dict[OpKind, type[Op]] = {
    op.kind: op
    for op in (
        Prefetch,
        FetchBoundary,
        FetchGrad,
        Embed,
        Forward,
        Loss,
        Backward,
        EmbedBackward,
        Reduce,
        Lend,
        Reclaim,
        Summary,
        StoreBoundary,
        Offload,
        Clip,
        Update,
        Applied,
        FetchStates,
        FetchGradient,
        DeviceUpdate,
        OffloadWeights,
        OffloadStates,
    )
}
"""The class of each kind."""


# ---------------------------------------------------------------------- a step


@dataclass(frozen=True)
class StepPlan:
    """One step. `slots`, `grads`, `stagings` and `rings` are the device buffers that the ops use,
    with the units (or boundaries) each must be able to hold.
    """

    ops: tuple[Op, ...]
    slots: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    grads: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    stagings: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    rings: tuple[Buffer, ...] = ()
    kept_units: frozenset[str] = frozenset()
    """Blocks whose activations are kept (no recompute)."""
    compiled: bool = False
    """Blocks and the loss run compiled."""
    device_homes: tuple[str, ...] = ()
    """Units whose optimizer runs on the device."""
    placed: tuple[tuple[str, Buffer], ...] = ()
    """(unit, slot) of those of them whose weights are in a slot when a step ends: they are fetched
    before the first step after everything was applied, and updated there from then on.
    """
    update_buffers: tuple[Buffer, ...] = ()
    spare_buffers: tuple[Buffer, ...] = ()
    """Those of them that are made from memory of activations, from `lend` to the next step's
    `reclaim`.
    """
    piece_numel: int = 0
    """Elements of each plane in one of them."""
    arena: tuple[str, ...] = ()
    """Blocks in the order of their fp32 sums in one stretch of memory, at the front of which the
    update buffers lie: sums are of no use between the end of a step and the first backward of the
    next.
    """


@dataclass(frozen=True)
class Span:
    """When one op ran, in seconds on the backend's clock."""

    op: Op
    start: float
    end: float
