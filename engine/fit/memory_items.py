"""What a report of memory is made of: items, each of a kind that says what it counts as. No torch.

Records and JSON carry an item's kind as text, its name. It is read back here, and nothing else
looks at its wording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.model.layout import PLANES, WEIGHT_PLANES
from engine.plan.buffers import Word


class PartName(Word):
    """What holds the items: a report has a part for each, under this name."""

    HOST = "host"
    GPU = "gpu"
    DISK = "disk"


MEMORY = (PartName.HOST, PartName.GPU)
"""What a machine must hold; its disk is easily changed."""


class MemoryItem(Word):
    """What takes memory. The values are the names that reports show, and stand in records of runs."""

    # On the host.
    RUNTIME = "Runtime"
    """The program with its libraries; where it is about to train itself, as it is now, its data
    included.
    """
    LIBRARIES = "Libraries"
    """What the program has yet to load."""
    MARGIN = "Margin"
    """Room that is set aside."""
    WEIGHT_HIGH = "weight_high"
    WEIGHT_LOW = "weight_low"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"
    HOST_BOUNDARIES = "Boundaries on the host"
    DATA = "Tokenised data"
    LOADING_PEAK = "Loading peak"
    """What reading weights takes more than the planes and boundaries of training do."""
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
    """An item of another version of this program: it counts as what a run takes, and as nothing
    special.
    """

    @property
    def is_plane(self) -> bool:
        return self.value in PLANES

    @property
    def is_weights(self) -> bool:
        """Whether it is a plane of weights."""
        return self.value in WEIGHT_PLANES

    @property
    def is_overhead(self) -> bool:
        """Whether the program takes it whatever it trains."""
        return self in _OVERHEAD

    @property
    def is_activation(self) -> bool:
        """Whether it comes and goes within a step; other buffers of the device live all run long."""
        return self in _ACTIVATIONS

    @property
    def is_there_in_training(self) -> bool:
        """Whether steps take it: not what is only set aside, nor what is only there while weights
        are read.
        """
        return self not in (MemoryItem.MARGIN, MemoryItem.LOADING_PEAK)

    @property
    def is_there_from_the_start(self) -> bool:
        """Whether the host holds it before the first plane."""
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
    """One line of a report."""

    kind: MemoryItem
    bytes: int
    note: str = ""
    unknown_name: str = ""
    """What another version of this program calls it, where the kind is UNKNOWN."""

    @property
    def name(self) -> str:
        """For people, and for records."""
        return self.unknown_name or self.kind.value

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as records have it."""
        return {"name": self.name, "bytes": self.bytes, "note": self.note}


def read_item(values: Mapping[str, Any]) -> Item:
    """The item whose `to_dict` this is, by whatever version of this program."""
    name, rest = values["name"], (values["bytes"], values.get("note", ""))
    try:
        return Item(MemoryItem(name), *rest)
    except ValueError:
        return Item(MemoryItem.UNKNOWN, *rest, unknown_name=name)


def items_of(report: Mapping[str, Any], part: PartName) -> tuple[Item, ...]:
    """Of one part of a report that is plain data (`FitReport.to_dict()`); empty where it has none."""
    return tuple(map(read_item, (report.get(part) or {}).get("items") or ()))
