"""An adapter has two factors, which are parameters of its block. Here are their names, shapes and
places in the planes. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.planes.layout import ParameterSpec, UnitLayout, lay_out

FACTORS = ("lora_A", "lora_B")
"""The factors of an adapter are modules of these names in their layer."""


def factor_specs(prefix: str, name: str, features: tuple[int, int], rank: int) -> list[ParameterSpec]:
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


def laid_out_factors(unit: str, layers: Sequence[tuple[int, int]], rank: int) -> UnitLayout:
    """Returns the layout of the factors of a block without its frozen parameters. layers: the
    features that each layer with an adapter takes and returns, in the order of the block.
    """
    numbered = enumerate(layers)
    return lay_out(unit, [s for at, each in numbered for s in factor_specs("", str(at), each, rank)])
