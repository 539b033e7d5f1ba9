"""`StreamedModel` and its `Unit`s: a Hugging Face model as the pieces that are streamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.model.layout import UnitLayout
from engine.model.packing_trial import Packing
from engine.model.skeleton import Skeleton

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Unit:
    """One streamed unit. `parameters` maps each ParameterSpec name to the (module, attribute) pairs
    it is bound to.
    """

    name: str
    layout: UnitLayout
    block: nn.Module | None = None
    kind: int = -1
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    """`layer_idx` of each module in the block that has one: some families compute with it."""
    bindings: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def lay_out_as(self, layout: UnitLayout) -> None:
        """Another layout of the same parameters."""
        self.layout = layout

    def move_buffers(self, device: torch.device) -> None:
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}


@dataclass
class StreamedModel:
    """A causal language model ready to be streamed: its skeleton and its units in forward order."""

    config: Any
    skeleton: Skeleton
    units: list[Unit]
    tied: bool
    """The head uses the embed unit's weights."""
    dtype: str
    active_parameters: int
    """Parameters that one token passes through (all of them, except for the experts a router does
    not choose).
    """
    packing: Packing
    """Whether documents may share a row, and why not."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Second names of tied parameters, to the name that owns the plane."""

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
        """Buffers that belong to the weights, such as a router's correction bias, by full name;
        never trained.
        """
        names = self.skeleton.model.state_dict().keys()
        return {
            name: buffer for name, buffer in self.skeleton.model.named_buffers() if name in names
        }

    def unit(self, name: str) -> Unit:
        return next(u for u in self.units if u.name == name)
