"""An adapter has two factors, which are parameters of its block. Here are their names, shapes and
places in the planes. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.planning.layout.layout import ParameterSpec, UnitLayout, lay_out

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = ("lora_A", "lora_B")
"""Names of the factors of an adapter, which are modules in their layer."""
BASE_LAYER = "base_layer"
"""Name under which PEFT keeps what it wraps."""


class Stack(NamedTuple):
    """A parameter with one matrix for each of several experts."""

    name: str
    experts: int
    features: tuple[int, int]
    """Numbers of features that a matrix takes and returns, as PEFT understands it."""
    is_transposed: bool
    """Whether the parameter is [experts, features in, features out], and not the other way
    round.
    """

    def factor_shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of `lora_A` and `lora_B`."""
        taken, returned = self.features
        return (self.experts * rank, taken), (returned, self.experts * rank)

    def products(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the two factors of what is added to the parameter, each [experts, ...]. first:
        `lora_A` [rank * experts, features in]. second: `lora_B` [features out, rank * experts].
        """
        rows = first.reshape(self.experts, -1, first.shape[-1])
        columns = second.reshape(second.shape[0], -1, self.experts).permute(2, 0, 1)
        if self.is_transposed:
            return rows.transpose(1, 2), columns.transpose(1, 2)
        return columns, rows


def places_of(names: Sequence[str]) -> dict[str, str]:
    """Returns what the names of the factors of several parameters of a module begin with. PEFT
    wraps the module for one parameter after the other, so the last one is outermost.
    """
    return {name: f"{BASE_LAYER}." * at for at, name in enumerate(reversed(names))}


def stack_specs(prefix: str, owner: str, stacks: Sequence[Stack], rank: int) -> list[ParameterSpec]:
    """Returns the specifications of the factors of parameters of the module `owner` of a block.
    prefix: the full names of the block begin with it.
    """
    places = places_of([stack.name for stack in stacks])
    specs = []
    for stack in stacks:
        for factor, shape in zip(FACTORS, stack.factor_shapes(rank)):
            own = f"{owner}.{places[stack.name]}{factor}.weight"
            specs.append(
                ParameterSpec(
                    own, prefix + own, shape, decay=True, adapter=True, experts=stack.experts
                )
            )
    return specs


def adapted_stacks(layout: UnitLayout) -> int:
    """Returns the elements of all parameters of a block that have an adapter for each of their
    experts.
    """
    by_name = {spec.name: spec for spec in layout.parameters if spec.experts}
    found = 0
    for name, first in by_name.items():
        if name.endswith("lora_A.weight"):
            second = by_name[f"{name.removesuffix('lora_A.weight')}lora_B.weight"]
            found += first.experts * first.shape[1] * second.shape[0]
    return found


def factor_specs(
    prefix: str, name: str, features: tuple[int, int], rank: int
) -> list[ParameterSpec]:
    """Returns the specifications of the factors of the layer `name` of a block: `lora_A` [rank,
    features in] and `lora_B` [features out, rank]. prefix: the full names of the block begin with
    it. features: numbers that the layer takes and returns.
    """
    taken, returned = features
    specs = []
    for factor, shape in zip(FACTORS, ((rank, taken), (returned, rank))):
        own = f"{name}.{factor}.weight"
        specs.append(ParameterSpec(own, prefix + own, shape, decay=True, adapter=True))
    return specs


def adapted_layout(
    unit: str, layers: Sequence[tuple[int, int]], keep_in_fp32: Sequence[int], rank: int
) -> UnitLayout:
    """Returns the layout of a block with adapters, without the parameters that are in weight_high
    alone. layers: the features that each layer with an adapter takes and returns, in the order of
    the block. exact: the elements of each parameter that stays in fp32 in a bf16 model.
    """
    specs = [
        ParameterSpec(f"exact.{at}", "", (numel,), decay=False, keep_in_fp32=True, frozen=True)
        for at, numel in enumerate(keep_in_fp32)
    ]
    for at, features in enumerate(layers):
        specs += factor_specs("", str(at), features, rank)
    return lay_out(unit, specs)
