"""`ModelShape`: what the planner and the fit report need to know of a model, as plain data, exact
to the byte. No torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from engine.model.layout import DOCUMENTS, MASK_ELEMENTS, PLANE_ITEM_BYTES, Activations


@dataclass(frozen=True)
class UnitShape:
    """One unit. `numel`: elements of each of its planes, alignment included. The rest is 0 outside
    blocks.
    """

    name: str
    numel: int
    parameter_count: int
    widest: int = 0
    """The most features that one matrix takes in or gives out for a token."""
    activations: Activations = Activations()
    """Without an attention mask."""
    masked_activations: Activations = Activations()
    """With a dense attention mask for every row."""
    compiled_activations: Activations = Activations()
    """Of a compiled block, without a mask: the cheap parts are recomputed."""


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it. Sizes are elements unless they are called bytes."""

    model_type: str
    source: str
    dtype: str
    attention: str
    """Attention implementation that the model was built with."""
    units: tuple[UnitShape, ...]
    """In forward order: embed, blocks, head."""
    tied: bool
    packs: bool
    """Several documents may share a row."""
    hidden_size: int
    vocab_size: int
    active_parameters: int
    """Parameters that one token passes through."""
    max_position_embeddings: int | None = None
    learned_positions: bool = False
    """Positions come from a table, so rows cannot be longer than it."""
    sliding_window: int | None = None
    mask_kinds: int = 1
    """Different attention masks among the blocks, such as sliding and full."""
    logit_bytes: int = 16
    """Device bytes that the loss takes for each logit at its peak."""
    argument_numel: int = 0
    """Elements per token that all blocks are given beside their hidden state: rotary embeddings."""
    attention_heads: int = 1
    attention_width: int = 1
    """Features of all heads of a query and of what is summed for it, in the mean."""

    @property
    def compiled_logit_bytes(self) -> int:
        """The same where the loss is compiled: the logits and their gradient in their own dtype."""
        return self.logit_bytes - 12 + self.item_bytes

    @property
    def embed(self) -> UnitShape:
        return self.units[0]

    @property
    def head(self) -> UnitShape:
        return self.units[-1]

    @property
    def blocks(self) -> tuple[UnitShape, ...]:
        return self.units[1:-1]

    @property
    def item_bytes(self) -> int:
        """Bytes of an element on the device."""
        return PLANE_ITEM_BYTES[self.dtype]["weight_high"]

    @functools.cached_property
    def parameter_count(self) -> int:
        return sum(unit.parameter_count for unit in self.units)

    @functools.cached_property
    def plane_numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane over all units: what HostStore allocates."""
        return {
            plane: self.plane_numel * item for plane, item in PLANE_ITEM_BYTES[self.dtype].items()
        }

    @property
    def host_bytes(self) -> int:
        return sum(self.plane_bytes().values())

    @property
    def checkpoint_bytes(self) -> int:
        """Planes of one checkpoint: all but the gradients."""
        return sum(size for plane, size in self.plane_bytes().items() if plane != "grad")

    @property
    def export_bytes(self) -> int:
        """Weights of an exported folder, in the model's dtype."""
        return self.parameter_count * self.item_bytes

    def in_dtype(self, dtype: str) -> ModelShape:
        """The same model in another dtype: planes exact, activations as large as they are here."""
        item = PLANE_ITEM_BYTES[dtype]["weight_high"]
        return replace(
            self, dtype=dtype, logit_bytes=12 + (self.logit_bytes - 12) // self.item_bytes * item
        )

    def varlen(self, packed: bool, device: str) -> bool:
        """Whether attention goes document by document in the GPU's variable-length kernel."""
        return (
            packed
            and self.packs
            and device == "cuda"
            and self.attention == DOCUMENTS
            and self.dtype != "float32"
        )

    def dense_mask(self, packed: bool, row_length: int) -> bool:
        """Whether a tokens x tokens mask is made for each row and held through a step."""
        return self.attention != DOCUMENTS and (
            packed or self._slides(row_length) or self.attention == "eager"
        )

    def masked_at_once(self, packed: bool, rows: int, row_length: int, device: str) -> bool:
        """Whether a GPU attends to the documents of a micro-batch under one mask
        (`engine.model.attention`).
        """
        return (
            device == "cuda"
            and self.attention == DOCUMENTS
            and self.dtype == "float32"
            and (packed or self._slides(row_length))
            and rows * row_length**2 <= MASK_ELEMENTS
        )

    def masked_blocks(self, packed: bool, row_length: int, device: str) -> bool:
        """Whether blocks keep a tokens x tokens mask of each row: a held one, or a window's where
        the GPU's variable-length kernel does not run.
        """
        windows = self.attention == DOCUMENTS and (device == "cpu" or self.dtype == "float32")
        return self.dense_mask(packed, row_length) or (windows and self._slides(row_length))

    def _slides(self, row_length: int) -> bool:
        return self.sliding_window is not None and self.sliding_window < row_length
