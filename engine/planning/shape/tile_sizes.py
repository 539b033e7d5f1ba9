"""The memory that a block takes is said here, where parts of it run in tiles. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

LONG_ROW = 16_384
"""Only rows that are longer than this may run in tiles."""
TILES = (16_384, 4_096)
"""Tiles of so many tokens are tried, in this order. On a GPU, matrix products of the smaller ones
are a little slower, and gradient accumulators are added up more often.
"""


@dataclass(frozen=True)
class TiledBlock:
    """A `TiledBlock` has the bytes of one block, beside its input and the gradient of its output,
    while parts of it run in tiles (`engine.model.build.measure_shape`).
    """

    kept: float
    """Autograd keeps so many bytes for each token of a row."""
    outside: float
    """While no tile runs, a token takes at most so many bytes, the kept ones included."""
    outside_fixed: float
    """It takes so many more then, whatever the length of a row is."""
    inside: float
    """While tiles run, a token of the row takes at most so many bytes."""
    of_tile: float
    """A token of the tile takes so many more then."""
    inside_fixed: float
    """It takes so many more then, whatever the lengths are, above all for gradient accumulators."""
    parameter_count: float
    """The parts that run in tiles have so many parameters."""

    def kept_bytes(self, tokens: int) -> int:
        """Returns the bytes that autograd keeps for so many tokens."""
        return round(self.kept * tokens)

    def peak_bytes(self, tokens: int, tile_tokens: int) -> int:
        """Returns the most bytes that exist at once in a recompute and the backward after it."""
        inside = self.inside * tokens + self.of_tile * min(tokens, tile_tokens)
        return round(
            max(self.outside * tokens + self.outside_fixed, inside + self.inside_fixed, self.kept)
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """Returns all values in order, as rows of JSON have them."""
        return astuple(self)


def tiled_block(numbers: Sequence[float] | None) -> TiledBlock | None:
    """Returns the block with these `numbers`; None where there are none."""
    return TiledBlock(*numbers) if numbers else None


def tiles_for(row_length: int) -> tuple[int, ...]:
    """Returns the sizes of tiles that rows of so many tokens may run in."""
    return tuple(tile for tile in TILES if tile < row_length) if row_length > LONG_ROW else ()
