"""Experts whose weights are stacked in one parameter of three dimensions get adapters as PEFT gives
them to such a parameter (its `target_parameters`). Each expert has two factors of its own, and the
module runs with a weight to which their products are added: `W_e + scaling * B_e A_e`.

`lora_A.weight` [rank * experts, features in] has the rows of one `A_e` after the other. In
`lora_B.weight` [features out, rank * experts] the experts take turns from column to column.

PEFT wraps a module once for each of its parameters. So the factors of the last one are in the
module itself, those of the one before in its `base_layer`, and so on.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from engine.config.adapters import Adapters
from engine.model.lora.lora_layer import Factor
from engine.planning.layout.adapter_layout import BASE_LAYER, FACTORS, Stack, places_of


class _Inner(nn.Module):
    """Factors where PEFT wraps the module once more."""


class _WithStackAdapters(nn.Module):
    """A class of modules with adapters for some of their parameters inherits from this and from the
    module's own class. It takes over all that a module is. The factors are on the meta device.
    """

    def __init__(
        self, module: nn.Module, stacks: Sequence[Stack], adapters: Adapters, dtype: torch.dtype
    ):
        nn.Module.__init__(self)
        self.__dict__.update(vars(module))
        self.lora_stacks = {stack.name: stack for stack in stacks}
        self.lora_scaling = adapters.scaling
        self._in_use: dict[str, torch.Tensor] = {}
        """Weights with what their adapters add, by name, while the module runs."""
        holder: nn.Module = self
        for stack in reversed(stacks):
            for factor, shape in zip(FACTORS, stack.factor_shapes(adapters.rank)):
                holder.add_module(factor, Factor(shape, dtype))
            if stack is not stacks[0]:
                inner = _Inner()
                holder.add_module(BASE_LAYER, inner)
                holder = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns with the weights of its adapters added."""
        places = places_of(list(self.lora_stacks))
        self._in_use = {name: self._adapted(name, place) for name, place in places.items()}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._in_use = {}

    def _adapted(self, name: str, place: str) -> torch.Tensor:
        """Returns a weight [experts, ...] with what its adapter adds."""
        weight = cast(torch.Tensor, self._parameters[name])
        factors = [self.get_parameter(f"{place}{each}.weight").to(weight.dtype) for each in FACTORS]
        left, right = self.lora_stacks[name].products(factors[0], factors[1])
        return torch.baddbmm(weight, left, right, alpha=self.lora_scaling)

    def merged(
        self, name: str, weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Returns the weight, in its own shape, that makes the module compute what it computes with
        the adapter of `name`. factors: `lora_A` [rank * experts, features in] and `lora_B`
        [features out, rank * experts].
        """
        left, right = self.lora_stacks[name].products(*factors)
        return weight + left @ right * self.lora_scaling


def _parameter(name: str) -> property:
    """Returns what a class has for a parameter: it is the parameter itself, or what the module runs
    with.
    """

    def get(self: _WithStackAdapters) -> torch.Tensor | None:
        return self._in_use.get(name, self._parameters[name])

    return property(get)


@functools.cache
def _with_stack_adapters(module: Any, names: tuple[str, ...]) -> Any:
    """Returns the class of modules of the class `module` that have adapters for these parameters.
    There is one for each, so that blocks are of one kind.
    """
    own = {name: _parameter(name) for name in names}
    return type(f"Lora{module.__name__}", (_WithStackAdapters, module), own)


def with_stack_adapters(
    module: nn.Module, stacks: Sequence[Stack], adapters: Adapters, dtype: torch.dtype
) -> nn.Module:
    """Returns a module with adapters for some of its parameters, in the place of `module`. stacks:
    these parameters, in the order of the module.
    """
    names = tuple(stack.name for stack in stacks)
    made = _with_stack_adapters(cast(Hashable, type(module)), names)
    return made(module, stacks, adapters, dtype)


def stack_of(module: nn.Module, name: str, shape: Sequence[int]) -> Stack:
    """Returns what PEFT takes a parameter of three dimensions of a module for. Some families have
    the features of their experts the other way round, and mark that.
    """
    experts, *features = shape
    is_transposed = bool(getattr(module, "is_transposed", False))
    taken, returned = features if is_transposed else reversed(features)
    return Stack(name, experts, (taken, returned), is_transposed)


def stack_adapters(block: nn.Module) -> Mapping[str, tuple[nn.Module, str]]:
    """Returns the parameters of a block that have an adapter by themselves, by name: each with its
    module, and with what the names of its factors begin with.
    """
    found: dict[str, tuple[nn.Module, str]] = {}
    for owner, module in block.named_modules():
        if isinstance(module, _WithStackAdapters):
            for name, place in places_of(list(module.lora_stacks)).items():
                found[f"{owner}.{name}"] = (module, f"{owner}.{place}")
    return found


def merged_stack(
    module: nn.Module, name: str, weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Returns a weight of `module` [experts, ...] with its adapter merged. factors: `lora_A` [rank
    * experts, features in] and `lora_B` [features out, rank * experts].
    """
    return cast(_WithStackAdapters, module).merged(name, weight, factors)
