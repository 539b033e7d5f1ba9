"""A layout says where each parameter is in its unit's planes, and how many bytes the planes take.

A unit (the embedding, one block, the head) has one plane for each kind of state: high and low
halves of the weights, both moments, gradients. A plane is one contiguous range of host memory. All
planes of a unit have the same layout:

- Parameters with weight decay come first, then the others, each group in the model's order. So
  weight decay applies to one contiguous range of every plane.
- Each parameter starts at a multiple of `ALIGN_ELEMENTS` elements; the gaps are unused.
- A parameter has the same offset, counted in elements, in every plane of its unit. So one transfer
  moves a whole plane, and the optimizer reads all planes by the same index. Moments that are
  smaller than fp32 take a number of bytes that differs between parameters
  (`engine.planes.moments`).

The host store allocates exactly the bytes computed here, and the fit report lists exactly these
(law 5).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from engine.config.output_settings import CheckpointKind
from engine.config.settings import Optimizer
from engine.plan.buffers import EMBED
from engine.planes.moments import (
    FP32_MOMENTS,
    MOMENTS,
    MomentCounts,
    MomentRange,
    block_count,
    is_small,
    moment_ranges,
)

Dtype = Literal["bfloat16", "float32"]

ALIGN_ELEMENTS = 64
"""Every parameter starts at a multiple of this many elements: 128 bytes in bf16, an alignment that
is fast for matrix kernels on GPUs.
"""

PLANE_ITEM_BYTES = {
    "bfloat16": {"weight_high": 2, "weight_low": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2},
    "float32": {"weight_high": 4, "exp_avg": 4, "exp_avg_sq": 4, "grad": 4},
}
"""An element takes this many bytes in each plane, with moments in fp32. In `bfloat16`, weight_high
(what the GPU sees) and weight_low together are the fp32 master; in `float32`, weight_high is the
fp32 weight itself. DMA transfers only weight_high and grad, and in units with parameters that stay
in fp32 also weight_low.
"""
EXACT_ITEM_BYTES = 6
"""A parameter that stays in fp32 takes this many bytes of a slot, in addition to those of its
weight_high: 4 for its value, and 2 into which its weight_low is copied.
"""
PLANES = frozenset().union(*PLANE_ITEM_BYTES.values())
WEIGHT_PLANES = ("weight_high", "weight_low")
"""These planes hold the weights."""
NOT_IN_CHECKPOINTS: dict[CheckpointKind, frozenset[str]] = {
    "full": frozenset({"grad"}),
    "weights": PLANES - frozenset(WEIGHT_PLANES),
    "none": PLANES,
}
"""A checkpoint of each kind lacks these planes."""


def checkpoint_planes(dtype: str, kind: CheckpointKind) -> tuple[str, ...]:
    """Returns the planes that a checkpoint holds, in file order."""
    lacks = NOT_IN_CHECKPOINTS[kind]
    return tuple(plane for plane in PLANE_ITEM_BYTES[dtype] if plane not in lacks)


def plane_bytes(dtype: str, optimizer: Optimizer, counts: MomentCounts) -> dict[str, int]:
    """Returns the bytes of each plane of a unit by the plane's name."""
    sizes = {plane: counts.numel * item for plane, item in PLANE_ITEM_BYTES[dtype].items()}
    return sizes | dict.fromkeys(MOMENTS, counts.bytes(optimizer))


@dataclass(frozen=True)
class ParameterSpec:
    """A specification describes one parameter of a unit."""

    name: str
    """The parameter has this name within its unit."""
    full_name: str
    """The parameter has this name in the whole model."""
    shape: tuple[int, ...]
    decay: bool
    """It is true when AdamW's weight decay applies, which is not so for norms and biases."""
    exact: bool = False
    """It is true when the device computes with the fp32 master and not with its rounding to bf16,
    because transformers keeps the parameter in fp32 in a bf16 model.
    """

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ExactPart:
    """An `ExactPart` is one parameter of a unit, or a part of one, that stays in fp32."""

    start: int
    """It begins at this element of the unit's planes."""
    stop: int
    place: int
    """It begins at this element of the slot's fp32 weights."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UnitLayout:
    """A layout says where the parameters of one unit are in each of its planes.

    Decayed parameters come first, so that a plane has two contiguous ranges: one with weight decay,
    one without.
    """

    unit: str
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    """Each parameter starts at this element of a plane."""
    numel: int
    """A plane has this many elements, alignment included."""
    decay_numel: int
    """The first `decay_numel` elements of a plane are decayed."""

    @property
    def parameter_count(self) -> int:
        """The unit has this many parameters, alignment excluded."""
        return sum(spec.numel for spec in self.parameters)

    @functools.cached_property
    def exact_parts(self) -> tuple[ExactPart, ...]:
        """Returns where the parameters that stay in fp32 are, in the order of the layout."""
        parts: list[ExactPart] = []
        place = 0
        for spec, offset in zip(self.parameters, self.offsets):
            if spec.exact:
                parts.append(ExactPart(offset, offset + spec.numel, place))
                place += _aligned(spec.numel)
        return tuple(parts)

    @property
    def exact_numel(self) -> int:
        """The fp32 weights of the unit take this many elements of a slot, alignment included."""
        return sum(_aligned(part.numel) for part in self.exact_parts)

    def exact_within(self, start: int, stop: int) -> list[ExactPart]:
        """Returns the parts of `exact_parts` between two elements of a plane."""
        found: list[ExactPart] = []
        for part in self.exact_parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                found.append(ExactPart(first, last, part.place + first - part.start))
        return found

    def slot_bytes(self, dtype: str) -> int:
        """Returns the bytes of a slot that holds this unit alone."""
        high = self.numel * PLANE_ITEM_BYTES[dtype]["weight_high"]
        return high + self.exact_numel * EXACT_ITEM_BYTES

    def moment_ranges(self, optimizer: Optimizer) -> tuple[MomentRange, ...]:
        """Returns where the moments of which elements are, and how they are kept."""
        return moment_ranges(self._places, self.unit, optimizer)

    @property
    def _places(self) -> list[tuple[int, int, int]]:
        """Returns for each parameter its first element, the element after its last one (alignment
        included), and the number of its own elements.
        """
        stops = (*self.offsets[1:], self.numel)
        numels = (spec.numel for spec in self.parameters)
        return list(zip(self.offsets, stops, numels))

    def moment_bytes(self, optimizer: Optimizer, start: int, stop: int) -> tuple[int, int]:
        """Returns where the moments of the elements between two begin and end in their plane, in
        bytes. Raises ValueError where that would cut a block.
        """
        parts = [range_.within(start, stop) for range_ in self.moment_ranges(optimizer)]
        first, *_, last = [part for part in parts if part is not None] * 2
        return first.place, last.place + last.bytes

    @functools.cached_property
    def moment_counts(self) -> MomentCounts:
        """Returns how many elements are kept in which way, with any optimizer."""
        large = [(start, stop) for start, stop, numel in self._places if not is_small(numel)]
        return MomentCounts(
            self.numel,
            small=self.numel - sum(stop - start for start, stop in large),
            blocks=sum(block_count(start, stop) for start, stop in large),
            is_embed=self.unit == EMBED,
        )

    def plane_bytes(self, dtype: str, optimizer: Optimizer = FP32_MOMENTS) -> dict[str, int]:
        """Returns the bytes of each plane by its name."""
        return plane_bytes(dtype, optimizer, self.moment_counts)

    def host_bytes(self, dtype: str, optimizer: Optimizer = FP32_MOMENTS) -> int:
        """Returns the bytes of all planes together."""
        return sum(self.plane_bytes(dtype, optimizer).values())


def _aligned(numel: int) -> int:
    """Returns the elements that a parameter of `numel` elements takes, alignment included."""
    return (numel + ALIGN_ELEMENTS - 1) // ALIGN_ELEMENTS * ALIGN_ELEMENTS


def lay_out(unit: str, parameters: list[ParameterSpec]) -> UnitLayout:
    """Returns the layout of a unit. Within both groups, the parameters keep their order."""
    decayed = [spec for spec in parameters if spec.decay]
    spared = [spec for spec in parameters if not spec.decay]
    ordered = decayed + spared
    offsets: list[int] = []
    position = 0
    decay_numel = 0
    for spec in ordered:
        offsets.append(position)
        position += _aligned(spec.numel)
        if spec.decay:
            decay_numel = position
    return UnitLayout(unit, tuple(ordered), tuple(offsets), position, decay_numel)
