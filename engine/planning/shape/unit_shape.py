"""A `UnitShape` holds what the planner needs to know about one unit of a model.

It is plain data, exact to the byte, and needs no torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from engine.planning.layout.optimizer_states import ParameterRun, StateCounts
from engine.planning.schedule.shards import Shards
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.sequence_tiling import TiledBlock

_NONE = Activations()


@dataclass(frozen=True)
class UnitShape:
    """A unit's shape is its size. Fields after `parameter_count` may be 0 for all but blocks."""

    name: str
    numel: int
    """Number of elements of each plane, alignment included. Only weight_high may have more."""
    parameter_count: int
    widest: int = 0
    """Largest number of input or output features per token of any matrix."""
    activations: Activations = _NONE
    """Autograd keeps these for a block without an attention mask."""
    masked_activations: Activations = _NONE
    """Autograd keeps these for a block with a dense attention mask for every row."""
    compiled_activations: Activations = _NONE
    """Autograd keeps these for a compiled block, which recomputes cheap ones, without a mask."""
    tiled: TiledBlock | None = None
    """What it takes with sequence tiling of its parts; None where none can be tiled, or that is not
    known.
    """
    fp32_numel: int = 0
    """Number of elements that stay in fp32 on the device in a bf16 model, alignment included."""
    adapter_features: int = 0
    """What all layers with an adapter take and return."""
    adapted_numel: int = 0
    """Number of elements of stacked experts with adapters, added up anew in every pass."""
    runs: tuple[ParameterRun, ...] = ()
    """Parameters in the order of the planes, without those that are in weight_high alone."""
    frozen_numel: int = 0
    """So many elements, alignment included, are in weight_high alone: they are not trained."""
    frozen_count: int = 0
    """Number of the parameters that are not trained."""
    shared_count: int = 0
    """Parameters of embed that a block computes with, too; of embed, those that blocks compute
    with.
    """

    @property
    def called_count(self) -> int:
        """Number of parameters that a block computes with: its own, and those that blocks share."""
        return self.parameter_count + self.shared_count

    @property
    def weight_numel(self) -> int:
        """Number of elements of the plane weight_high."""
        return self.numel + self.frozen_numel

    @property
    def trained_count(self) -> int:
        """Number of the parameters that are trained."""
        return self.parameter_count - self.frozen_count

    @property
    def is_frozen(self) -> bool:
        """Whether the unit has parameters, none of which is trained."""
        return 0 < self.parameter_count == self.frozen_count

    @property
    def gradient_numel(self) -> int:
        """Number of elements of the gradient of the unit."""
        return 0 if self.is_frozen else self.numel

    @functools.cached_property
    def state_counts(self) -> StateCounts:
        """What decides how many bytes the states take, for any optimizer."""
        return StateCounts(self.name, self.numel, self.runs)

    def padded(self, shards: Shards) -> UnitShape:
        """Returns the unit with the elements of its slot and its accumulator on one of several
        ranks.
        """
        numel, slot = shards.padded(self.numel), shards.slot_numel(self.numel, self.weight_numel)
        return replace(self, numel=numel, frozen_numel=slot - numel)
