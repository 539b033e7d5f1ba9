"""The gradient of a large embedding table can be accumulated for some rows at a time. The chunks
are fixed by the model and not by the plan, because its norm is the norm of their norms: chunks of
another size would round it differently. No torch.
"""

from __future__ import annotations

from engine.planning.layout.layout import UnitLayout


def embed_chunk(embed: UnitLayout, largest_block: int, tied: bool) -> int:
    """Returns the number of elements of such a chunk: whole rows, no more elements than the largest
    block has. Returns 0 where the accumulator is always made as a whole: in a tied model, to whose
    accumulator the head adds all rows, and in a unit that is more than one table.
    """
    if tied or len(embed.parameters) != 1:
        return 0
    (table,) = embed.parameters
    if len(table.shape) != 2 or table.keep_in_fp32:
        return 0
    return chunk_of_table(*table.shape, largest_block)


def chunk_of_table(rows: int, width: int, largest_block: int) -> int:
    """Returns the number of elements of a chunk of a table [rows, width]."""
    return min(rows, max(1, largest_block // width)) * width
