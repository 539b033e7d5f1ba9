"""A memory report consists of items. The kind of an item says how it is counted. No torch.

Records and JSON store an item's kind as text, its name. The text is parsed here, and no other code
depends on its wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.optimizers import OPTIMIZERS
from engine.planning.layout.layout import PLANES, WEIGHT_PLANES
from engine.planning.schedule.buffers import Word


class PartName(Word):
    """A report has a part with this name for each kind of memory that holds items."""

    HOST = "host"
    GPU = "gpu"
    DISK = "disk"


MEMORY = (PartName.HOST, PartName.GPU)
"""Parts of memory of which a machine must have enough; a larger disk is easy to add."""


class MemoryItem(Word):
    """Something that takes memory. The values are the names that reports show and that run records
    store.
    """

    # On the host.
    RUNTIME = "Runtime"
    """The memory of the program and its libraries. If the reporting process itself is about to
    train, it is the current memory of that process, data included.
    """
    LIBRARIES = "Libraries"
    """Memory for libraries that the program has yet to load."""
    KERNELS = "Kernels"
    """Kernels of oneDNN for the latest shapes that it multiplied in bf16, on the CPU."""
    MARGIN = "Margin"
    """Reserved memory."""
    WEIGHT_HIGH = "weight_high"
    WEIGHT_LOW = "weight_low"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"
    GRADIENT_RING = "Gradient ring"
    """Ring of kept gradients on their way to the optimizer."""
    STATES_RING = "Moments in transit"
    """Ring of moments that are on the disk, while they are updated."""
    UPDATED_MATRIX = "Matrix in an update"
    """Memory in which the host orthogonalizes the update of a matrix."""
    HOST_BLOCK_INPUTS = "Block inputs in RAM"
    DISK_RINGS = "Block inputs in transit"
    """Ring of block inputs on their way to the disk and back."""
    DATA = "Tokenized data"
    LOADING_PEAK = "Loading peak"
    """Memory that is taken while weights are read, beyond that of the planes and block inputs of
    training.
    """
    STAGING_BUFFERS = "Checkpoint copies"
    """Copies of what a checkpoint has yet to write while steps continue."""
    TRACKERS = "Trackers"
    """Memory of the process that gives curves to trackers."""
    # On the device, buffers that are kept throughout the run.
    BLOCK_SLOTS = "Block slots"
    EMBED_AND_HEAD_SLOTS = "Embed and head slots"
    BLOCKS_KEPT_IN_SLOTS = "Resident blocks"
    GPU_RESIDENT_UNITS = "Units that live on the GPU"
    """Units whose planes stay on the GPU: weights and moments, which take no RAM."""
    MAIN_GRADS = "Gradient accumulators"
    GRADIENT_STAGING = "Gradient staging"
    KEPT_GRADIENTS = "Gradients kept on the GPU"
    OPTIMIZER_STATES = "Optimizer states"
    BLOCK_INPUT_RINGS = "Block input rings"
    # On the device, memory that is allocated and freed within a step.
    BLOCK_INPUTS = "Block inputs"
    HIDDEN_STATES = "Hidden states"
    ROTARY_EMBEDDINGS = "Rotary embeddings"
    KEPT_ACTIVATIONS = "Kept activations"
    WORKING_SET = "Working set"
    TOKENS_AND_MASKS = "Tokens and masks"
    # On the device, memory that every program takes.
    CUDA_CONTEXT = "CUDA context"
    ALLOCATOR_SLACK = "Allocator slack"
    COLLECTIVE = "Exchange buffers"
    """Buffers through which several ranks exchange weights and gradients."""
    # On the disk.
    BEST = "Best weights"
    CHECKPOINTS = "Checkpoints"
    EXPORT = "Export"
    RECORD = "Record"
    DISK_OFFLOADED_MOMENTS = "Moments on the disk"
    DISK_OFFLOADED_BLOCK_INPUTS = "Block inputs on the disk"

    UNKNOWN = ""
    """Kind that only another version of this program knows. It counts as memory that a run takes,
    and belongs to no special group.
    """

    @property
    def is_plane(self) -> bool:
        """Whether the item is a plane of the model's states."""
        return self.value in PLANES

    @property
    def is_weights(self) -> bool:
        """Whether the item is a plane of weights."""
        return self.value in WEIGHT_PLANES

    @property
    def is_overhead(self) -> bool:
        """Whether the program takes the item whatever it trains."""
        return self in _OVERHEAD

    @property
    def is_activation(self) -> bool:
        """Whether the item is allocated and freed within a step. Other buffers on the device are
        kept throughout the run.
        """
        return self in _ACTIVATIONS

    @property
    def is_there_in_training(self) -> bool:
        """Whether the training process uses the item during steps. It does not use reserved memory,
        memory that is needed only while weights are read, and that of another process.
        """
        others = (MemoryItem.MARGIN, MemoryItem.LOADING_PEAK, MemoryItem.TRACKERS)
        return self not in others

    @property
    def is_there_from_the_start(self) -> bool:
        """Whether the item is in host memory before the first plane is allocated."""
        return self in (MemoryItem.RUNTIME, MemoryItem.DATA)

    @property
    def is_there_while_loading(self) -> bool:
        """Whether a run that reads weights has the item in host memory by then."""
        return self.is_plane or self in _WHILE_LOADING


_OVERHEAD = frozenset(
    (
        MemoryItem.RUNTIME,
        MemoryItem.LIBRARIES,
        MemoryItem.KERNELS,
        MemoryItem.MARGIN,
        MemoryItem.CUDA_CONTEXT,
        MemoryItem.ALLOCATOR_SLACK,
        MemoryItem.COLLECTIVE,
    )
)
_WHILE_LOADING = frozenset(
    (
        MemoryItem.GRADIENT_RING,
        MemoryItem.STATES_RING,
        MemoryItem.UPDATED_MATRIX,
        MemoryItem.HOST_BLOCK_INPUTS,
        MemoryItem.DISK_RINGS,
    )
)
_ACTIVATIONS = frozenset(
    (
        MemoryItem.BLOCK_INPUTS,
        MemoryItem.HIDDEN_STATES,
        MemoryItem.ROTARY_EMBEDDINGS,
        MemoryItem.KEPT_ACTIVATIONS,
        MemoryItem.WORKING_SET,
        MemoryItem.TOKENS_AND_MASKS,
    )
)


IN_WORDS = {
    MemoryItem.WEIGHT_HIGH: "Weights",
    MemoryItem.WEIGHT_LOW: "Rest of the fp32 weights",
    MemoryItem.GRAD: "Gradients",
    **{
        MemoryItem(state.name): f"{state.words}s"
        for optimizer in [*OPTIMIZERS.values()][::-1]  # the words of the first remain
        for state in optimizer.states
    },
}
"""Words for items that records name as the files of a checkpoint."""


@dataclass(frozen=True)
class Item:
    """An item is one line of a report."""

    kind: MemoryItem
    bytes: int
    note: str = ""
    unknown_name: str = ""
    """Name that another version of this program gave the item, where the kind is UNKNOWN."""

    @property
    def name(self) -> str:
        """The name for people and for records."""
        return self.unknown_name or self.kind.value

    @property
    def words(self) -> str:
        """The name in words, as a sentence or a screen has it."""
        return IN_WORDS.get(self.kind, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form used in records."""
        return {"name": self.name, "bytes": self.bytes, "note": self.note}


def read_item(values: Mapping[str, Any]) -> Item:
    """Returns the item whose `to_dict` is `values`, whichever version of this program wrote it."""
    name, size, note = values["name"], values["bytes"], values.get("note", "")
    try:
        return Item(MemoryItem(name), size, note)
    except ValueError:
        return Item(MemoryItem.UNKNOWN, size, note, unknown_name=name)


def items_of(report: Mapping[str, Any], part: PartName) -> tuple[Item, ...]:
    """Returns the items of one part of a report that is plain data (`FitReport.to_dict()`). The
    result is empty where the report has no such part.
    """
    values = (report.get(part) or {}).get("items") or ()
    return tuple(read_item(each) for each in values)
