"""The memory that a block takes with sequence tiling of some of its parts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

LONG_ROW = 16_384
"""Only rows that are longer than this may run in sequence chunks."""
SEQUENCE_CHUNKS = (16_384, 4_096)
"""Sequence chunks of so many tokens are tried, in this order. On a GPU, matrix products of the
smaller ones are a little slower, and gradient accumulators are added up more often.
"""


@dataclass(frozen=True)
class TiledBlock:
    """Has the bytes of one block, beside its input and the gradient of its output, while parts of
    it run in sequence chunks (`engine.model.build.measure_shape`).
    """

    kept: float
    """Autograd keeps so many bytes for each token of a row."""
    outside: float
    """While no sequence chunk runs, a token takes at most so many bytes, the kept ones included."""
    outside_fixed: float
    """It takes so many more then, whatever the length of a row is."""
    inside: float
    """While sequence chunks run, a token of the row takes at most so many bytes."""
    of_chunk: float
    """A token of the sequence chunk takes so many more then."""
    inside_fixed: float
    """It takes so many more then, whatever the lengths are, above all for gradient accumulators."""
    parameter_count: float
    """Number of parameters of the parts that run in sequence chunks."""

    def kept_bytes(self, tokens: int) -> int:
        """Returns the bytes that autograd keeps for so many tokens."""
        return round(self.kept * tokens)

    def peak_bytes(self, tokens: int, tile_tokens: int) -> int:
        """Returns the most bytes that exist at once in a recompute and the backward after it."""
        inside = self.inside * tokens + self.of_chunk * min(tokens, tile_tokens)
        return round(
            max(self.outside * tokens + self.outside_fixed, inside + self.inside_fixed, self.kept)
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """All values in order, as rows of JSON have them."""
        return astuple(self)


def tiled_block(numbers: Sequence[float] | None) -> TiledBlock | None:
    """Returns the block with these `numbers`; None where there are none."""
    return TiledBlock(*numbers) if numbers else None


def sequence_chunks_for(row_length: int) -> tuple[int, ...]:
    """Returns the sizes of sequence chunks that rows of so many tokens may run in."""
    return (
        tuple(size for size in SEQUENCE_CHUNKS if size < row_length)
        if row_length > LONG_ROW
        else ()
    )
