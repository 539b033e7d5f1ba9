"""GPU memory, RAM and disk are one pool of memory. A `Pool` says which units of a model live in
which of its parts, and what else each part holds, to the byte. No torch.

What it costs a step that units live where they do takes longer to find
(`engine.planning.fit.pool_costs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine.config.optimizers import OPTIMIZERS
from engine.planning.fit.buffer_sizes import disk_padding
from engine.planning.fit.memory_items import MEMORY, Item, MemoryItem, PartName
from engine.planning.fit.requirements import Part, Requirements
from engine.planning.layout.disk_chunks import disk_chunk_count
from engine.planning.layout.layout import FP32_ITEM_BYTES, WEIGHT_PLANES
from engine.planning.schedule.buffers import EMBED, HEAD, Word
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.schedule.shards import Shards
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.unit_shape import UnitShape


class Held(Word):
    """A part of the pool holds memory of these kinds. A screen shows them in this order."""

    MODEL = "model"
    """Weights, moments and gradients of units that have them there from step to step."""
    COPY = "copy"
    """Weights that stay on the device from forward to backward and live elsewhere."""
    STEP = "step"
    """Activations, block inputs, accumulators, and the buffers through which units pass."""
    FILES = "files"
    """Weights that are read, and checkpoints and exports that are written."""
    PROGRAM = "program"
    """The program, its libraries, its data and what is reserved."""


_HELD = {
    MemoryItem.BLOCKS_KEPT_IN_SLOTS: Held.COPY,
    MemoryItem.LOADING_PEAK: Held.FILES,
    MemoryItem.STAGING_BUFFERS: Held.FILES,
    MemoryItem.BEST: Held.FILES,
    MemoryItem.CHECKPOINTS: Held.FILES,
    MemoryItem.EXPORT: Held.FILES,
    MemoryItem.DATA: Held.PROGRAM,
    MemoryItem.TRACKERS: Held.PROGRAM,
    MemoryItem.RECORD: Held.PROGRAM,
    MemoryItem.UNKNOWN: Held.PROGRAM,
}


def held_by(kind: MemoryItem) -> Held:
    """Returns what an item of a report is for. That of gradients on the device is for both the
    model and a step, and counts as a step's here.
    """
    if kind.is_plane or kind in (MemoryItem.GPU_RESIDENT_UNITS, MemoryItem.DISK_OFFLOADED_MOMENTS):
        return Held.MODEL
    if kind.is_overhead:
        return Held.PROGRAM
    return _HELD.get(kind, Held.STEP)


@dataclass(frozen=True)
class Placement:
    """A placement says in which part of the pool the planes of a unit live from step to step."""

    weights: PartName
    moments: PartName
    gradient: PartName
    """Where the rounded gradient waits for its update."""
    is_copied: bool = False
    """Whether the device keeps the weights from forward to backward, so that they are fetched once
    a step.
    """

    def planes_in(self, part: PartName) -> tuple[str, ...]:
        """Returns the words for what lives in the part."""
        places = {"weights": self.weights, "moments": self.moments, "gradients": self.gradient}
        return tuple(words for words, place in places.items() if place == part)


@dataclass(frozen=True)
class Units:
    """These are units with the same placement: consecutive ones, or all that have it. Units are
    counted from embed, which is 0.
    """

    numbers: tuple[int, ...]
    """Numbers of the units, in the order of a forward pass."""
    of: int
    """Number of units of the model."""
    placement: Placement
    updated_on_gpu: int = 0
    """Number of them that are updated on the GPU, the others on the host."""

    @property
    def words(self) -> str:
        """Which units they are, such as "embed and blocks 0 to 12"."""
        return units_text(self.numbers, self.of)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that tools use."""
        place = self.placement
        return {
            "units": self.words,
            "start": self.numbers[0],
            "stop": self.numbers[-1] + 1,
            "count": len(self.numbers),
            "weights": place.weights.value,
            "moments": place.moments.value,
            "gradient": place.gradient.value,
            "copied": place.is_copied,
            "updated_on_gpu": self.updated_on_gpu,
        }


@dataclass(frozen=True)
class Share:
    """A share is some memory of a part and what it is for."""

    held: Held
    bytes: int
    units: Units | None = None
    """Units that the share is for; None where it is not for some units alone."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that tools use."""
        of = {} if self.units is None else {"units": self.units.words}
        return {"held": self.held.value, "bytes": self.bytes} | of


@dataclass(frozen=True)
class PoolPart:
    """A part of the pool, with what it holds. The shares are in the order of their kinds, those of
    units in the order of a forward pass, and their sum is `total`.
    """

    name: PartName
    limit: int | None
    """Bytes that the run may take; None where that is not known."""
    shares: tuple[Share, ...]

    @property
    def total(self) -> int:
        return sum(share.bytes for share in self.shares)

    @property
    def free(self) -> int | None:
        """Bytes that remain; negative where memory is short, None without a limit."""
        return None if self.limit is None else self.limit - self.total

    def held(self, held: Held) -> int:
        """Returns the bytes of one kind."""
        return sum(share.bytes for share in self.shares if share.held == held)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that tools use."""
        shares = [share.to_dict() for share in self.shares]
        return {"limit": self.limit, "total": self.total, "shares": shares}


@dataclass(frozen=True)
class Pool:
    """The memory of a job: its parts, and where units live. No unit is missing, and each is in one
    of `units`.
    """

    parts: tuple[PoolPart, ...]
    units: tuple[Units, ...]

    def living_in(self, part: PartName) -> list[Units]:
        """Returns the units of which something lives in the part from step to step."""
        return [each for each in self.units if each.placement.planes_in(part)]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that tools use."""
        parts = {part.name.value: part.to_dict() for part in self.parts}
        return {"parts": parts, "units": [each.to_dict() for each in self.units]}


def pool_of(requirements: Requirements) -> Pool:
    """Returns the pool of a job with its plan. The sum of each part is that of the job's items."""
    shape, choices = requirements.shape, requirements.chosen.choices
    units = units_by_place(len(shape.units), choices)
    order = (PartName.GPU, PartName.HOST, PartName.DISK)
    parts = [
        PoolPart(
            name,
            requirements.parts[name].limit,
            _shares(name, requirements.parts[name], units, requirements),
        )
        for name in order
        if name in requirements.parts
    ]
    return Pool(tuple(parts), tuple(units))


# ---------------------------------------------------------------------- places


def units_by_place(count: int, choices: PlanChoices) -> list[Units]:
    """Returns where the `count` units of a model live with these choices: runs of consecutive units
    with the same placement, in the order of a forward pass. Where some that live on the device are
    apart, all units with the same placement are in one run.
    """
    blocks = [f"block {index}" for index in range(count - 2)]
    names = [EMBED, *blocks, HEAD]
    gpu_resident = frozenset(choices.placement.gpu_resident(blocks))
    on_device = [name in gpu_resident for name in names]
    places = [_placement(at, count, choices, on_device[at]) for at in range(count)]
    updated = gpu_resident.union(choices.updates.device_updated_units)
    numbers: Iterable[int] = range(count)
    if choices.placement.gpu_resident_apart:
        numbers = sorted(numbers, key=lambda at: places.index(places[at]))
    found: list[Units] = []
    for place, run in groupby(numbers, key=lambda at: places[at]):
        some = tuple(run)
        found.append(Units(some, count, place, sum(names[at] in updated for at in some)))
    return found


def _placement(index: int, count: int, choices: PlanChoices, on_device: bool) -> Placement:
    """Returns where the planes of one unit live. A unit whose moments have another place than its
    weights has them from here.
    """
    if on_device:
        return Placement(PartName.GPU, PartName.GPU, PartName.GPU)
    gradient = PartName.GPU if choices.gradients.gradients_on_gpu else PartName.HOST
    first_on_disk = count - choices.placement.disk_offloaded_units
    moments = PartName.DISK if index >= first_on_disk else PartName.HOST
    is_kept_in_slot = count - 1 - choices.placement.blocks_kept_in_slots <= index < count - 1
    return Placement(PartName.HOST, moments, gradient, is_copied=is_kept_in_slot)


def units_text(numbers: Sequence[int], of: int) -> str:
    """Returns in words which units of a model with `of` units these are, such as "embed and blocks
    0 to 12", or "12 of blocks 0 to 25" where others are between them.
    """
    if len(numbers) == of:
        return "the whole model"
    blocks = [number - 1 for number in numbers if 0 < number < of - 1]
    words = ["embed"] if 0 in numbers else []
    if len(blocks) == 1:
        words.append(f"block {blocks[0]}")
    elif blocks:
        are_apart = blocks[-1] - blocks[0] >= len(blocks)
        some = f"{len(blocks)} of " if are_apart else ""
        words.append(f"{some}blocks {blocks[0]} to {blocks[-1]}")
    return " and ".join([*words, *(["head"] if of - 1 in numbers else [])])


def together_text(units: Collection[Units]) -> str:
    """Returns in words which units these are; neighbors are named together."""
    together: list[tuple[int, ...]] = []
    for each in units:
        if together and together[-1][-1] + 1 == each.numbers[0]:
            together[-1] += each.numbers
        else:
            together.append(each.numbers)
    of = max((each.of for each in units), default=0)
    return listed(units_text(numbers, of) for numbers in together)


def listed(words: Iterable[str]) -> str:
    """Returns words as a list in a sentence: "weights, moments and gradients"."""
    *most, last = [*words] or [""]
    return f"{', '.join(most)} and {last}" if most else last


# ---------------------------------------------------------------------- bytes


def _shares(
    name: PartName, part: Part, units: Sequence[Units], requirements: Requirements
) -> tuple[Share, ...]:
    """Returns what a part holds. Items that are for units are split over them."""
    shape, choices = requirements.shape, requirements.chosen.choices
    held = dict.fromkeys(Held, 0)
    for item in part.items:
        held[held_by(item.kind)] += item.bytes
    found: list[Share] = []
    # The disk of the runs may be another one than that of the moments.
    if name in MEMORY or held[Held.MODEL]:
        model = [Share(Held.MODEL, _bytes_in(name, each, shape, choices), each) for each in units]
        copied = [each for each in units if each.placement.is_copied]
        padded = shape.padded(choices.sharding.ranks)
        copies = [Share(Held.COPY, _copy_bytes(each, padded), each) for each in copied]
        if not _holds(part.items, MemoryItem.BLOCKS_KEPT_IN_SLOTS):
            copies = []
        found = [share for share in (*model, *copies) if share.bytes]
        # Gradients that wait on the device have one item with those that pass through it.
        waiting = sum(share.bytes for share in model) - held[Held.MODEL]
        held[Held.STEP] -= waiting
    others = (kind for kind in Held if kind not in (Held.MODEL, Held.COPY))
    return (*found, *(Share(kind, held[kind]) for kind in others if held[kind]))


def _holds(items: Sequence[Item], kind: MemoryItem) -> bool:
    return any(item.kind == kind and item.bytes for item in items)


def _bytes_in(name: PartName, units: Units, shape: ModelShape, choices: PlanChoices) -> int:
    """Returns the bytes that planes of the units take in a part of memory."""
    return sum(
        _unit_bytes(name, units.placement, shape.units[number], shape, choices)
        for number in units.numbers
    )


def _unit_bytes(
    name: PartName, place: Placement, unit: UnitShape, shape: ModelShape, choices: PlanChoices
) -> int:
    """Returns the bytes that planes of one unit take in a part of memory."""
    planes = shape.states.unit_bytes(unit)
    on_device = name == PartName.GPU
    if on_device and choices.sharding.ranks > 1 and unit.weight_numel:
        # A device of several holds the weights whole, and of other planes a shard.
        shards = Shards(choices.sharding.ranks)
        own = min(unit.numel, shards.numel(unit.numel))
        planes = {plane: -(-size * own // max(1, unit.numel)) for plane, size in planes.items()}
        planes["weight_high"] = unit.padded(shards).weight_numel * shape.item_bytes
        planes["grad"] = shards.numel(unit.numel) * shape.item_bytes
    elif name == PartName.HOST:
        planes = {
            plane: size // choices.sharding.nodes_per_replica for plane, size in planes.items()
        }
    found = 0
    if place.weights == name:
        found += sum(planes.get(plane, 0) for plane in WEIGHT_PLANES)
        # On the device, the weights that stay in fp32 are kept beside the others.
        found += unit.fp32_numel * FP32_ITEM_BYTES if on_device else 0
    if place.moments == name:
        found += sum(planes[plane] for plane in OPTIMIZERS[shape.optimizer].planes)
        found += disk_padding(shape, disk_chunk_count(unit.numel)) if name == PartName.DISK else 0
    if place.gradient == name:
        in_main_grad = _is_in_main_grad(place, shape, choices)
        found += planes["grad"] if not (on_device and in_main_grad) else 0
    return found


def _is_in_main_grad(place: Placement, shape: ModelShape, choices: PlanChoices) -> bool:
    """Returns whether a gradient that waits on the device does so in the memory of its fp32
    accumulator.
    """
    is_gpu_resident = place.weights == PartName.GPU
    are_kept = choices.gradients.main_grad == MainGrad.DEVICE and shape.item_bytes == 2
    are_kept = are_kept and choices.sharding.world_size == 1
    return is_gpu_resident and are_kept


def _copy_bytes(units: Units, shape: ModelShape) -> int:
    """Returns the bytes of slots that hold one each of the units."""
    held = [shape.units[number] for number in units.numbers]
    return sum(
        unit.weight_numel * shape.item_bytes + unit.fp32_numel * FP32_ITEM_BYTES for unit in held
    )
