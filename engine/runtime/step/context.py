"""Every op gets access to the parts of the engine and to its plan through an `OpContext`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.build.units import StreamedModel
from engine.planning.schedule.buffers import Buffer
from engine.planning.schedule.schedule import StepPlan
from engine.planning.shape.saved_attention_sizes import aligned, with_room
from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.device.backend import Backend
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.device_state import DeviceState
from engine.runtime.step.pinned_buffers import SavedBlockInputs


@dataclass(frozen=True)
class EngineComponents:
    """An engine has these parts. The ops of all its plans share them."""

    model: StreamedModel
    host_states: HostStates
    state: DeviceState
    backend: Backend
    adamw: HostAdamW | None
    """Optimizer; None in an engine that only evaluates and samples."""
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


class OpContext:
    """Holds everything that the ops of one plan use and that is the same for every step."""

    def __init__(self, parts: EngineComponents, plan: StepPlan):
        self.plan = plan
        self.model = parts.model
        self.host_states = parts.host_states
        self.state = parts.state
        self.backend = parts.backend
        self.adamw = parts.adamw
        self._collectives = parts.collectives
        self.loss_chunk = parts.loss_chunk
        self.gradient_rings = parts.gradient_rings
        self.state_rings = parts.state_rings
        self.saved_block_inputs = parts.saved_block_inputs
        self.units = {unit.name: unit for unit in parts.model.units}
        self.positions = {unit.name: place for place, unit in enumerate(parts.model.units)}
        """Index of each unit among all units."""
        self.lowest = next(name for name in self.units if name not in plan.forward_only)
        """Unit with which backward ends, below which nothing is trained."""
        self.block_positions = {unit.name: place for place, unit in enumerate(parts.model.blocks)}
        """Index of each block among the blocks."""
        self.lowest_block = min(self.positions[self.lowest] - 1, len(self.block_positions))
        """`lowest` has this index among the blocks: -1 for the embed unit."""
        self.summary = parts.backend.host_buffer(len(parts.model.units) + 1, torch.float64)
        """Pinned copy from which the host reads `DeviceState.norms`, float64 [units + 1]."""
        self.clip_factor = parts.backend.host_buffer(1, torch.float32)
        """Pinned copy from which the host reads the clip factor, float32 [1]."""
        self._sums: torch.Tensor | None = None

    def host_sequence_sums(self, sequences: int) -> torch.Tensor:
        """Returns the pinned buffer, float32 [lines, 2], from which the host reads the sums of
        answers. It is made again where a step has another number of lines, which is rare.
        """
        if self._sums is None or len(self._sums) != sequences:
            self._sums = self.backend.host_buffer(2 * sequences, torch.float32).view(sequences, 2)
        return self._sums

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
    def collectives(self) -> Collectives:
        """What reaches the other ranks. Only plans for several ranks use it."""
        assert self._collectives is not None
        return self._collectives

    def shard(self, unit: str) -> tuple[int, int]:
        """Returns where this rank's shard of a unit begins and ends, in elements."""
        return self.plan.shards.bounds(self.units[unit].layout.numel)
