"""`ModelShape`: what the planner and the fit report need to know of a model, as plain data, exact to the byte.

No torch at import. `shape_of` summarises a built model; `shape_from_source` takes what is bundled or was built before, or
builds one on the meta device and remembers.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import ModelConfig
from engine.errors import ModelError
from engine.layout import DOCUMENTS, MASK_ELEMENTS, PLANE_ITEM_BYTES, Activations, UnitLayout
from engine.paths import resolve_source

if TYPE_CHECKING:
    from engine.model import StreamedModel

ACTIVATION_FACTOR = 1.3
"""Where a block's activations cannot be counted: bytes that autograd keeps over those of its matrices' inputs and
outputs (within 6 % for Llama, Qwen and Mixtral; up to 35 % too few for blocks with many norms)."""

FAILURE_SECONDS = 20.0
"""A source that failed is not asked for again sooner: a form asks on every keystroke."""


@dataclass(frozen=True)
class UnitShape:
    """One unit. `numel`: elements of each of its planes, alignment included. The rest is 0 outside blocks."""

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
        return {plane: self.plane_numel * item for plane, item in PLANE_ITEM_BYTES[self.dtype].items()}

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
        return replace(self, dtype=dtype, logit_bytes=12 + (self.logit_bytes - 12) // self.item_bytes * item)

    def varlen(self, packed: bool, device: str) -> bool:
        """Whether attention goes document by document in the GPU's variable-length kernel."""
        return packed and self.packs and device == "cuda" and self.attention == DOCUMENTS and self.dtype != "float32"

    def dense_mask(self, packed: bool, row_length: int) -> bool:
        """Whether a tokens x tokens mask is made for each row and held through a step."""
        return self.attention != DOCUMENTS and (packed or self._slides(row_length) or self.attention == "eager")

    def masked_at_once(self, packed: bool, rows: int, row_length: int, device: str) -> bool:
        """Whether a GPU attends to the documents of a micro-batch under one mask (`engine.attention`)."""
        return (device == "cuda" and self.attention == DOCUMENTS and self.dtype == "float32"
                and (packed or self._slides(row_length)) and rows * row_length**2 <= MASK_ELEMENTS)

    def masked_blocks(self, packed: bool, row_length: int, device: str) -> bool:
        """Whether blocks keep a tokens x tokens mask of each row: a held one, or a window's where the GPU's
        variable-length kernel does not run."""
        windows = self.attention == DOCUMENTS and (device == "cpu" or self.dtype == "float32")
        return self.dense_mask(packed, row_length) or (windows and self._slides(row_length))

    def _slides(self, row_length: int) -> bool:
        return self.sliding_window is not None and self.sliding_window < row_length


def shape_of(model: StreamedModel, source: str = "") -> ModelShape:
    """Summary of a built model; `source` is only carried along."""
    from engine.activations import Counted, argument_numel, count_activations

    text = model.config.get_text_config()
    embed, *blocks, head = model.layouts
    attention = getattr(model.skeleton.model.config, "_attn_implementation", None) or "eager"
    heads, width = _attention_heads(text)
    item = PLANE_ITEM_BYTES[model.dtype]["weight_high"]
    experts, chosen = routed_experts(text)
    counted = count_activations(model) or [Counted(*_estimated(layout, experts, chosen, item, attention, heads))
                                           for layout in blocks]

    def outer(layout: UnitLayout) -> UnitShape:
        return UnitShape(layout.unit, layout.numel, layout.parameter_count)

    def block(layout: UnitLayout, counted: Counted) -> UnitShape:
        widest = max((passes * max(shape) for passes, shape in _matrices(layout, experts, chosen)), default=0)
        return UnitShape(layout.unit, layout.numel, layout.parameter_count, widest, counted.plain, counted.masked,
                         counted.compiled)

    positions = getattr(text, "max_position_embeddings", None)
    tables = [spec.shape[0] for spec in embed.parameters if len(spec.shape) == 2]
    kinds = getattr(text, "layer_types", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    return ModelShape(
        model_type=model.config.model_type, source=source, dtype=model.dtype, attention=attention,
        units=(outer(embed), *map(block, blocks, counted), outer(head)), tied=model.tied,
        packs=model.packing.safe, hidden_size=text.hidden_size, vocab_size=text.vocab_size,
        active_parameters=model.active_parameters, max_position_embeddings=positions,
        # OPT's table has two rows more than positions.
        learned_positions=positions is not None and any(positions <= rows <= positions + 2 and rows < text.vocab_size
                                                        for rows in tables),
        sliding_window=getattr(text, "sliding_window", None), mask_kinds=len(set(kinds)) if kinds else 1,
        # The logits, their softmax and its gradient in fp32, and another fp32 gradient on the way; a soft cap keeps one
        # more.
        logit_bytes=12 + item * (2 if softcap else 1), argument_numel=argument_numel(model),
        attention_heads=heads, attention_width=width)


def _attention_heads(text: Any) -> tuple[int, int]:
    """(heads of queries, features of all of them, the mean of a query's and of what is summed for it), of the first layer."""
    if getattr(text, "is_heterogeneous", False):  # which does not say what may differ from layer to layer
        text = text.per_layer_config[0]
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    values = getattr(text, "v_head_dim", None)
    if values:  # of latent attention, where head_dim is but the part that turns with the position
        width = (getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0) + values) // 2
    return heads, heads * width


def shape_from_source(model: ModelConfig) -> ModelShape:
    """The shape of `model.source`, from its configuration alone; remembered until the file changes. A published model is
    answered by the catalog, without torch, unless there is a copy of it here: a folder of that name, or a configuration
    in the Hugging Face cache. Nor does it take torch for the bundled starter, or for what was built on this machine before.

    Raises ModelError in one sentence for a source that cannot be read or a model that cannot be streamed.
    """
    from engine.catalog import catalog_shape

    source = model.source.strip()
    path, file = _configuration(source)
    if file is None and path is None:
        bundled = catalog_shape(source, model.dtype, model.attention)
        if bundled is not None:
            return bundled
    content = _content(file)
    key = (source, path, None if content is None else hashlib.sha256(content).digest(), model.dtype, model.attention)
    known = _known.get(key)
    if known is None:
        ready = _without_torch(content, source, model)
        known = _build_once(key, model) if ready is None else _remember(key, ready)
    return known


_KNOWN_SHAPES = 64
_known: dict[tuple, ModelShape] = {}
_remembering, _building = threading.Lock(), threading.Lock()
_failures: dict[tuple, tuple[float, str]] = {}


def _configuration(source: str) -> tuple[Path | None, Path | None]:
    """(the local path that `source` names, the file that its configuration is read from), None for what is not here."""
    from engine.catalog import cached_config

    path = resolve_source(source)
    if path is None:
        return None, cached_config(source)
    return path, path / "config.json" if path.is_dir() else path if path.suffix == ".json" else None


def _content(file: Path | None) -> bytes | None:
    """None for what cannot be read: whoever loads the configuration says why."""
    try:
        return file.read_bytes() if file is not None and file.is_file() else None
    except OSError:
        return None


def _without_torch(content: bytes | None, source: str, model: ModelConfig) -> ModelShape | None:
    """What is bundled or kept for a configuration of these bytes."""
    from engine.catalog import starter_shape
    from engine.kept_shapes import kept_shape, shape_key

    if content is None:
        return None
    bundled = starter_shape(content, model.dtype, model.attention, source)
    if bundled is not None:
        return bundled
    key = shape_key(content, model.dtype, model.attention)
    return None if key is None else kept_shape(key, model.dtype, source)


def _build_once(key: tuple, model: ModelConfig) -> ModelShape:
    """Built by one thread at a time; `key` is what the answer, or the failure, is remembered by."""
    with _building:
        known = _known.get(key)  # another thread may have built it meanwhile
        if known is not None:
            return known
        failed = _failures.get(key)
        if failed is not None and time.monotonic() - failed[0] < FAILURE_SECONDS:
            raise ModelError(failed[1])
        try:
            return _remember(key, _build(model))
        except ModelError as error:
            _failures.clear()
            _failures[key] = (time.monotonic(), str(error))
            raise


def _remember(key: tuple, shape: ModelShape) -> ModelShape:
    with _remembering:
        while len(_known) >= _KNOWN_SHAPES:
            del _known[next(iter(_known))]
        return _known.setdefault(key, shape)


def _build(model: ModelConfig) -> ModelShape:
    """On the meta device, and kept for later processes if what was read is still what is there."""
    from engine.kept_shapes import keep_shape, shape_key
    from engine.model import build_model, load_config

    source = model.source.strip()
    path, file = _configuration(source)
    content = _content(file)
    # From the Hugging Face cache it is read as the folder that it is in: the hub's own may be another by now.
    config = load_config(source if path is not None or file is None else str(file.parent))
    if path is None and file is None:  # it came from the hub, which leaves it in the cache
        file = _configuration(source)[1]
        content = _content(file)
    shape = shape_of(build_model(config, replace(model, source=source)), source)
    key = None if content is None else shape_key(content, model.dtype, model.attention)
    if key is not None and _content(file) == content:
        keep_shape(key, shape)
    return shape


def routed_experts(text_config: Any) -> tuple[int, int]:
    """(experts of a block, experts that a token is routed to); (0, 0) for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(text_config, name, None)
        if experts:
            chosen = getattr(text_config, "num_experts_per_tok", None) or getattr(text_config, "top_k_experts", None)
            return experts, chosen or experts
    return 0, 0


def _matrices(layout: UnitLayout, experts: int, chosen: int) -> list[tuple[int, tuple[int, ...]]]:
    """(how often a token passes through it, its two widths) of every matrix of a block."""
    found = []
    for spec in layout.parameters:
        if len(spec.shape) == 2:
            found.append((1, spec.shape))
        elif len(spec.shape) == 3 and experts and spec.shape[0] == experts:
            found.append((chosen, spec.shape[1:]))
    return found


def _estimated(layout: UnitLayout, experts: int, chosen: int, item: int, attention: str,
               heads: int) -> tuple[Activations, Activations, Activations]:
    features = sum(passes * sum(shape) for passes, shape in _matrices(layout, experts, chosen))
    per_token = item * ACTIVATION_FACTOR * features
    if attention == "eager":
        weights = Activations(per_token, heads * (4 + 2 * item))
        return weights, weights, weights
    return Activations(per_token), Activations(per_token, item), Activations(per_token)
