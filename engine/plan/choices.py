"""`PlanChoices`: what a plan is built from, beside the units themselves. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.plan.ops import GradientSum


@dataclass(frozen=True)
class PlanChoices:
    """What a plan is built from, beside the units themselves."""

    micro_batches: int = 1
    """Micro-batches of a step."""
    rounds: int = 1
    """Whole passes that the micro-batches are spread over; must divide them."""
    slots: int = 2
    """Device buffers shared by the blocks that are not resident."""
    prefetch_depth: int = 1
    """How many block uses ahead a prefetch may be issued (at most slots - 1 can be under way)."""
    resident_blocks: int = 0
    """Blocks, counted from the last, that keep a slot of their own all step long."""
    kept_blocks: int = 0
    """Blocks, counted from the last, whose activations are kept from forward to backward (no
    recompute).
    """
    host_boundaries: bool = False
    """Boundaries wait on the host, not on the device."""
    boundary_rings: int = 3
    """Device buffers, each way, through which host boundaries pass."""
    gradient_sum: GradientSum = GradientSum.VERTICAL
    """`VERTICAL` exactly where rounds = 1."""
    compiled: bool = False
    """Blocks and the loss run as kernels that torch compiles."""
    device_homes: tuple[str, ...] = ()
    """Units whose optimizer runs on the device, on states that are streamed there; all others' runs
    on the host.
    """
    update_buffers: int = 0
    """Pieces of states that are on the device at once; 0 without such units."""
    spare_buffers: int = 0
    """Of those, so many are made from the memory of activations while there are none; not all of
    them.
    """
    spare_blocks: int = 0
    """Of so many blocks, counted from the last, which must be among those that keep them."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gradient_sum": self.gradient_sum.value}
