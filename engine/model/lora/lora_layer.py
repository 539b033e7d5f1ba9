"""A linear layer that has an adapter (LoRA, arXiv 2106.09685) keeps its name, parameters and code.

In its place is one of another class, whose `forward` adds the product of two small factors:

    y = layer(x) + scaling * B (A dropout(x))

`A` is `lora_A.weight` [rank, features in], and `B` is `lora_B.weight` [features out, rank], as PEFT
names and computes them. So the names in a file of PEFT are those of the parameters, and the frozen
parameters are called what the model calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, cast

import torch
import torch.nn.functional as torch_functional
from torch import nn

from engine.config.adapters import Adapters
from engine.model.lora.adapted_linear import adapted_linear


class Factor(nn.Module):
    """One factor of an adapter. It is no linear layer, so that nothing that initializes or names
    the linear layers of a model takes it for one.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


class _WithAdapter(nn.Module):
    """A class of linear layers inherits from this and from the layer's own class. It takes over
    all that a layer is. features: those that the layer takes, and that it returns. The factors are
    on the meta device.
    """

    is_linear = False
    """Whether the layer computes what `nn.Linear` does."""

    def __init__(
        self, layer: nn.Module, features: tuple[int, int], adapters: Adapters, dtype: torch.dtype
    ):
        nn.Module.__init__(self)
        self.__dict__.update(vars(layer))
        taken, returned = features
        self.lora_A = Factor((adapters.rank, taken), dtype)
        self.lora_B = Factor((returned, adapters.rank), dtype)
        self.lora_scaling = adapters.scaling
        self.lora_dropout = adapters.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., features out] for an input `x` [..., features in]."""
        first, second = self.lora_A.weight, self.lora_B.weight
        weight = cast(torch.Tensor, self.weight)
        alike = x.dtype == weight.dtype == first.dtype
        if self.is_linear and alike and not self.lora_dropout:
            bias = cast(torch.Tensor | None, self.bias)
            flat = x.reshape(-1, x.shape[-1])
            found, _ = adapted_linear(flat, weight, bias, first, second, self.lora_scaling)
            return found.view(*x.shape[:-1], found.shape[-1])
        out = super().forward(x)
        given = x.to(first.dtype)
        if self.lora_dropout:
            given = torch_functional.dropout(given, self.lora_dropout, self.training)
        low = torch_functional.linear(given, first)
        if out.dtype != second.dtype:  # the layer stays in fp32
            return out + (torch_functional.linear(low, second) * self.lora_scaling).to(out.dtype)
        flat, rows = out.reshape(-1, out.shape[-1]), low.reshape(-1, low.shape[-1])
        # The sum is part of the product, so the result of the layer is read and written once less.
        return torch.addmm(flat, rows, second.t(), alpha=self.lora_scaling).view(out.shape)


@functools.cache
def _with_adapter(layer: Any) -> Any:
    """Returns the class of layers of the class `layer` that have an adapter. There is one for each,
    so that blocks are of one kind.
    """
    is_linear = getattr(layer, "forward", None) is nn.Linear.forward
    return type(f"Lora{layer.__name__}", (_WithAdapter, layer), {"is_linear": is_linear})


def with_adapter(
    layer: nn.Module, features: tuple[int, int], adapters: Adapters, dtype: torch.dtype
) -> nn.Module:
    """Returns a linear layer with an adapter, in the place of `layer`."""
    return _with_adapter(cast(Hashable, type(layer)))(layer, features, adapters, dtype)


def class_without_adapter(layer: nn.Module) -> type[nn.Module]:
    """Returns the class of a layer, or the one that it had before it got an adapter."""
    found = type(layer)
    return found.__bases__[1] if isinstance(layer, _WithAdapter) else found


def merged_weight(
    layer: nn.Module, weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Returns the weight that makes `layer` compute what it computes with its adapter. weight: that
    of the layer, in its own shape. factors: `lora_A` [rank, features in] and `lora_B` [features
    out, rank].
    """
    first, second = factors
    product = second @ first * float(cast(Any, layer).lora_scaling)
    return weight + (product if isinstance(layer, nn.Linear) else product.t())
