"""Grids of plans over which sizes are compared."""

from __future__ import annotations

from engine.planning.schedule.choices import PlanChoices

BUFFER_GRID = [
    PlanChoices(
        micro_batches=4,
        rounds=r,
        slots=s,
        resident_blocks=k,
        kept_blocks=a,
        host_boundaries=h,
        boundary_rings=b,
        gradient_sum=g,
    )
    for r, g in ((1, "vertical"), (2, "device"), (2, "host"))
    for s in (1, 2, 5)
    for k in (0, 1, 3)
    for a in (0, 1, 3)
    for h, b in ((False, 3), (True, 1), (True, 3))
]
HOME_GRID = [
    PlanChoices(
        micro_batches=4,
        rounds=r,
        gradient_sum=g,
        resident_blocks=k,
        device_homes=homes,
        update_buffers=n,
    )
    for r, g in ((1, "vertical"), (2, "device"), (2, "host"))
    for k in (0, 2)
    for n in (1, 2, 3, 8)
    for homes in (
        ("embed",),
        ("block 0", "block 2"),
        ("embed", "block 0", "block 1", "block 2", "head"),
    )
]
