"""Grids of plans over which sizes are compared."""

from __future__ import annotations

from engine.planning.schedule.choices import PlanChoices

BUFFER_GRID = [
    PlanChoices().changed(
        micro_batches=4,
        rounds=r,
        slots=s,
        blocks_kept_in_slots=k,
        blocks_without_recompute=a,
        offloaded_block_inputs=h,
        block_input_rings=b,
        main_grad=g,
    )
    for r, g in ((1, "vertical"), (2, "device"), (2, "host"))
    for s in (1, 2, 5)
    for k in (0, 1, 3)
    for a in (0, 1, 3)
    for h, b in ((False, 3), (True, 1), (True, 3))
]
DEVICE_UPDATE_GRID = [
    PlanChoices().changed(
        micro_batches=4,
        rounds=r,
        main_grad=g,
        blocks_kept_in_slots=k,
        device_updated_units=device_updates,
        update_buffers=n,
    )
    for r, g in ((1, "vertical"), (2, "device"), (2, "host"))
    for k in (0, 2)
    for n in (1, 2, 3, 8)
    for device_updates in (
        ("embed",),
        ("block 0", "block 2"),
        ("embed", "block 0", "block 1", "block 2", "head"),
    )
]
