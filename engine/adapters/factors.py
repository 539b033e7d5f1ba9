"""An adapter has two factors, which are parameters of its block. Here are their names, shapes and
places in the planes. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.planes.layout import ParameterSpec, UnitLayout, lay_out

FACTORS = ("lora_A", "lora_B")
"""The factors of an adapter are modules of these names in their layer."""


def factor_specs(
    prefix: str, name: str, features: tuple[int, int], rank: int
) -> list[ParameterSpec]:
    """Returns the specifications of the factors of the layer `name` of a block: `lora_A` [rank,
    features in] and `lora_B` [features out, rank]. prefix: the full names of the block begin with
    it. features: the layer takes so many, and returns so many.
    """
    taken, returned = features
    specs = []
    for factor, shape in zip(FACTORS, ((rank, taken), (returned, rank))):
        own = f"{name}.{factor}.weight"
        specs.append(ParameterSpec(own, prefix + own, shape, decay=True, adapter=True))
    return specs


def adapted_layout(
    unit: str, layers: Sequence[tuple[int, int]], exact: Sequence[int], rank: int
) -> UnitLayout:
    """Returns the layout of a block with adapters, without the parameters that are in weight_high
    alone. layers: the features that each layer with an adapter takes and returns, in the order of
    the block. exact: the elements of each parameter that stays in fp32 in a bf16 model.
    """
    specs = [
        ParameterSpec(f"exact.{at}", "", (numel,), decay=False, exact=True, frozen=True)
        for at, numel in enumerate(exact)
    ]
    for at, features in enumerate(layers):
        specs += factor_specs("", str(at), features, rank)
    return lay_out(unit, specs)
