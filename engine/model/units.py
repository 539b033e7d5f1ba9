"""A `StreamedModel` is a Hugging Face model as the pieces that are streamed, its `Unit`s.

How a unit's parameters lie in memory is told by its layout (engine/model/layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.model.layout import Dtype, UnitLayout
from engine.model.packing_trial import Packing
from engine.model.skeleton import Skeleton

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Unit:
    """A unit is streamed as a whole: the embedding, one block, or the head."""

    name: str
    layout: UnitLayout
    block: nn.Module | None = None
    """The embed unit and the head unit have none."""
    kind: int = -1
    """Blocks of one kind compute alike and can share one template on the device; -1: no block."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    """Each module of the block that has a `layer_idx` is listed: some families compute with it."""
    bindings: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """A parameter of the embed or head unit is bound to these attributes of these modules."""

    def lay_out_as(self, layout: UnitLayout) -> None:
        """Takes another layout of the same parameters."""
        self.layout = layout

    def move_buffers(self, device: torch.device) -> None:
        """Moves the block's buffers to `device`."""
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}


@dataclass
class StreamedModel:
    """A streamed model is a causal language model as a skeleton and units in forward order."""

    config: Any
    skeleton: Skeleton
    units: list[Unit]
    tied: bool
    """The head uses the embed unit's weights."""
    dtype: Dtype
    active_parameters: int
    """A token passes through this many parameters: all but those of experts that its router does
    not choose.
    """
    packing: Packing
    """It tells whether documents may share a row, and why not."""
    aliases: dict[str, str] = field(default_factory=dict)
    """A second name of a tied parameter leads to the name that owns the plane."""

    @property
    def blocks(self) -> list[Unit]:
        return self.units[1:-1]

    @property
    def layouts(self) -> list[UnitLayout]:
        return [unit.layout for unit in self.units]

    @property
    def parameter_count(self) -> int:
        return sum(layout.parameter_count for layout in self.layouts)

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that belong to the weights, by full name and in any shape.

        A router's correction bias is one. They are never trained.
        """
        names = self.skeleton.model.state_dict().keys()
        return {
            name: buffer for name, buffer in self.skeleton.model.named_buffers() if name in names
        }

    def unit(self, name: str) -> Unit:
        """Returns the unit of this name. Raises StopIteration where there is none."""
        return next(unit for unit in self.units if unit.name == name)
