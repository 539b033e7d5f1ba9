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
    """Chunks of kept gradients pass through these buffers on the host."""
    graphs: int = 0
    """Forward and backward of blocks are replayed as CUDA graphs (`engine.runtime.device`), for so
    many micro-batches that exist at once; 0 where each kernel is launched by itself.
    """
    state_rings: tuple[Buffer, ...] = ()
    """Chunks of the moments that are on the disk are updated in these buffers on the host."""
    disk_chunk_numel: int = 0
    """Such a chunk has at most this many elements."""
    disk_rings: tuple[Buffer, ...] = ()
    """Block inputs pass through these buffers on the host on their way to the disk and back."""
    compiled: bool = False
    """The kernels of the blocks and of the loss are compiled; of the loss alone if there are
    sequence chunks.
    """
    tile_tokens: int = 0
    """Number of tokens of a sequence chunk of parts of the blocks; it is 0 where they run on whole
    rows.
    """
    with_attention: tuple[str, ...] = ()
    """These blocks keep what attention returned beside their input, on the host."""
    attention_bytes: int = 0
    """Number of bytes that of that they keep for each token."""
    device_updated_units: tuple[str, ...] = ()
    """The optimizers of these units run on the device."""
    placed: tuple[tuple[str, Buffer], ...] = ()
    """These units, with their slots, are updated on the device in the slot that still holds their
    weights when a step ends. Their weights are fetched before the first step and after every drain;
    from then on they are updated in the slot.
    """
    gpu_resident: tuple[tuple[str, Buffer], ...] = ()
    """These units, with their slots, live on the device: the slot is their plane of weights. They
    are updated there, and no weights of theirs are ever fetched.
    """
    held: tuple[tuple[str, Buffer], ...] = ()
    """These units, with their slots, are there when a pass without gradients begins, because an
    earlier pass on the same weights has left them.
    """
    update_buffers: tuple[Buffer, ...] = ()
    spare_buffers: tuple[Buffer, ...] = ()
    """These update buffers use memory of activations, from `allocate_spare_buffers` to the next
    step's `free_spare_buffers`.
    """
    chunk_numel: int = 0
    """An update buffer holds this many elements of each plane."""
    ring_numel: int = 0
    """A ring buffer of gradients holds this many elements of a gradient."""
    arena: tuple[tuple[Buffer, int], ...] = ()
    """These fp32 accumulators are in the memory that they share with update buffers. Each begins at
    this byte there (`engine.planning.schedule.arena`).
    """
    buffer_places: tuple[int, ...] = ()
    """Each update buffer that is not spare begins at this byte of that memory."""
    arena_bytes: int = 0
    without_main_grad: tuple[str, ...] = ()
    """In each round, the accumulator of each of these units has one term, a gradient in bf16. It is
    in the first half of the accumulator's memory, and ranks exchange it as it is.
    """
    rounded_in_main_grads: tuple[str, ...] = ()
    """The rounded gradients of these units take the second half of the memory of their
    accumulators.
    """
    embed_and_head_in_kept_gradients: bool = False
    """The slot of embed and head, and the accumulator of the head, are in the memory of kept
    gradients.
    """
    frozen: tuple[str, ...] = ()
    """These units are not trained: they have no gradient and no update."""
    forward_only: tuple[str, ...] = ()
    """These units, the first ones, have no backward, since nothing is trained in them or below."""
    embed_chunk: int = 0
    """The norm of the gradient of embed is that of chunks of this many elements; 0 if it is taken
    as a whole.
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
