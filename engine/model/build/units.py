"""A Hugging Face model divided into units, which are streamed.

A unit's layout (engine/planning/layout/layout.py) has the places of its parameters in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.config.adapters import Adapters
from engine.config.trained_parts import Parts
from engine.model.blocks.cross_layer_inputs import CrossLayerFlow
from engine.model.blocks.position_wise import tiled_parts
from engine.model.build.packing_trial import Packing
from engine.model.build.skeleton import Skeleton
from engine.model.lora.inject import Adaptable, Block, Family, place_adapters
from engine.planning.layout.freezing import with_frozen
from engine.planning.layout.layout import Dtype, ParameterSpec, UnitLayout
from engine.planning.shape.quantized_weights import Quantized

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Unit:
    """What is streamed as a whole: the embedding, one block, or the head."""

    name: str
    layout: UnitLayout
    block: nn.Module | None = None
    """None for the embed unit and the head unit."""
    kind: int = -1
    """Number of the kind: blocks of one kind perform the same computation and can share one
    template on the device. It is -1 if the unit has no block.
    """
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    """Modules in the block that have a `layer_idx`, each with it, because some families use it in
    their computation.
    """
    unrun: frozenset[str] = frozenset()
    """Modules of the block that it runs not at all, or for more than a tensor."""
    untrained: frozenset[str] = frozenset()
    """Parameters of the block that no gradient reaches."""
    shared: dict[str, str] = field(default_factory=dict)
    """Parameters that the block computes with, as other blocks do. They belong to the embed unit,
    where they have the second name.
    """
    bindings: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Attributes and their modules to which a parameter of the embed or head unit is bound."""

    def lay_out_as(self, layout: UnitLayout) -> None:
        """Replaces the layout by another one for the same parameters."""
        self.layout = layout

    def note_trial(self, unrun: Iterable[str], untrained: Iterable[str]) -> None:
        """Takes what a trial found: modules that are not run, parameters without a gradient."""
        self.unrun, self.untrained = frozenset(unrun), frozenset(untrained)

    def be_of_kind(self, kind: int) -> None:
        """Makes the block one of this kind."""
        self.kind = kind

    def move_buffers(self, device: torch.device) -> None:
        """Moves the block's buffers to `device`."""
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}


@dataclass(frozen=True)
class RouterLoss:
    """Loss that balances the experts of a mixture of experts that asks for it
    (`engine.runtime.step.router_aux_loss`).
    """

    coefficient: float
    experts: int
    """Number of experts among which each router chooses."""
    chosen: int
    """Number of experts that it chooses for a token."""
    routers: dict[str, str]
    """Name of the router in each block that has one, in forward order."""


@dataclass
class StreamedModel:
    """A causal language model divided into a skeleton and units in forward order."""

    config: Any
    skeleton: Skeleton
    units: list[Unit]
    tied: bool
    """Whether the head uses the embed unit's weights."""
    dtype: Dtype
    active_parameters: int
    """Number of parameters that a token passes through: all except those of experts that its router
    does not choose.
    """
    work_parameters: int | None
    """Number of parameters of a model that is trained as a whole and needs as many FLOPs for a
    step, if a token goes through all of them; None where this one is trained as a whole.
    """
    residual_streams: int
    """Number of hidden states per token that a block's input is as large as: one, but several with
    hyper-connections, and two in float32 beside bfloat16 weights.
    """
    packing: Packing
    """Whether documents may share a row, and if not, why."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name that owns the plane of each tied parameter, by its second name."""
    non_text: dict[str, int] = field(default_factory=dict)
    """Number of elements of the parameters of a model that also reads images or sound through which
    no text passes. They are no part of a unit, are never loaded, and remain unchanged.
    """
    router_loss: RouterLoss | None = None
    """Further loss of training, of the router; None where the configuration asks for none."""
    quantized: Quantized | None = None
    """How the weights of the checkpoint are stored. They are dequantized on loading."""
    state_items: int = 1
    """Bytes of an element of a block's state, in elements of `dtype`."""
    cross_layer_flow: CrossLayerFlow | None = None
    """What passes between blocks in addition to the hidden state; None for nothing."""
    parts: Parts | Adapters | None = None
    """Parts that are trained; None for the whole model."""

    @property
    def blocks(self) -> list[Unit]:
        return self.units[1:-1]

    def shared_by(self, unit: Unit) -> list[ParameterSpec]:
        """Returns the parameters of embed that a block computes with, in its order."""
        known = {spec.name: spec for spec in self.units[0].layout.parameters}
        return [known[name] for name in unit.shared.values()]

    @property
    def layouts(self) -> list[UnitLayout]:
        return [unit.layout for unit in self.units]

    def tiled_parts(self, unit: Unit) -> list[str]:
        """Returns the modules of a block that may run in sequence chunks along a row, by their
        names in it.

        Where routers have a loss, what they return is collected as blocks run, and a module in
        sequence chunks runs once more.
        """
        assert unit.block is not None  # only blocks run in sequence chunks
        if self.router_loss is not None:
            return []
        return tiled_parts(unit.block, self.packing.position_wise)

    @property
    def hidden_width(self) -> int:
        """Number of elements per token of a block's input."""
        return self.config.get_text_config().hidden_size * self.residual_streams

    @property
    def parameter_count(self) -> int:
        return sum(layout.parameter_count for layout in self.layouts)

    @property
    def trained_count(self) -> int:
        """Number of parameters that are trained."""
        return sum(layout.trained_count for layout in self.layouts)

    @property
    def holds_embed(self) -> bool:
        """Whether a pass uses the embed unit's weights throughout: by the head, or by blocks."""
        return self.tied or any(unit.shared for unit in self.blocks)

    @property
    def frozen_units(self) -> tuple[str, ...]:
        """The units that have parameters, none of which is trained, in forward order."""
        return tuple(layout.unit for layout in self.layouts if layout.is_frozen)

    @property
    def has_fp32_weights(self) -> bool:
        """Whether any weights stay in fp32 in a bf16 model."""
        return any(layout.fp32_numel for layout in self.layouts)

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that are saved with the weights, by full name and in any shape.

        One example is a router's correction bias. These buffers are never trained. Those beside
        `non_text` parameters are not among them.
        """
        whole = self.skeleton.model
        decoder = f"{self._decoder_name}." if self.non_text else ""
        names = {name for name in whole.state_dict() if name.startswith(decoder)}
        return {name: buffer for name, buffer in whole.named_buffers() if name in names}

    @property
    def whole_class(self) -> str:
        """The class in transformers of a model that also reads images or sound; it is empty for
        others.
        """
        return type(self.skeleton.model).__name__ if self.non_text else ""

    @property
    def _decoder_name(self) -> str:
        """The name of the language model in the whole model."""
        decoder = self.skeleton.model.get_decoder()
        return next(n for n, part in self.skeleton.model.named_modules() if part is decoder)

    @property
    def unrecordable(self) -> str:
        """Why no block can be recorded as a CUDA graph; it is empty where blocks can."""
        if any(unit.shared for unit in self.blocks):
            return "its blocks share weights"
        if self.router_loss is not None:
            return "what its router has chosen is counted for the loss of output_router_logits"
        return "its blocks hand values to later blocks" if self.cross_layer_flow is not None else ""

    @property
    def counted_parameters(self) -> int:
        """Number of parameters by which FLOPs of a step are counted."""
        return self.active_parameters if self.work_parameters is None else self.work_parameters

    def layouts_with(self, parts: Parts | Adapters, family: Family) -> list[UnitLayout]:
        """Returns the layouts of the model if only `parts` are trained. Adapters are added to its
        blocks. Raises ConfigError where it lacks what is named.
        """
        if isinstance(parts, Parts):
            return with_frozen(self.layouts, self.aliases, parts)
        blocks = []
        for unit in self.blocks:
            assert unit.block is not None  # every block has a module
            first = unit.layout.parameters[0]
            prefix = first.full_name.removesuffix(first.name)
            blocks.append(Block(unit.block, prefix, unit.unrun, unit.untrained))
        dtype = TORCH_DTYPES[self.dtype]
        whole = self.skeleton.model
        model = Adaptable(whole, blocks, self.layouts, self.aliases, family, dtype)
        return place_adapters(model, parts)

    def train_parts(
        self, parts: Parts | Adapters, layouts: Sequence[UnitLayout], counted: tuple[int, int]
    ) -> None:
        """Replaces the layouts of all units by others in which only `parts` are trained. Blocks are
        of one kind only where the same parameters of them are trained, since a template has the
        places of its parameters. counted: the active parameters and the `work_parameters`.
        """
        self.parts = parts
        self.active_parameters, self.work_parameters = counted
        kinds: dict[tuple[int, tuple[tuple[str, bool], ...]], int] = {}
        for unit, layout in zip(self.units, layouts, strict=True):
            unit.lay_out_as(layout)
        for unit in self.blocks:
            frozen = tuple((spec.name, spec.frozen) for spec in unit.layout.parameters)
            unit.be_of_kind(kinds.setdefault((unit.kind, frozen), len(kinds)))

    def unit(self, name: str) -> Unit:
        """Returns the unit with this name. Raises StopIteration if there is none."""
        return next(unit for unit in self.units if unit.name == name)
