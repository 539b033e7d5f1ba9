"""A plan is built from `PlanChoices`, `PlaneSizes` and the names of the units. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.plan.ops import GradientSum


@dataclass(frozen=True)
class PlanChoices:
    """A `PlanChoices` says how a step is spread over micro-batches and rounds, and how it uses
    memory.
    """

    micro_batches: int = 1
    """A step has this many micro-batches."""
    rounds: int = 1
    """The micro-batches are spread over this many whole passes, a divisor of their number."""
    slots: int = 2
    """This many device buffers are shared by the blocks that are not resident."""
    prefetch_depth: int = 1
    """A prefetch may be issued this many block uses ahead (at most slots - 1 can be in flight)."""
    resident_blocks: int = 0
    """This many blocks, counted from the last, keep their own slot throughout the step."""
    kept_blocks: int = 0
    """This many blocks, counted from the last, keep their activations from forward to backward.
    They are not recomputed.
    """
    host_boundaries: bool = False
    """Boundaries are kept on the host until backward, not on the device."""
    parked_gradients: bool = False
    """Rounded gradients wait on the device until the clip factor of the step is known, so the host
    has no plane for them.
    """
    shared_outer_slot: bool = False
    """Embed and head share one slot, so embed is fetched again for its backward. The model must not
    be tied.
    """
    boundary_rings: int = 3
    """Host boundaries pass through this many device buffers each way."""
    gradient_sum: GradientSum = GradientSum.VERTICAL
    """It is `VERTICAL` exactly where there is one round."""
    compiled: bool = False
    """The kernels of the blocks and of the loss are compiled by torch."""
    device_homes: tuple[str, ...] = ()
    """The optimizers of these units run on the device, on states that are streamed there. All other
    units' optimizers run on the host.
    """
    update_buffers: int = 0
    """This many pieces of states are on the device at once; it is 0 where all optimizers run on the
    host.
    """
    spare_buffers: int = 0
    """This many of the update buffers, never all of them, use the memory of activations while no
    activations are kept.
    """
    spare_blocks: int = 0
    """The memory for the spare buffers comes from this many blocks, counted from the last. All of
    them must keep their activations.
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns the choices as plain data, in the form used in run records."""
        return asdict(self) | {"gradient_sum": self.gradient_sum.value}


@dataclass(frozen=True)
class PlaneSizes:
    """A `PlaneSizes` gives the sizes of the units' planes. A plan needs them where an optimizer
    runs on the device.
    """

    numel: Mapping[str, int]
    """Each plane of a unit has this many elements."""
    piece_numel: int = 0
    """An update buffer holds a piece of this many elements; 0 stands for the largest block."""
    buffer_bytes: int = 0
    """An update buffer has this many bytes; 0 stands for 14 an element, as with bfloat16 weights
    and moments in fp32.
    """
