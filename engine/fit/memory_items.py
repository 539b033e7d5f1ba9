"""A report of memory is made of items. The kind of an item says what the item counts as. No torch.

Records and JSON carry an item's kind as text, its name. The text is read back here, and nothing
else looks at its wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.layout import PLANES, WEIGHT_PLANES
from engine.plan.buffers import Word


class PartName(Word):
    """A report has a part with this name for each kind of memory that holds items."""

    HOST = "host"
    GPU = "gpu"
    DISK = "disk"


MEMORY = (PartName.HOST, PartName.GPU)
"""A machine must hold these parts; its disk is easily changed."""


class MemoryItem(Word):
    """A `MemoryItem` is something that takes memory. The values are the names that reports show.
    They stand in records of runs.
    """

    # On the host.
    RUNTIME = "Runtime"
    """It is the program with its libraries. Where the program is about to train itself, it is the
    program as it is now, its data included.
    """
    LIBRARIES = "Libraries"
    """The program has yet to load these."""
    MARGIN = "Margin"
    """This room is set aside."""
    WEIGHT_HIGH = "weight_high"
    WEIGHT_LOW = "weight_low"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"
    HOST_BOUNDARIES = "Boundaries on the host"
    DATA = "Tokenised data"
    LOADING_PEAK = "Loading peak"
    """Reading weights takes this much more than the planes and boundaries of training do."""
    # On the device, buffers that live all run long.
    BLOCK_SLOTS = "Block slots"
    OUTER_SLOTS = "Embed and head slots"
    RESIDENT_BLOCKS = "Resident blocks"
    GRADIENT_SUMS = "Gradient sums"
    GRADIENT_STAGING = "Gradient staging"
    OPTIMIZER_STATES = "Optimizer states"
    BOUNDARY_RINGS = "Boundary rings"
    # On the device, what comes and goes within a step.
    BOUNDARIES = "Boundaries"
    HIDDEN_STATES = "Hidden states"
    ROTARY_EMBEDDINGS = "Rotary embeddings"
    KEPT_ACTIVATIONS = "Kept activations"
    WORKING_SET = "Working set"
    TOKENS_AND_MASKS = "Tokens and masks"
    # On the device, what every program takes.
    CUDA_CONTEXT = "CUDA context"
    ALLOCATOR_SLACK = "Allocator slack"
    # On the disk.
    CHECKPOINTS = "Checkpoints"
    EXPORT = "Export"
    RECORD = "Record"

    UNKNOWN = ""
    """It is an item of another version of this program. It counts as something that a run takes,
    and as nothing special.
    """

    @property
    def is_plane(self) -> bool:
        """Tells whether the item is a plane of the model's states."""
        return self.value in PLANES

    @property
    def is_weights(self) -> bool:
        """Tells whether the item is a plane of weights."""
        return self.value in WEIGHT_PLANES

    @property
    def is_overhead(self) -> bool:
        """Tells whether the program takes it whatever it trains."""
        return self in _OVERHEAD

    @property
    def is_activation(self) -> bool:
        """Tells whether the item comes and goes within a step. Other buffers of the device live
        all run long.
        """
        return self in _ACTIVATIONS

    @property
    def is_there_in_training(self) -> bool:
        """Tells whether steps take it. Room that is only set aside is not taken, nor is memory
        that is only needed while weights are read.
        """
        return self not in (MemoryItem.MARGIN, MemoryItem.LOADING_PEAK)

    @property
    def is_there_from_the_start(self) -> bool:
        """Tells whether the host holds it before the first plane."""
        return self in (MemoryItem.RUNTIME, MemoryItem.DATA)


_OVERHEAD = frozenset(
    (
        MemoryItem.RUNTIME,
        MemoryItem.LIBRARIES,
        MemoryItem.MARGIN,
        MemoryItem.CUDA_CONTEXT,
        MemoryItem.ALLOCATOR_SLACK,
    )
)
_ACTIVATIONS = frozenset(
    (
        MemoryItem.BOUNDARIES,
        MemoryItem.HIDDEN_STATES,
        MemoryItem.ROTARY_EMBEDDINGS,
        MemoryItem.KEPT_ACTIVATIONS,
        MemoryItem.WORKING_SET,
        MemoryItem.TOKENS_AND_MASKS,
    )
)


@dataclass(frozen=True)
class Item:
    """An item is one line of a report."""

    kind: MemoryItem
    bytes: int
    note: str = ""
    unknown_name: str = ""
    """Another version of this program calls the item so, where the kind is UNKNOWN."""

    @property
    def name(self) -> str:
        """Returns the name for people and for records."""
        return self.unknown_name or self.kind.value

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, as records have it."""
        return {"name": self.name, "bytes": self.bytes, "note": self.note}


def read_item(values: Mapping[str, Any]) -> Item:
    """Returns the item whose `to_dict` is `values`, by whatever version of this program."""
    name, size, note = values["name"], values["bytes"], values.get("note", "")
    try:
        return Item(MemoryItem(name), size, note)
    except ValueError:
        return Item(MemoryItem.UNKNOWN, size, note, unknown_name=name)


def items_of(report: Mapping[str, Any], part: PartName) -> tuple[Item, ...]:
    """Returns the items of one part of a report that is plain data (`FitReport.to_dict()`). It
    returns none where the report has no such part.
    """
    values = (report.get(part) or {}).get("items") or ()
    return tuple(read_item(each) for each in values)
