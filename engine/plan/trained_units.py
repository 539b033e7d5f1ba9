"""Some units of a model may be frozen: none of their parameters is trained. This file says how far
the backward of a step then goes. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.plan.buffers import EMBED, HEAD


class TrainedUnits:
    """A `TrainedUnits` says which units are trained. blocks: unit names in forward order."""

    def __init__(self, blocks: Sequence[str], frozen: Collection[str]):
        self._frozen = frozenset(frozen)
        units = (EMBED, *blocks, HEAD)
        self.frozen = tuple(unit for unit in units if unit in self._frozen)
        """No parameter of these units is trained, in forward order."""
        first = next((at for at, unit in enumerate(units) if unit not in self._frozen), len(units))
        self.forward_only = units[:first]
        """These units have no backward, since nothing is trained in them or below."""
        self.blocks_back = [block for block in blocks if block not in self.forward_only]
        """These blocks have a backward, in forward order."""

    def trains(self, unit: str) -> bool:
        """Tells whether a parameter of the unit is trained."""
        return unit not in self._frozen

    def only(self, units: Sequence[str]) -> list[str]:
        """Returns those of the units that are trained, in their order."""
        return [unit for unit in units if unit not in self._frozen]

    @property
    def is_whole(self) -> bool:
        """Tells whether every unit is trained."""
        return not self._frozen
