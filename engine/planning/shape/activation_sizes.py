"""An `Activations` gives the bytes that autograd keeps for a block, from the number of rows and
their length. The file is pure arithmetic, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

DOCUMENTS = "documents"
"""The name of the attention that makes no masks (engine.model.build.attention). Its activations are
counted separately.
"""

MASK_ELEMENTS = 2**20
"""Most pairs of tokens in a micro-batch for which attention in float32 on a GPU does use one mask,
because a call for each document takes longer (measured for the starter, docs/performance.md).
"""


@dataclass(frozen=True)
class Activations:
    """Autograd keeps ``per_token * T + per_pair * T**2`` bytes for one block and a row of T tokens.

    Tensors that blocks share, such as masks and rotary tables, are not included.
    """

    per_token: float = 0.0
    per_pair: float = 0.0

    def of(self, rows: int, length: int) -> int:
        """Returns the bytes kept for `rows` rows of `length` tokens."""
        return round(rows * (self.per_token * length + self.per_pair * length * length))
