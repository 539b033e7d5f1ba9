"""`AttentionShape` has what the attention of a model's blocks costs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.shape.activation_sizes import DOCUMENTS, MASK_ELEMENTS


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention of a model's blocks."""

    implementation: str
    """Implementation of attention with which the model was built."""
    sliding_window: int | None = None
    mask_kinds: int = 1
    """Number of different attention masks of the blocks, such as sliding and full."""
    heads: int = 1
    width: int = 1
    """Number of features of all heads together: the mean of those of queries and of values."""

    def flops(self, rows: int, row_length: int) -> float:
        """Returns the FLOPs of the attention of one block in a forward pass: two matrix products,
        halved because attention is causal.
        """
        seen = min(row_length, self.sliding_window or row_length)
        return 2.0 * rows * row_length * seen * self.width

    def has_varlen_kernel(self, dtype: str, device: str) -> bool:
        """Returns whether the GPU's variable-length kernel computes attention in this dtype."""
        return device == "cuda" and self.implementation == DOCUMENTS and dtype != "float32"

    def dense_mask(self, packed: bool, row_length: int) -> bool:
        """Returns whether a tokens x tokens mask is made for each row and kept through a step."""
        return self.implementation != DOCUMENTS and (
            packed or self._slides(row_length) or self.implementation == "eager"
        )

    def masked_at_once(
        self, packed: bool, rows: int, row_length: int, dtype: str, device: str
    ) -> bool:
        """Returns whether a GPU attends to the documents of a micro-batch under one mask
        (`engine.model.build.attention`).
        """
        return (
            device == "cuda"
            and self.implementation == DOCUMENTS
            and dtype == "float32"
            and (packed or self._slides(row_length))
            and rows * row_length**2 <= MASK_ELEMENTS
        )

    def masked_blocks(self, packed: bool, row_length: int, dtype: str, device: str) -> bool:
        """Returns whether autograd keeps a tokens x tokens mask of each row in blocks: the mask
        kept through a step, or the mask of a window if the GPU's variable-length kernel does not
        run.
        """
        windows = self.implementation == DOCUMENTS and (device == "cpu" or dtype == "float32")
        return self.dense_mask(packed, row_length) or (windows and self._slides(row_length))

    def _slides(self, row_length: int) -> bool:
        return self.sliding_window is not None and self.sliding_window < row_length
