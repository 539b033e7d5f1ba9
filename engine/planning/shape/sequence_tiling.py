"""The memory that a block takes with sequence tiling of some of its parts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

LONG_ROW = 16_384
"""Length above which rows may run in sequence chunks."""
SEQUENCE_CHUNKS = (16_384, 4_096)
"""Tokens of the sequence chunks that are tried, in this order. On a GPU, matrix products of the
smaller ones are a little slower, and gradients are added up more often.
"""


@dataclass(frozen=True)
class TiledBlock:
    """Bytes of one block, beside its input and the gradient of its output, while parts of it run in
    sequence chunks (`engine.model.build.measure_shape`).
    """

    kept: float
    """Bytes that autograd keeps for each token of a row."""
    outside: float
    """Most bytes of a token while no sequence chunk runs, the kept ones included."""
    outside_fixed: float
    """Further bytes then, whatever the length of a row is."""
    inside: float
    """Most bytes of a token of the row while sequence chunks run."""
    of_chunk: float
    """Further bytes then for each token of the sequence chunk."""
    inside_fixed: float
    """Further bytes then, whatever the lengths are, above all for gradient accumulators."""
    parameter_count: float
    """Number of parameters of the parts that run in sequence chunks."""

    def kept_bytes(self, tokens: int) -> int:
        """Returns the bytes that autograd keeps for `tokens` tokens."""
        return round(self.kept * tokens)

    def peak_bytes(self, tokens: int, tile_tokens: int) -> int:
        """Returns the most bytes that exist at once in a recompute and the backward after it."""
        outside = self.outside * tokens + self.outside_fixed
        inside = self.inside * tokens + self.of_chunk * min(tokens, tile_tokens)
        return round(max(outside, inside + self.inside_fixed, self.kept * tokens))

    @property
    def numbers(self) -> tuple[float, ...]:
        """All values in order, as rows of JSON have them."""
        return astuple(self)


def tiled_block(numbers: Sequence[float] | None) -> TiledBlock | None:
    """Returns the block with these `numbers`; None where there are none."""
    return TiledBlock(*numbers) if numbers else None


def sequence_chunks_for(row_length: int) -> tuple[int, ...]:
    """Returns the sizes of sequence chunks that rows of `row_length` tokens may run in."""
    return (
        tuple(size for size in SEQUENCE_CHUNKS if size < row_length)
        if row_length > LONG_ROW
        else ()
    )
