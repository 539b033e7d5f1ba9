"""How many bytes a unit's planes and activations take, and where each parameter lies: pure
arithmetic, no torch.

The host store allocates exactly what this says, and the fit report itemises exactly this (law 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGN_ELEMENTS = 64
"""Every parameter starts at a multiple of this many elements: 128 bytes in bf16, as matrix kernels
on GPUs like.
"""

PLANE_ITEM_BYTES = {
    "bfloat16": {"weight_high": 2, "weight_low": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2},
    "float32": {"weight_high": 4, "exp_avg": 4, "exp_avg_sq": 4, "grad": 4},
}
"""Bytes an element by plane. In `bfloat16`, weight_high (what the GPU sees) and weight_low together
are the fp32 master; in `float32`, weight_high is the fp32 weight itself. DMA touches weight_high
and grad only.
"""
PLANES = frozenset().union(*PLANE_ITEM_BYTES.values())
WEIGHT_PLANES = ("weight_high", "weight_low")
"""Those that hold weights."""

DOCUMENTS = "documents"
"""Name of the attention that makes no masks (engine.model.attention), whose activations are counted
apart.
"""

MASK_ELEMENTS = 2**20
"""Of a micro-batch: up to so many pairs of tokens, a GPU attends in float32 under one mask after
all: a call for each document takes longer (measured for the starter, docs/performance.md).
"""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a unit: its name within the unit, its full name in the model, its shape."""

    name: str
    full_name: str
    shape: tuple[int, ...]
    decay: bool
    """Whether AdamW's weight decay applies (not for norms and biases)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class UnitLayout:
    """Parameters of one unit at their offsets (in elements) in each of its planes; decayed
    parameters come first, so that weight decay is two contiguous ranges.
    """

    unit: str
    parameters: tuple[ParameterSpec, ...]
    offsets: tuple[int, ...]
    numel: int
    """Elements of a plane, alignment included."""
    decay_numel: int
    """The first so many elements of the plane are decayed."""

    @property
    def parameter_count(self) -> int:
        """Elements that are parameters, alignment excluded."""
        return sum(p.numel for p in self.parameters)

    def plane_bytes(self, dtype: str) -> dict[str, int]:
        return {plane: self.numel * item for plane, item in PLANE_ITEM_BYTES[dtype].items()}

    def host_bytes(self, dtype: str) -> int:
        return sum(self.plane_bytes(dtype).values())


def lay_out(unit: str, parameters: list[ParameterSpec]) -> UnitLayout:
    """Place a unit's parameters: decayed ones first, each aligned to ALIGN_ELEMENTS, original order
    kept otherwise.
    """
    ordered = [p for p in parameters if p.decay] + [p for p in parameters if not p.decay]
    offsets, position, decay_numel = [], 0, 0
    for spec in ordered:
        offsets.append(position)
        position += -(-spec.numel // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        if spec.decay:
            decay_numel = position
    return UnitLayout(unit, tuple(ordered), tuple(offsets), position, decay_numel)


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps of one block for a row of T tokens: ``per_token * T + per_pair *
    T**2``. What blocks share (masks, rotary tables) is not included.
    """

    per_token: float = 0.0
    per_pair: float = 0.0

    def of(self, rows: int, length: int) -> int:
        return round(rows * (self.per_token * length + self.per_pair * length * length))
