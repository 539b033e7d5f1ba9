"""Plans that keep gradients on the device and park them on the host."""

from __future__ import annotations

import torch

from tests.support.same_bits import DelayedBackend, planes_after

FRAMES = {
    "parked": dict(parked_gradients=True),
    "shared slot": dict(shared_outer_slot=True),
    "both": dict(parked_gradients=True, shared_outer_slot=True),
    "pairs": dict(boundary_blocks=2, slots=2),
    "all": dict(parked_gradients=True, shared_outer_slot=True, boundary_blocks=2, slots=2),
}
OUTER = FRAMES["both"] | dict(outer_in_parked=True)
OUTERS = {"outer": OUTER, "outer, pairs": OUTER | FRAMES["pairs"]}
TALL = 340
"""A vocabulary of this size makes a table of several pieces, which is larger than a block."""


def without_gradients(planes: list[torch.Tensor], dtype: str) -> list[torch.Tensor]:
    count = 5 if dtype == "bfloat16" else 4
    return [plane for place, plane in enumerate(planes) if place % count != count - 1]


def run(choices, late=(), dtype="bfloat16", backend=None, **options) -> list[torch.Tensor]:
    planes = planes_after(choices, backend or DelayedBackend(late), dtype=dtype, **options)
    return planes if choices.parked_gradients else without_gradients(planes, dtype)
