"""Plans whose blocks are recorded as graphs."""

from __future__ import annotations

import dataclasses

from tests.support.same_bits import BASE

WHOLE = dataclasses.replace(BASE, settled_units=5)
"""All units of a model with three blocks live on the device."""
FRAMES = {
    "plain": {},
    "kept": dict(kept_blocks=3),
    "pairs": dict(boundary_blocks=2, slots=2),
    "rounds": dict(micro_batches=6, rounds=3, gradient_sum="device"),
    "without the head": dict(settled_units=4, kept_blocks=1),
}
