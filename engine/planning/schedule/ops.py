"""A training step is a list of ops in order, as plain data. No torch.

- An op runs on one lane. Ops of one lane run in plan order.
- Ops on different lanes are ordered by `waits` only.
- Every op declares what it reads and writes. From these declarations `verify_plan` proves, without
  running anything, that no op reads a buffer before it is filled or overwrites one that is still
  needed, within a step and across two consecutive steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from engine.planning.schedule.buffers import Buffer, Content, Word


class Lane(Word):
    """A lane runs its ops one after the other, in plan order, while other lanes run theirs."""

    H2D = "H2D"
    COMPUTE = "COMPUTE"
    D2H = "D2H"
    HOST = "HOST"
    STATES_IN = "STATES IN"
    UPDATE = "UPDATE"
    STATES_OUT = "STATES OUT"
    GRADIENTS_OUT = "GRADIENTS OUT"
    COLLECTIVE = "COLLECTIVE"
    READ = "READ"
    WRITE = "WRITE"


UPDATE_LANES = (Lane.STATES_IN, Lane.UPDATE, Lane.STATES_OUT, Lane.GRADIENTS_OUT)
"""Lanes of the optimizers: the first three of those on the device, the last one of those on the
host, to which it sends kept gradients. They have no ops in other plans.
"""
DISK_LANES = (Lane.READ, Lane.WRITE)
"""Lanes that read moments and block inputs from the disk and write them. They have no ops in other
plans.
"""
RARE_LANES = (*UPDATE_LANES, Lane.COLLECTIVE, *DISK_LANES)
"""Lanes with ops in some plans only. COLLECTIVE is that of plans for several ranks."""


class OpKind(Word):
    """The kind of an op says what it does. The values are written to run records."""

    PREFETCH = "prefetch"
    ALL_GATHER = "all_gather"
    BARRIER = "barrier"
    EMBED = "embed"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    OFFLOAD_BLOCK_INPUT = "offload_block_input"
    FETCH_BLOCK_INPUT = "fetch_block_input"
    WRITE_BLOCK_INPUT = "write_block_input"
    READ_BLOCK_INPUT = "read_block_input"
    LOSS = "loss"
    BACKWARD = "backward"
    EMBED_BACKWARD = "embed_backward"
    FETCH_GRAD = "fetch_grad"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    OFFLOAD = "offload"
    OFFLOAD_KEPT_GRADIENT = "offload_kept_gradient"
    SUMMARY = "summary"
    CLIP = "clip"
    UPDATE = "update"
    UPDATE_MOMENTS = "update_moments"
    READ_STATES = "read_states"
    WRITE_STATES = "write_states"
    FETCH_STATES = "fetch_states"
    FETCH_GRADIENT = "fetch_gradient"
    DEVICE_UPDATE = "device_update"
    OFFLOAD_WEIGHTS = "offload_weights"
    OFFLOAD_STATES = "offload_states"
    UPDATE_IN_PLACE = "update_in_place"
    OPTIMIZER_STEP = "optimizer_step"


class MainGrad(Word):
    """Where the gradients of all rounds are accumulated, and how often they are rounded."""

    VERTICAL = "vertical"
    """One round, so that each unit has one fp32 accumulator and one rounding."""
    DEVICE = "device"
    """Accumulators of all units that stay on the device over the rounds and are rounded once."""
    SHARDS = "shards"
    """The same in shards: each round adds up the accumulators of all ranks, and a rank keeps its
    part.
    """
    HOST = "host"
    """Accumulators that each round rounds to bf16 and adds to those on the host."""


class Keeps(Word):
    """A forward keeps this of its block for the backward."""

    NOTHING = "nothing"
    """Nothing: the pass has no backward, or the block is recomputed from the block before it."""
    BLOCK_INPUT = "input"
    ACTIVATIONS = "activations"


Uses = tuple[tuple[Buffer, Content], ...]
"""Buffers that an op reads or writes, each with the content that it expects or leaves there."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op is work of one unit on one lane. Each kind has its own class, with the
    fields that it needs.
    """

    kind: ClassVar[OpKind]
    lane: ClassVar[Lane]

    index: int
    """Position of the op in the plan."""
    unit: str
    reads: Uses = ()
    writes: Uses = ()
    waits: tuple[int, ...] = ()
    """Ops of this step, on other lanes, that must have finished before the op starts."""
    waits_previous: tuple[int, ...] = ()
    """Ops of the step before that must have finished too. Plans of consecutive steps are equal, so
    indices into this plan can name them.
    """

    @property
    def label(self) -> str:
        """The op in words, such as `forward block 3[0]`."""
        at = f"[{self.micro_batch}]" if isinstance(self, OfMicroBatch) else ""
        return f"{self.kind} {self.unit}{at}"


@dataclass(frozen=True, slots=True)
class OfMicroBatch(Op):
    """An op on one micro-batch."""

    micro_batch: int = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class WithMainGrad(OfMicroBatch):
    """An op with a backward: it computes from the weights in `slot` and adds the gradient to the
    accumulator in `grad`, which is None for a frozen unit.
    """

    slot: Buffer = field(kw_only=True)
    grad: Buffer | None = field(kw_only=True, default=None)
    first: bool = field(kw_only=True)
    """Whether the op writes the first gradient to `grad` rather than adding to the accumulator
    there.
    """


@dataclass(frozen=True, slots=True)
class OfChunk(Op):
    """An op on one chunk of the planes of a unit whose optimizer runs on the device."""

    chunk: tuple[int, int] = field(kw_only=True)
    """Elements of the planes at which the chunk begins and before which it ends."""
    buffer: Buffer = field(kw_only=True)
    """Update buffer in which the chunk is fetched, updated and sent back."""


# ---------------------------------------------------------------------- the kinds, lane by lane


@dataclass(frozen=True, slots=True)
class Prefetch(Op):
    """Brings the `weight_high` plane of the unit to its slot. With several ranks it brings the
    shard of this rank, or all of it (`whole`).
    """

    kind, lane = OpKind.PREFETCH, Lane.H2D
    slot: Buffer = field(kw_only=True)
    whole: bool | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class FetchBlockInput(OfMicroBatch):
    """Brings a block input from the host to a ring buffer. One that was on the disk is in the
    buffer `host` there.
    """

    kind, lane = OpKind.FETCH_BLOCK_INPUT, Lane.H2D
    ring: Buffer = field(kw_only=True)
    host: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class FetchGrad(Op):
    """Brings the gradient plane to a staging buffer, so that the next round can add to the
    accumulator that is kept on the host.
    """

    kind, lane = OpKind.FETCH_GRAD, Lane.H2D
    staging: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Embed(OfMicroBatch):
    """The capture pass: from token ids it computes the first hidden state and the arguments of
    every block.
    """

    kind, lane = OpKind.EMBED, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Forward(OfMicroBatch):
    """Runs a block on its input. `ring` is the buffer from which a block input that is kept is sent
    to the host.
    """

    kind, lane = OpKind.FORWARD, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)
    keeps: Keeps = field(kw_only=True)
    ring: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class Loss(WithMainGrad):
    """Runs final norm, head and loss, forward and (in training) backward, in chunks."""

    kind, lane = OpKind.LOSS, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class Recompute(OfMicroBatch):
    """Runs a block again on its input and keeps all activations. Its output is the input of the
    next block.
    """

    kind, lane = OpKind.RECOMPUTE, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)
    following: str = field(kw_only=True)
    """The next block."""
    ring: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class Backward(WithMainGrad):
    """Recomputes the block from its input if that is all that was kept, then goes backward."""

    kind, lane = OpKind.BACKWARD, Lane.COMPUTE
    recomputes: bool = field(kw_only=True)
    ring: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class EmbedBackward(WithMainGrad):
    """Runs the capture pass again with gradients on, then goes backward.

    Where it has a `chunk`, it goes back to the vectors that were looked up, and adds those of some
    rows of the table to the accumulator. The ops of later chunks find the gradients of these
    vectors.
    """

    kind, lane = OpKind.EMBED_BACKWARD, Lane.COMPUTE
    chunk: tuple[int, int] | None = field(kw_only=True, default=None)
    """Elements of the unit at which the rows begin and before which they end."""

    @property
    def captures(self) -> bool:
        """Whether the op runs the capture pass."""
        return self.chunk is None or self.chunk[0] == 0


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """Rounds the fp32 accumulator into a staging buffer."""

    kind, lane = OpKind.REDUCE, Lane.COMPUTE
    grad: Buffer = field(kw_only=True)
    staging: Buffer = field(kw_only=True)
    adds: bool = field(kw_only=True)
    """Whether the op adds the accumulator to that of the earlier rounds, which is in the staging
    buffer.
    """
    last: bool = field(kw_only=True)
    """Whether the op belongs to the last round, so that it also computes the norm."""
    chunk: tuple[int, int] | None = field(kw_only=True, default=None)
    """Elements of the unit that the accumulator is for, from the first up to the second."""


@dataclass(frozen=True, slots=True)
class Summary(Op):
    """Computes the clip factor on the device, and copies loss and norms to pinned memory."""

    kind, lane = OpKind.SUMMARY, Lane.COMPUTE


@dataclass(frozen=True, slots=True)
class UpdateInPlace(Op):
    """Runs the optimizer on the planes of a unit that lives on the device, where they are. It is on
    COMPUTE, so the next forward pass waits for no other lane.
    """

    kind, lane = OpKind.UPDATE_IN_PLACE, Lane.COMPUTE
    slot: Buffer = field(kw_only=True)
    staging: Buffer = field(kw_only=True)
    """Buffer with the rounded gradient."""


@dataclass(frozen=True, slots=True)
class OffloadBlockInput(OfMicroBatch):
    """Sends a block input from its ring buffer to the host. One that is written to the disk passes
    through the buffer `host` there.
    """

    kind, lane = OpKind.OFFLOAD_BLOCK_INPUT, Lane.D2H
    ring: Buffer = field(kw_only=True)
    host: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class Offload(Op):
    """Sends a rounded gradient from its staging buffer to the gradient plane."""

    kind, lane = OpKind.OFFLOAD, Lane.D2H
    staging: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class OffloadKeptGradient(Op):
    """Sends a chunk of a kept gradient to a ring buffer on the host. It has a lane of its own,
    because it waits for that buffer, which no block input may wait for.
    """

    kind, lane = OpKind.OFFLOAD_KEPT_GRADIENT, Lane.GRADIENTS_OUT
    chunk: tuple[int, int] = field(kw_only=True)
    """Elements of the unit at which the chunk begins and before which it ends."""
    staging: Buffer = field(kw_only=True)
    ring: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Clip(Op):
    """Reads the clip factor on the host. A loss or norm that is not finite stops the run here."""

    kind, lane = OpKind.CLIP, Lane.HOST


@dataclass(frozen=True, slots=True)
class OfDiskChunk(Op):
    """An op on one chunk of a unit whose moments are on the disk."""

    chunk: tuple[int, int] = field(kw_only=True)
    """Elements of the unit at which the chunk begins and before which it ends."""
    states: Buffer = field(kw_only=True)
    """Buffer on the host in which the moments of the chunk are updated."""


@dataclass(frozen=True, slots=True)
class ReadStates(OfDiskChunk):
    """Reads the moments of the chunk from the disk."""

    kind, lane = OpKind.READ_STATES, Lane.READ


@dataclass(frozen=True, slots=True)
class WriteStates(OfDiskChunk):
    """Writes the updated moments of the chunk to the disk."""

    kind, lane = OpKind.WRITE_STATES, Lane.WRITE


@dataclass(frozen=True, slots=True)
class OptimizerStep(Op):
    """End of all updates of a step: it does no work, and waits until all updated chunks are on the
    host.
    """

    kind, lane = OpKind.OPTIMIZER_STEP, Lane.HOST


@dataclass(frozen=True, slots=True)
class FetchStates(OfChunk):
    """Brings all planes of the chunk except the gradient to its update buffer."""

    kind, lane = OpKind.FETCH_STATES, Lane.STATES_IN


@dataclass(frozen=True, slots=True)
class FetchGradient(OfChunk):
    """Brings the gradient plane of the chunk to its update buffer."""

    kind, lane = OpKind.FETCH_GRADIENT, Lane.STATES_IN


@dataclass(frozen=True, slots=True)
class DeviceUpdate(OfChunk):
    """Runs the optimizer in the update buffer. If `staging` still holds the gradient, it is read
    from there. If the unit is still in a slot, the weights are also written to `slot`.
    """

    kind, lane = OpKind.DEVICE_UPDATE, Lane.UPDATE
    staging: Buffer | None = field(kw_only=True, default=None)
    slot: Buffer | None = field(kw_only=True, default=None)


@dataclass(frozen=True, slots=True)
class OffloadWeights(OfChunk):
    """Sends updated weights to their plane on the host. It comes before the copy of the other
    planes, because a prefetch may wait for the weights.
    """

    kind, lane = OpKind.OFFLOAD_WEIGHTS, Lane.STATES_OUT


@dataclass(frozen=True, slots=True)
class OffloadStates(OfChunk):
    """Sends the other updated planes to the host."""

    kind, lane = OpKind.OFFLOAD_STATES, Lane.STATES_OUT


# ---------------------------------------------------------------------- host updates

# The ops in which the host runs the optimizer are here (lane HOST).


@dataclass(frozen=True, slots=True)
class Update(Op):
    """Runs the optimizer on the planes of the unit. Where gradients are kept on the GPU, it does so
    for one `chunk`, whose gradient is in `ring`. Where the moments of the unit are on the disk, it
    does so for one `chunk`, whose moments are in `states`.
    """

    kind, lane = OpKind.UPDATE, Lane.HOST
    chunk: tuple[int, int] | None = field(kw_only=True, default=None)
    ring: Buffer | None = field(kw_only=True, default=None)
    states: Buffer | None = field(kw_only=True, default=None)
    after_weights: bool | None = field(kw_only=True, default=None)
    """Whether the moments stay as they are, and an `UpdateMoments` follows; None where they do
    not.
    """


@dataclass(frozen=True, slots=True)
class UpdateMoments(Op):
    """Updates the moments of a unit, or of one `chunk`, whose weights are updated already."""

    kind, lane = OpKind.UPDATE_MOMENTS, Lane.HOST
    chunk: tuple[int, int] | None = field(kw_only=True, default=None)


# ---------------------------------------------------------------------- rank ops

# These ops exchange weights and gradients between ranks, on the lane COLLECTIVE. No torch.


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """Completes the weights in a slot: every rank of a node has brought its own shard there, and
    gets those of the others.
    """

    kind, lane = OpKind.ALL_GATHER, Lane.COLLECTIVE
    slot: Buffer = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """Wait until every rank of a node has updated its shard of a unit. Each rank may then read the
    unit whole from memory that all of them share.
    """

    kind, lane = OpKind.BARRIER, Lane.COLLECTIVE


@dataclass(frozen=True, slots=True)
class ReduceScatter(Op):
    """Adds the fp32 accumulators of all ranks on all nodes, or the gradients in bf16 that take
    their place (`StepPlan.without_main_grad`), in fp32. On each node, every rank gets its own shard
    of the result, rounds it into a staging buffer and computes its norm.

    Where a step adds up accumulators after each round, a rank adds its shard to that of the earlier
    rounds, `total`, and rounds the result of the last one alone.
    """

    kind, lane = OpKind.REDUCE_SCATTER, Lane.COLLECTIVE
    grad: Buffer = field(kw_only=True)
    staging: Buffer | None = field(kw_only=True, default=None)
    """Staging buffer; None in rounds before the last."""
    total: Buffer | None = field(kw_only=True, default=None)
    first: bool | None = field(kw_only=True, default=None)
    """Whether there is no earlier round; None without `total`."""


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """Adds the losses of all ranks, and the squared norms of those of a node, which have all
    shards.
    """

    kind, lane = OpKind.ALL_REDUCE, Lane.COLLECTIVE
