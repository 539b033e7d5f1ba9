"""Adapters in the blocks of a model, and their places in the planes: the factors are trained, and
all other parameters are frozen, but for those of modules that are trained as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.config.adapters import Adapters
from engine.model.lora.lora_layer import with_adapter
from engine.model.lora.parametrized import stack_of, with_stack_adapters
from engine.model.lora.targets import Modules, chosen_layers, chosen_stacks, saved_parameters
from engine.planning.layout.adapter_layout import factor_specs, stack_specs
from engine.planning.layout.freezing import frozen_but
from engine.planning.layout.layout import ParameterSpec, UnitLayout, lay_out


@dataclass(frozen=True)
class Block:
    """A block that may get adapters."""

    module: nn.Module
    prefix: str
    """Beginning of the full names of its modules."""
    unrun: Collection[str]
    """Layers whose weights it reads without running them, or that return more than a linear layer
    does.
    """
    untrained: Collection[str]
    """Layers whose weights get no gradient, nor would an adapter."""


@dataclass(frozen=True)
class Family:
    """What PEFT and transformers know of the models of a family."""

    name: str
    """`model_type` of the configuration."""
    stacked: str
    """Whether its experts were single layers in an earlier version of transformers."""
    transposed: type[nn.Module]
    """Class of linear layers that have their weights as [features in, features out]."""

    def refuses(self, layer: str) -> str:
        """Returns why no layer of this name can have an adapter; an empty text if it can."""
        if self.name in _MAMBAS and layer == "out_proj":
            return "PEFT refuses adapters there in models of this kind"
        if layer in _OF_EXPERTS.get(self.stacked, ()):
            return f"PEFT takes {layer} for the experts in models of this kind"
        return ""


_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_OF_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class Adaptable:
    """A model that has no adapters yet."""

    whole: nn.Module
    blocks: Sequence[Block]
    layouts: Sequence[UnitLayout]
    """Layouts of embed, the blocks and the head."""
    aliases: Mapping[str, str]
    """First name of each tied parameter, by its second name."""
    family: Family
    dtype: torch.dtype
    """Dtype in which the factors are computed."""

    @property
    def transposed(self) -> type[nn.Module]:
        return self.family.transposed


def place_adapters(model: Adaptable, adapters: Adapters) -> list[UnitLayout]:
    """Puts adapters into the blocks of a model, and returns its new layouts. Raises ConfigError for
    names that the model lacks; it is unchanged then.
    """
    trained = saved_parameters(model.layouts, model.aliases, adapters.save_modules)
    modules = _modules(model)
    chosen, stacks = set(chosen_layers(modules, adapters)), chosen_stacks(modules, adapters)
    embed, *blocks, head = [frozen_but(layout, trained) for layout in model.layouts]
    for at, block in enumerate(model.blocks):
        specs = list(blocks[at].parameters)
        for name, layer in list(block.module.named_modules()):
            if block.prefix + name in chosen:
                features = _features(layer, model.transposed)
                adapted = with_adapter(layer, features, adapters, model.dtype)
                block.module.set_submodule(name, adapted)
                specs += factor_specs(block.prefix, name, features, adapters.rank)
        specs += _place_in_experts(block, stacks, adapters, model.dtype)
        blocks[at] = lay_out(blocks[at].unit, specs)
    return [embed, *blocks, head]


def _place_in_experts(
    block: Block, names: Collection[str], adapters: Adapters, dtype: torch.dtype
) -> list[ParameterSpec]:
    """Puts adapters beside the stacked experts of a block, and returns the specifications of their
    factors. names: the full names of these parameters in all blocks.
    """
    specs: list[ParameterSpec] = []
    for owner, module in list(block.module.named_modules()):
        stacks = [
            stack_of(module, name, parameter.shape)
            for name, parameter in module.named_parameters(recurse=False)
            if f"{block.prefix}{owner}.{name}" in names
        ]
        if stacks:
            adapted = with_stack_adapters(module, stacks, adapters, dtype)
            block.module.set_submodule(owner, adapted)
            specs += stack_specs(block.prefix, owner, stacks, adapters.rank)
    return specs


def _features(layer: nn.Module, transposed: type[nn.Module]) -> tuple[int, int]:
    """Returns how many features a linear layer takes and returns."""
    first, second = layer.get_parameter("weight").shape
    return (first, second) if isinstance(layer, transposed) else (second, first)


def _modules(model: Adaptable) -> Modules:
    linear: dict[str, str] = {}
    others: dict[str, str] = {}
    for block in model.blocks:
        for name, module in block.module.named_modules():
            if isinstance(module, (nn.Linear, model.transposed)):
                linear[block.prefix + name] = _reason_against(name, block, model.family)
            elif name:
                others[block.prefix + name] = type(module).__name__
    inside = linear.keys() | others.keys() | {block.prefix[:-1] for block in model.blocks}
    outside = [name for name, _ in model.whole.named_modules() if name and name not in inside]
    stacked: dict[str, str] = {}
    for block, layout in zip(model.blocks, model.layouts[1:-1]):
        for spec in layout.parameters:
            is_stacked = len(spec.shape) == 3 and spec.shape[0] > 1
            if is_stacked and not spec.name.endswith(".weight"):  # that is a convolution's
                is_reached = spec.name not in block.untrained
                stacked[spec.full_name] = "" if is_reached else "no gradient reaches it"
    return Modules(linear, others, outside, stacked)


def _reason_against(name: str, block: Block, family: Family) -> str:
    """Returns why a layer of a block can have no adapter; an empty text if it can."""
    if name in block.unrun:
        return "this model does not run it as a linear layer, so an adapter would add nothing"
    if f"{name}.weight" in block.untrained:
        return "no gradient reaches it"
    return family.refuses(name.rpartition(".")[2])
