"""A `ModelShape` tells the planner and the fit report what they need to know of a model.

It is plain data, exact to the byte, and needs no torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from engine.model.layout import DOCUMENTS, MASK_ELEMENTS, PLANE_ITEM_BYTES, Activations

FP32_LOGIT_BYTES = 12
"""At its peak the loss holds three fp32 numbers for each logit, whatever the model's dtype."""
_NONE = Activations()


@dataclass(frozen=True)
class UnitShape:
    """A unit's shape says how large it is. What follows `parameter_count` is 0 outside blocks."""

    name: str
    numel: int
    """Each plane has this many elements, alignment included."""
    parameter_count: int
    widest: int = 0
    """One matrix takes in or gives out at most this many features for a token."""
    activations: Activations = _NONE
    """A block keeps these without an attention mask."""
    masked_activations: Activations = _NONE
    """A block keeps these with a dense attention mask for every row."""
    compiled_activations: Activations = _NONE
    """A compiled block keeps these without a mask: the cheap parts are recomputed."""


@dataclass(frozen=True)
class ModelShape:
    """An instance is a model as the planner sees it. Sizes are elements unless called bytes."""

    model_type: str
    source: str
    dtype: str
    attention: str
    """The model was built with this implementation of attention."""
    units: tuple[UnitShape, ...]
    """They come in forward order: embed, blocks, head."""
    tied: bool
    packs: bool
    """Several documents may share a row."""
    hidden_size: int
    vocab_size: int
    active_parameters: int
    """A token goes through this many parameters."""
    max_position_embeddings: int | None = None
    learned_positions: bool = False
    """Positions come from a table, so rows cannot be longer than it."""
    sliding_window: int | None = None
    mask_kinds: int = 1
    """The blocks have this many different attention masks, such as sliding and full."""
    logit_bytes: int = 16
    """The loss takes this many device bytes for each logit at its peak."""
    argument_numel: int = 0
    """Blocks are given this many elements per token beside their hidden state: rotary embeddings.
    """
    attention_heads: int = 1
    attention_width: int = 1
    """All heads together have this many features, in the mean of queries and of what is summed
    for them.
    """

    @property
    def compiled_logit_bytes(self) -> int:
        """A compiled loss takes this many bytes for each logit: for the logit and its gradient,
        both in their own dtype.
        """
        return self.logit_bytes - FP32_LOGIT_BYTES + self.item_bytes

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
        """An element takes this many bytes on the device."""
        return PLANE_ITEM_BYTES[self.dtype]["weight_high"]

    @functools.cached_property
    def parameter_count(self) -> int:
        return sum(unit.parameter_count for unit in self.units)

    @functools.cached_property
    def plane_numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def plane_bytes(self) -> dict[str, int]:
        """Returns the bytes of each plane over all units: what HostStore allocates."""
        return {
            plane: self.plane_numel * item for plane, item in PLANE_ITEM_BYTES[self.dtype].items()
        }

    @property
    def host_bytes(self) -> int:
        return sum(self.plane_bytes().values())

    @property
    def checkpoint_bytes(self) -> int:
        """The planes of one checkpoint, which are all but the gradients, take this many bytes."""
        return sum(size for plane, size in self.plane_bytes().items() if plane != "grad")

    @property
    def export_bytes(self) -> int:
        """An exported folder has this many bytes of weights, in the model's dtype."""
        return self.parameter_count * self.item_bytes

    def in_dtype(self, dtype: str) -> ModelShape:
        """Returns the same model in another dtype: with exact planes, and with activations as large
        as they are here.
        """
        item = PLANE_ITEM_BYTES[dtype]["weight_high"]
        logits = (self.logit_bytes - FP32_LOGIT_BYTES) // self.item_bytes
        return replace(self, dtype=dtype, logit_bytes=FP32_LOGIT_BYTES + logits * item)

    def varlen(self, packed: bool, device: str) -> bool:
        """Tells whether attention uses the GPU's variable-length kernel, document by document."""
        return (
            packed
            and self.packs
            and device == "cuda"
            and self.attention == DOCUMENTS
            and self.dtype != "float32"
        )

    def dense_mask(self, packed: bool, row_length: int) -> bool:
        """Tells whether a tokens x tokens mask is made for each row and held through a step."""
        return self.attention != DOCUMENTS and (
            packed or self._slides(row_length) or self.attention == "eager"
        )

    def masked_at_once(self, packed: bool, rows: int, row_length: int, device: str) -> bool:
        """Tells whether a GPU attends to the documents of a micro-batch under one mask
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
        """Tells whether blocks keep a tokens x tokens mask of each row: the one that is held, or a
        window's where the GPU's variable-length kernel does not run.
        """
        windows = self.attention == DOCUMENTS and (device == "cpu" or self.dtype == "float32")
        return self.dense_mask(packed, row_length) or (windows and self._slides(row_length))

    def _slides(self, row_length: int) -> bool:
        return self.sliding_window is not None and self.sliding_window < row_length
