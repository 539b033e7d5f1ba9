"""Choices of plans for ranks: where units are, and moments that come late."""

from __future__ import annotations

from engine.planning.schedule.ops import UPDATE_LANES, Lane

DEVICE_UPDATES = {
    "some": ("embed", "block 0"),
    "all": ("embed", "block 0", "block 1", "block 2", "head"),
}
LATE = {
    "exchange": (Lane.COLLECTIVE,),
    "h2d": (Lane.H2D,),
    "d2h and host": (Lane.D2H, Lane.HOST),
    "compute": (Lane.COMPUTE,),
    "updates": UPDATE_LANES,
    "all": tuple(Lane),
}
