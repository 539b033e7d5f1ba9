"""A layout says where each parameter is in its unit's planes, and how many bytes the planes take.

A unit (the embedding, one block, the head) has one plane for each kind of state: high and low
halves of the weights, the states of the optimizer, gradients. A plane is one contiguous range of
host memory. All planes of a unit have the same layout:

- Parameters with weight decay come first, then the others, each group in the model's order. So
  weight decay applies to one contiguous range of every plane.
- Each parameter starts at a multiple of 64 elements (`alignment`); the gaps are unused.
- A parameter has the same offset, counted in elements, in every plane of its unit. So one transfer
  moves a whole plane, and the optimizer reads all planes by the same index. States that are
  smaller than fp32 take a number of bytes that differs between parameters
  (`engine.planning.layout.optimizer_states`).
- Parameters that are not trained come after all others, in the plane weight_high alone. So they
  take the bytes that the device computes with, and nothing else. Those that stay in fp32 in a bf16
  model are among the others, because the device needs weight_low of them. They get no gradient and
  no decay, and an optimizer changes no bit of a weight whose gradient and states are zero.

`HostStates` allocates exactly the bytes computed here, and the fit report lists exactly these
(law 5).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.config.output_settings import CheckpointKind
from engine.planning.layout.alignment import aligned
from engine.planning.layout.optimizer_states import (
    ParameterRun,
    StateCounts,
    StateRange,
    state_ranges,
)

Dtype = Literal["bfloat16", "float32"]

PLANE_ITEM_BYTES = {
    "bfloat16": {"weight_high": 2, "weight_low": 2, "grad": 2},
    "float32": {"weight_high": 4, "grad": 4},
}
"""Bytes of an element in each plane that every optimizer has. In `bfloat16`, weight_high (what the
GPU sees) and weight_low together are the fp32 master; in `float32`, weight_high is the fp32 weight
itself. DMA transfers only weight_high and grad, and in units with parameters that stay in fp32 also
weight_low.
"""
FP32_ITEM_BYTES = 6
"""Bytes of a slot that a parameter which stays in fp32 takes in addition to those of its
weight_high: 4 for its value, and 2 into which its weight_low is copied.
"""
WEIGHT_PLANES = ("weight_high", "weight_low")
"""Planes that hold the weights."""


def planes_of(dtype: str, optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the planes of a unit: weights, the states of the optimizer, gradients."""
    *weights, grad = PLANE_ITEM_BYTES[dtype]
    return (*weights, *OPTIMIZERS[optimizer].planes, grad)


PLANES = frozenset(
    plane for dtype in PLANE_ITEM_BYTES for each in OPTIMIZERS for plane in planes_of(dtype, each)
)
"""Planes of any optimizer."""


def checkpoint_planes(dtype: str, optimizer: Optimizer, kind: CheckpointKind) -> tuple[str, ...]:
    """Returns the planes that a checkpoint holds, in file order."""
    *weights, _grad = PLANE_ITEM_BYTES[dtype]
    match kind:
        case "full":
            return (*weights, *OPTIMIZERS[optimizer].planes)
        case "weights":
            return tuple(weights)
    return ()


def plane_bytes(
    dtype: str, optimizer: Optimizer, counts: StateCounts, high_numel: int
) -> dict[str, int]:
    """Returns the bytes of each plane of a unit by the plane's name. high_numel: the number of
    elements of weight_high.
    """
    sizes = {plane: counts.numel * each for plane, each in PLANE_ITEM_BYTES[dtype].items()}
    sizes["weight_high"] = high_numel * PLANE_ITEM_BYTES[dtype]["weight_high"]
    sizes |= counts.bytes(optimizer)
    return {plane: sizes[plane] for plane in planes_of(dtype, optimizer)}


@dataclass(frozen=True)
class ParameterSpec:
    """A specification describes one parameter of a unit."""

    name: str
    """Name within its unit."""
    full_name: str
    """Name in the whole model."""
    shape: tuple[int, ...]
    decay: bool
    """Whether weight decay applies, which is not so for norms and biases."""
    keep_in_fp32: bool = False
    """Whether the device computes with the fp32 master and not with its rounding to bf16, because
    transformers keeps the parameter in fp32 in a bf16 model.
    """
    frozen: bool = False
    """Whether the parameter is not trained."""
    adapter: bool = False
    """Whether the parameter is a factor of an adapter, which the model itself lacks."""
    experts: int = 0
    """Number of experts whose stacked weights the factor has a part for; 0 for other parameters."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Fp32Part:
    """One parameter of a unit, or a part of one, that stays in fp32."""

    start: int
    """First element in the unit's planes."""
    stop: int
    place: int
    """First element in the slot's fp32 weights."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UnitLayout:
    """A layout says where the parameters of one unit are in each of its planes.

    Decayed parameters come first, so that a plane has two contiguous ranges: one with weight decay,
    one without. Frozen parameters come last, and only weight_high has elements for them.
    """

    unit: str
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    """Element of a plane at which each parameter starts."""
    numel: int
    """Number of elements of a plane, alignment included. Only weight_high may have more."""
    decay_numel: int
    """Number of elements at the front of a plane that weight decay applies to."""
    high_numel: int
    """Number of elements of the plane weight_high: `numel`, and those of frozen parameters."""

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the unit, alignment excluded."""
        return sum(spec.numel for spec in self.parameters)

    @functools.cached_property
    def trained(self) -> tuple[tuple[ParameterSpec, int], ...]:
        """Parameters that are trained, in the order of the layout, each with the element at which
        it starts.
        """
        places = zip(self.parameters, self.offsets)
        return tuple((spec, offset) for spec, offset in places if not spec.frozen)

    @property
    def trained_count(self) -> int:
        """Number of the unit's parameters that are trained, alignment excluded."""
        return sum(spec.numel for spec, _ in self.trained)

    @property
    def is_frozen(self) -> bool:
        """Whether the unit has parameters, none of which is trained."""
        return bool(self.parameters) and not self.trained

    @property
    def fills_planes(self) -> bool:
        """Whether every element of a gradient belongs to a parameter that is trained."""
        return self.trained_count == self.numel

    @functools.cached_property
    def fp32_parts(self) -> tuple[Fp32Part, ...]:
        """Where the parameters that stay in fp32 are, in the order of the layout."""
        parts: list[Fp32Part] = []
        place = 0
        for spec, offset in zip(self.parameters, self.offsets):
            if spec.keep_in_fp32:
                parts.append(Fp32Part(offset, offset + spec.numel, place))
                place += aligned(spec.numel)
        return tuple(parts)

    @property
    def fp32_numel(self) -> int:
        """The fp32 weights of the unit take this many elements of a slot, alignment included."""
        return sum(aligned(part.numel) for part in self.fp32_parts)

    def fp32_within(self, start: int, stop: int) -> list[Fp32Part]:
        """Returns the parts of `fp32_parts` between two elements of a plane."""
        found: list[Fp32Part] = []
        for part in self.fp32_parts:
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                found.append(Fp32Part(first, last, part.place + first - part.start))
        return found

    def slot_bytes(self, dtype: str) -> int:
        """Returns the bytes of a slot that holds this unit alone."""
        high = self.high_numel * PLANE_ITEM_BYTES[dtype]["weight_high"]
        return high + self.fp32_numel * FP32_ITEM_BYTES

    def state_ranges(self, optimizer: Optimizer) -> dict[str, tuple[StateRange, ...]]:
        """Returns where the states of which elements are, and how they are kept, by the plane."""
        if optimizer not in self._state_ranges:
            self._state_ranges[optimizer] = state_ranges(self.runs, self.unit, optimizer)
        return self._state_ranges[optimizer]

    @functools.cached_property
    def _state_ranges(self) -> dict[Optimizer, dict[str, tuple[StateRange, ...]]]:
        return {}

    @functools.cached_property
    def runs(self) -> tuple[ParameterRun, ...]:
        """Parameters in the order of the planes, without those that are in weight_high alone."""
        places = zip(self.offsets, self.parameters)
        shapes = [spec.shape for offset, spec in places if offset < self.numel]
        return tuple(
            ParameterRun(shape, len(list(run))) for shape, run in itertools.groupby(shapes)
        )

    def state_bounds(
        self, optimizer: Optimizer, plane: str, start: int, stop: int
    ) -> tuple[int, int]:
        """Returns where the states of the elements between two begin and end in their plane, in
        bytes. Raises ValueError where that would cut a block.
        """
        parts = [range_.within(start, stop) for range_ in self.state_ranges(optimizer)[plane]]
        first, *_, last = [part for part in parts if part is not None] * 2
        return first.place, last.place + last.bytes

    @functools.cached_property
    def state_counts(self) -> StateCounts:
        """What decides how many bytes the states take, for any optimizer."""
        return StateCounts(self.unit, self.numel, self.runs)

    def plane_bytes(self, dtype: str, optimizer: Optimizer = ADAMW) -> dict[str, int]:
        """Returns the bytes of each plane by its name."""
        return plane_bytes(dtype, optimizer, self.state_counts, self.high_numel)

    def frozen_range(self, dtype: str) -> tuple[int, int]:
        """Returns where in the plane weight_high the weights begin and end that are in no other
        plane, in bytes.
        """
        item = PLANE_ITEM_BYTES[dtype]["weight_high"]
        return self.numel * item, self.high_numel * item

    def host_bytes(self, dtype: str, optimizer: Optimizer = ADAMW) -> int:
        """Returns the bytes of all planes together."""
        return sum(self.plane_bytes(dtype, optimizer).values())


def lay_out(unit: str, parameters: list[ParameterSpec]) -> UnitLayout:
    """Returns the layout of a unit. Within all three groups, the parameters keep their order."""
    high_only = [spec for spec in parameters if spec.frozen and not spec.keep_in_fp32]
    whole = [spec for spec in parameters if not spec.frozen or spec.keep_in_fp32]
    decayed = [spec for spec in whole if spec.decay and not spec.frozen]
    spared = [spec for spec in whole if spec not in decayed]
    ordered = [*decayed, *spared, *high_only]
    stops = list(itertools.accumulate((aligned(spec.numel) for spec in ordered), initial=0))
    return UnitLayout(
        unit,
        tuple(ordered),
        tuple(stops[:-1]),
        numel=stops[len(decayed) + len(spared)],
        decay_numel=stops[len(decayed)],
        high_numel=stops[-1],
    )
