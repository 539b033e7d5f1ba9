"""Plans whose blocks are recorded as graphs."""

from __future__ import annotations

from tests.support.same_bits import BASE

WHOLE = BASE.changed(gpu_resident_units=5)
"""All units of a model with three blocks live on the device."""
PLAN_FAMILIES = {
    "plain": {},
    "kept": dict(blocks_without_recompute=3),
    "pairs": dict(blocks_per_saved_input=2, slots=2),
    "rounds": dict(micro_batches=6, rounds=3, main_grad="device"),
    "without the head": dict(gpu_resident_units=4, blocks_without_recompute=1),
}
