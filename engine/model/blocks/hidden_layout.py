"""Layouts of hidden states of families that have another shape than [rows, tokens, width]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HiddenLayout:
    """How a family's hidden state lies in a flat one [rows, tokens, width]. Gemma 3n has several
    states a token in front of the rows, [streams, rows, tokens, features], and DeepSeek V4 has them
    behind the tokens.
    """

    rows: int
    """Dimension of the rows in the family's shape."""
    tokens: int
    """Dimension of the tokens."""
    rest: tuple[int, ...]
    """Sizes of the other dimensions, in the family's order."""

    @classmethod
    def between(
        cls, one: tuple[int, ...], other: tuple[int, ...], grown: tuple[int, int]
    ) -> HiddenLayout | None:
        """Returns the form of states that have the shape `one` for a single row of tokens, and the
        shape `other` where `grown` is the number of rows and of tokens. Returns None where the
        shapes do not show it: exactly two places must change, the first of them for the rows.
        """
        if len(one) != len(other):
            return None
        changed = [place for place, sizes in enumerate(zip(one, other)) if sizes[0] != sizes[1]]
        if len(changed) != 2 or tuple(other[place] for place in changed) != grown:
            return None
        rest = tuple(size for place, size in enumerate(one) if place not in changed)
        return cls(changed[0], changed[1], rest)

    @property
    def width(self) -> int:
        """Number of elements of a token."""
        return math.prod(self.rest)

    @property
    def _order(self) -> list[int]:
        """The family's dimensions with rows and tokens in front."""
        others = [at for at in range(len(self.rest) + 2) if at not in (self.rows, self.tokens)]
        return [self.rows, self.tokens, *others]

    def flat(self, state: torch.Tensor) -> torch.Tensor:
        """Returns a family's state as [rows, tokens, width]."""
        return state.permute(self._order).flatten(2)

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a flat state [rows, tokens, width] in the family's shape."""
        order = self._order
        back = [order.index(place) for place in range(len(order))]
        # A family's code may view its state in another shape.
        return flat.unflatten(2, self.rest).permute(back).contiguous()
