"""An `OpContext` is what the ops of one plan use: the parts of their engine, and the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.model.build.units import StreamedModel, Unit
from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.schedule import StepPlan
from engine.planning.shape.saved_attention_sizes import aligned, with_room
from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.device.backend import Backend
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.device_state import DeviceState
from engine.runtime.step.pinned_buffers import PinnedSummary, SavedBlockInputs
from engine.runtime.step.templates import Templates


@dataclass
class OpContext:
    """What the ops of one plan use and what is the same for every step. An engine makes one for its
    training plan; ``dataclasses.replace(context, plan=plan)`` is that of another plan over the same
    parts.
    """

    plan: StepPlan
    model: StreamedModel
    host_states: HostStates
    state: DeviceState
    templates: Templates
    backend: Backend
    optimizer: HostOptimizer | None
    """Optimizer of the host; None in an engine that only evaluates and samples."""
    loss_chunk: int
    """Number of positions whose logits exist at once."""
    gradient_rings: dict[Buffer, torch.Tensor]
    """Flat tensors [numel] on the host through which kept gradients pass."""
    state_rings: dict[Buffer, memoryview]
    """Buffers of moments that are on the disk while they are updated, in whole pages."""
    collectives: Collectives | None
    """Collectives that reach the other ranks; None where there are none."""
    saved_block_inputs: SavedBlockInputs
    """Where block inputs wait from forward to backward, if not on the device."""
    summary: PinnedSummary
    """What the host reads of a step."""
    units: dict[str, Unit] = field(init=False)
    positions: dict[str, int] = field(init=False)
    """Index of each unit among all units."""
    block_positions: dict[str, int] = field(init=False)
    """Index of each block among the blocks."""
    lowest: str = field(init=False)
    """Unit with which backward ends, below which nothing is trained."""
    lowest_block: int = field(init=False)
    """`lowest` has this index among the blocks: -1 for the embed unit."""

    def __post_init__(self) -> None:
        self.units = {unit.name: unit for unit in self.model.units}
        self.positions = {name: place for place, name in enumerate(self.units)}
        self.block_positions = {unit.name: place for place, unit in enumerate(self.model.blocks)}
        self.lowest = next(name for name in self.units if name not in self.plan.forward_only)
        self.lowest_block = min(self.positions[self.lowest] - 1, len(self.block_positions))

    def block_input_numel(self, shape: torch.Size) -> int:
        """Returns how many elements of a ring buffer hold a block input of this shape."""
        return shape.numel() * self.model.state_items

    def kept_numel(self, unit: str, shape: torch.Size) -> int:
        """Returns how many elements of a ring buffer hold what a block keeps on the host: its
        input, of this shape [rows, tokens, width], and maybe what attention returned.
        """
        numel, item = self.block_input_numel(shape), self.state.dtype.itemsize
        of_token = self.plan.attention_bytes if unit in self.plan.with_attention else 0
        return with_room(numel * item, of_token, shape[0] * shape[1]) // item

    def attention_room(self, unit: str, ring: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the room for what attention returned, uint8 [bytes], in a `ring` [numel] whose
        block input has this shape.
        """
        start = aligned(self.block_input_numel(shape) * ring.itemsize)
        return ring.view(torch.uint8)[start : self.kept_numel(unit, shape) * ring.itemsize]

    @property
    def process_group(self) -> Collectives:
        """The collectives. Only plans for several ranks use them."""
        assert self.collectives is not None
        return self.collectives

    def shard(self, unit: str) -> tuple[int, int]:
        """Returns where this rank's shard of a unit begins and ends, in elements."""
        return self.plan.shards.bounds(self.units[unit].layout.numel)
