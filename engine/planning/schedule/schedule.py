"""A `StepPlan` is one training step: its ops in order, and the device buffers that they use. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.ops import Op
from engine.planning.schedule.shards import WHOLE, Shards


@dataclass(frozen=True)
class StepPlan:
    """One step: its ops, and the device buffers that they use. `slots`, `grads` and `stagings` map
    each buffer to the units that it must be able to hold; `rings` lists the buffers of block
    inputs.
    """

    ops: tuple[Op, ...]
    slots: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    grads: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    stagings: dict[Buffer, tuple[str, ...]] = field(default_factory=dict)
    rings: tuple[Buffer, ...] = ()
    shards: Shards = WHOLE
    """How planes are divided among ranks, and which of them the plan is of."""
    replicas: int = 1
    """Number of copies of all planes, each on `nodes_per_replica` nodes."""
    nodes_per_replica: int = 1
    """Number of nodes over which the ranks of a replica are spread."""
    gradient_rings: tuple[Buffer, ...] = ()
    """Buffers on the host through which chunks of kept gradients pass."""
    graphs: int = 0
    """Number of micro-batches that exist at once for which forward and backward of blocks are
    replayed as CUDA graphs (`engine.runtime.device`); 0 where each kernel is launched by itself.
    """
    state_rings: tuple[Buffer, ...] = ()
    """Buffers on the host in which chunks of the moments on the disk are updated."""
    disk_chunk_numel: int = 0
    """Most elements of such a chunk."""
    disk_rings: tuple[Buffer, ...] = ()
    """Buffers on the host through which block inputs pass on their way to the disk and back."""
    compiled: bool = False
    """Whether the kernels of the blocks and of the loss are compiled; with sequence tiling, of the
    loss alone.
    """
    tile_tokens: int = 0
    """Number of tokens of a sequence chunk of parts of the blocks; it is 0 where they run on whole
    rows.
    """
    with_attention: tuple[str, ...] = ()
    """Blocks that keep what attention returned beside their input, on the host."""
    attention_bytes: int = 0
    """Bytes of it that they keep for each token."""
    device_updated_units: tuple[str, ...] = ()
    """Units whose optimizers run on the device."""
    placed: tuple[tuple[str, Buffer], ...] = ()
    """Units, with their slots, that are updated on the device in the slot that still holds their
    weights when a step ends. Their weights are fetched before the first step and after every drain;
    from then on they are updated in the slot.
    """
    gpu_resident: tuple[tuple[str, Buffer], ...] = ()
    """Units, with their slots, that live on the device: the slot is their plane of weights. They
    are updated there, and no weights of theirs are ever fetched.
    """
    held: tuple[tuple[str, Buffer], ...] = ()
    """Units, with their slots, that are there when a pass without gradients begins, because an
    earlier pass on the same weights has left them.
    """
    update_buffers: tuple[Buffer, ...] = ()
    chunk_numel: int = 0
    """Elements of each plane in an update buffer."""
    ring_numel: int = 0
    """Elements of a gradient in a ring buffer."""
    arena: tuple[tuple[Buffer, int], ...] = ()
    """Accumulators in the memory that they share with update buffers, each with the byte at which
    it begins there (`engine.planning.schedule.arena`).
    """
    arena_bytes: int = 0
    """Bytes of that memory. The update buffers follow each other, from its front on."""
    without_main_grad: tuple[str, ...] = ()
    """Units whose accumulator has one term in each round, a gradient in bf16. It is in the first
    half of the accumulator's memory, and ranks exchange it as it is.
    """
    rounded_in_main_grads: tuple[str, ...] = ()
    """Units whose rounded gradients take the second half of the memory of their accumulators."""
    embed_and_head_in_kept_gradients: bool = False
    """Whether the slot of embed and head, and the accumulator of the head, are in the memory of
    kept gradients.
    """
    frozen: tuple[str, ...] = ()
    """Units that are not trained: they have no gradient and no update."""
    forward_only: tuple[str, ...] = ()
    """First units, which have no backward, since nothing is trained in them or below."""
    embed_chunk: int = 0
    """Elements of each chunk over which the norm of embed's gradient is computed; 0 if that is the
    whole gradient.
    """

    @property
    def compiles_blocks(self) -> bool:
        """Whether the kernels of the blocks are compiled."""
        return self.compiled and not self.tile_tokens

    @property
    def is_shared(self) -> bool:
        """Whether several ranks compute the step."""
        return self.replicas * self.shards.ranks > 1


@dataclass(frozen=True)
class Span:
    """A span says when one op ran, in seconds on the backend's clock."""

    op: Op
    start: float
    end: float
