"""`shape_of` measures a built model and returns its shape for the planner."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.blocks.live_bytes import LiveBytes
from engine.model.blocks.pytree_paths import mapped
from engine.model.blocks.tiled_module import tile_sequence
from engine.model.build.activations import (
    BlockShapes,
    Counted,
    FusedAttention,
    argument_numel,
    block_shapes,
    count_activations,
    first_of,
    handed_numel,
)
from engine.model.build.cache_size import cache_numel
from engine.model.build.linear_weights import non_linear_matrix
from engine.model.build.specimens import Specimens, arguments_on_meta, on_meta
from engine.model.build.units import TORCH_DTYPES, StreamedModel
from engine.planning.layout.adapter_layout import adapted_stacks
from engine.planning.layout.layout import PLANE_ITEM_BYTES, ParameterSpec, UnitLayout
from engine.planning.schedule.buffers import EMBED
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.active_parameters import routed_experts
from engine.planning.shape.attention_shape import AttentionShape
from engine.planning.shape.model_shape import FP32_LOGIT_BYTES, ModelShape
from engine.planning.shape.sequence_tiling import TiledBlock
from engine.planning.shape.unit_shape import UnitShape

ACTIVATION_FACTOR = 1.3
"""Autograd is assumed to keep this many times the bytes of the inputs and outputs of a block's
matrices if the block's activations cannot be counted. The estimate is within 6 % for Llama, Qwen
and Mixtral, and up to 35 % too low for blocks with many norms.
"""

_CAPTURED = 61
"""Number of tokens for which arguments of blocks are captured; no other dimension has this size."""
_ROWS_AND_CHUNKS = ((1 << 17, 1 << 16), (1 << 18, 1 << 16), (1 << 18, 1 << 17))
"""A block in sequence chunks runs with rows and sequence chunks of so many tokens. They are so long
that what does not grow with them, such as gradients of parameters, hardly matters for where the
peak is.
"""


@dataclass(frozen=True)
class _Attention:
    """The attention of a model has this implementation and these sizes."""

    implementation: str
    heads: int
    """Number of heads of the queries."""
    width: int
    """The number of features in all heads together: the mean of the query's width and of the
    value's width.
    """


def shape_of(model: StreamedModel, source: str = "") -> ModelShape:
    """Returns the shape of a built model; `source` is only copied into it."""
    text = model.config.get_text_config()
    embed, *blocks, head = model.layouts
    shared = [model.shared_by(unit) for unit in model.blocks]
    attention = _attention_of(model, text)
    item = PLANE_ITEM_BYTES[model.dtype]["weight_high"]
    experts = routed_experts(text)
    counts = count_activations(model)
    if counts is None:
        called = [[*block.parameters, *more] for block, more in zip(blocks, shared)]
        counts = [_estimated(specs, experts, item, attention) for specs in called]
    tiled = tiled_blocks(model)
    found = [_block(*each, experts) for each in zip(blocks, counts, tiled, strict=True)]
    block_shapes = [_sharing(*each, experts) for each in zip(found, shared, strict=True)]
    of_embed = {spec.name: spec for specs in shared for spec in specs}
    positions = getattr(text, "max_position_embeddings", None)
    kinds = getattr(text, "layer_types", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    return ModelShape(
        model_type=model.config.model_type,
        source=source,
        dtype=model.dtype,
        attention=AttentionShape(
            implementation=attention.implementation,
            sliding_window=getattr(text, "sliding_window", None),
            mask_kinds=len(set(kinds)) if kinds else 1,
            heads=attention.heads,
            width=attention.width,
        ),
        units=(
            _sharing(_embed_and_head(embed), of_embed.values(), (0, 0)),
            *block_shapes,
            _embed_and_head(head),
        ),
        tied=model.tied,
        packs=model.packing.safe,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        active_parameters=model.active_parameters,
        work_parameters=model.work_parameters,
        residual_streams=model.residual_streams,
        max_position_embeddings=positions,
        learned_positions=_has_position_table(
            [spec for spec in embed.parameters if spec.name not in of_embed],
            positions,
            text.vocab_size,
        ),
        # The peak holds the logits, their softmax and its gradient in fp32, and another fp32
        # gradient on the way. A soft cap keeps one more copy of the logits.
        logit_bytes=FP32_LOGIT_BYTES + item * (2 if softcap else 1),
        argument_numel=argument_numel(model),
        handed_numel=handed_numel(model),
        cache_numel=cache_numel(model),
        untouched_numel=sum(model.non_text.values()),
        non_linear_matrix=non_linear_matrix(model),
        stored_as=None if model.quantized is None else model.quantized.method,
    )


def _embed_and_head(layout: UnitLayout) -> UnitShape:
    """Returns the shape of the embed unit or of the head unit."""
    return UnitShape(
        layout.unit,
        layout.numel,
        layout.parameter_count,
        fp32_numel=layout.fp32_numel,
        runs=layout.runs,
        frozen_numel=layout.high_numel - layout.numel,
        frozen_count=layout.parameter_count - layout.trained_count,
    )


def _block(
    layout: UnitLayout, counted: Counted, tiled: TiledBlock | None, experts: tuple[int, int]
) -> UnitShape:
    widths = [passes * max(shape) for passes, shape in _matrices(layout.parameters, experts)]
    return UnitShape(
        layout.unit,
        layout.numel,
        layout.parameter_count,
        widest=max(widths, default=0),
        activations=counted.plain,
        masked_activations=counted.masked,
        compiled_activations=counted.compiled,
        tiled=tiled,
        fp32_numel=layout.fp32_numel,
        runs=layout.runs,
        frozen_numel=layout.high_numel - layout.numel,
        frozen_count=layout.parameter_count - layout.trained_count,
        # The rank is the other size of a factor, and smaller but for models of tests.
        adapter_features=sum(
            max(s.shape) for s in layout.parameters if s.adapter and not s.experts
        ),
        adapted_numel=adapted_stacks(layout),
    )


def _sharing(
    unit: UnitShape, specs: Collection[ParameterSpec], experts: tuple[int, int]
) -> UnitShape:
    """Returns a unit with what blocks share: a block computes with it, embed has it."""
    if not specs:
        return unit
    widths = [passes * max(shape) for passes, shape in _matrices(specs, experts)]
    widest = max(unit.widest, *widths, 0) if unit.name != EMBED else unit.widest
    return replace(unit, widest=widest, shared_count=sum(spec.numel for spec in specs))


def _has_position_table(
    specs: Sequence[ParameterSpec], positions: int | None, vocabulary: int
) -> bool:
    """Returns whether a table in the embed unit holds positions, with one row for each position."""
    if positions is None:
        return False
    tables = [spec.shape[0] for spec in specs if len(spec.shape) == 2]
    # OPT's table has two more rows than positions.
    return any(positions <= rows <= positions + 2 and rows < vocabulary for rows in tables)


def _attention_of(model: StreamedModel, text: Any) -> _Attention:
    """Returns the attention of the first layer according to the configuration."""
    chosen = getattr(model.skeleton.model.config, "_attn_implementation", None)
    # A heterogeneous configuration lacks the values that may differ from layer to layer.
    if getattr(text, "is_heterogeneous", False):
        text = text.per_layer_config[0]
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    values = getattr(text, "v_head_dim", None)
    if values:
        # In latent attention `head_dim` is only the rotary part.
        fixed = getattr(text, "qk_nope_head_dim", 0)
        turned = getattr(text, "qk_rope_head_dim", 0)
        width = (fixed + turned + values) // 2
    return _Attention(chosen or "eager", heads, heads * width)


def _matrices(
    specs: Iterable[ParameterSpec], experts: tuple[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (number of times that a token passes through it, its two widths) for every matrix in
    a block.

    `experts` is the result of `routed_experts`.
    """
    stacked, chosen = experts
    found: list[tuple[int, tuple[int, ...]]] = []
    for spec in specs:
        if len(spec.shape) == 2 and not spec.experts:  # no token passes through these factors
            found.append((1, spec.shape))
        elif len(spec.shape) == 3 and stacked and spec.shape[0] == stacked:
            found.append((chosen, spec.shape[1:]))
    return found


def _estimated(
    specs: Iterable[ParameterSpec], experts: tuple[int, int], item: int, attention: _Attention
) -> Counted:
    """Estimates what autograd keeps for a block; `item` is the size of an element in bytes."""
    features = sum(passes * sum(shape) for passes, shape in _matrices(specs, experts))
    per_token = item * ACTIVATION_FACTOR * features
    if attention.implementation == "eager":
        # Autograd keeps attention weights for each pair of tokens: once in fp32, and twice in the
        # model's dtype.
        kept = Activations(per_token, attention.heads * (4 + 2 * item))
        return Counted(plain=kept, masked=kept, compiled=kept)
    plain = Activations(per_token)
    return Counted(plain=plain, masked=Activations(per_token, item), compiled=plain)


# ---------------------------------------------------------------------- blocks in sequence chunks


@dataclass(frozen=True)
class _TiledBytes:
    """A block ran in sequence chunks: these are the bytes that existed at once, and those that were
    kept.
    """

    outside: int
    inside: int
    kept: int


def tiled_blocks(model: StreamedModel) -> list[TiledBlock | None]:
    """Returns what each block takes where parts of it run in sequence chunks; None where no part
    can, where the block's code reads values, which the meta device lacks, or where its attention
    keeps something for each pair of tokens.
    """
    kinds = [block_shapes(model, unit) for unit in model.blocks]
    found: dict[BlockShapes, TiledBlock | None] = {}
    try:
        with torch.no_grad():
            captured = model.skeleton.capture(torch.zeros(1, _CAPTURED, dtype=torch.long), None)
        runs = [_TiledRun(model, kinds, captured.arguments, *each) for each in _ROWS_AND_CHUNKS]
        for kind, position in first_of(kinds).items():
            found[kind] = _tiled(model, position, [run.of(position) for run in runs])
    except Exception:  # noqa: BLE001  without values, a family's code may raise anything
        return [None] * len(kinds)
    return [found[kind] for kind in kinds]


def _tiled(
    model: StreamedModel, position: int, measured: Sequence[_TiledBytes | None]
) -> TiledBlock | None:
    """Returns the numbers of the block at `position`, from its runs with `_ROWS_AND_CHUNKS`."""
    unit = model.blocks[position]
    assert unit.block is not None  # every block has a module
    short, long, wide = measured
    if short is None or long is None or wide is None:
        return None
    ((tokens, chunk), (more_tokens, _), (_, wider)) = _ROWS_AND_CHUNKS
    steps = more_tokens - tokens
    kept = (long.kept - short.kept) / steps
    if abs(short.kept - kept * tokens) > 0.01 * short.kept:
        return None
    outside, inside = (long.outside - short.outside) / steps, (long.inside - short.inside) / steps
    of_chunk = (wide.inside - long.inside) / (wider - chunk)
    parts = [unit.block.get_submodule(name) for name in model.tiled_parts(unit)]
    return TiledBlock(
        kept=kept,
        outside=outside,
        outside_fixed=short.outside - outside * tokens,
        inside=inside,
        of_chunk=of_chunk,
        inside_fixed=short.inside - inside * tokens - of_chunk * chunk,
        parameter_count=sum(each.numel() for part in parts for each in part.parameters()),
    )


class _TiledRun:
    """Runs blocks in sequence chunks on the meta device, earlier ones first. `arguments` are those
    of all blocks, for a row of `_CAPTURED` tokens.
    """

    def __init__(
        self,
        model: StreamedModel,
        kinds: list[BlockShapes],
        arguments: Sequence[BlockArguments],
        tokens: int,
        tile_tokens: int,
    ):
        self._model, self._kinds, self._arguments = model, kinds, arguments
        self._tokens, self._tile_tokens = tokens, tile_tokens
        self._specimens = Specimens(model, kinds)

    def of(self, position: int) -> _TiledBytes | None:
        """Returns the bytes of the block at `position`; None where no part of it runs in sequence
        chunks, or it has no backward.
        """
        model, unit = self._model, self._model.blocks[position]
        has_input_gradient, own_shapes, _ = self._kinds[position]
        block = on_meta(model, unit)
        parameters = dict(block.named_parameters())
        for name, _, is_frozen in own_shapes:
            parameters[name].requires_grad_(not is_frozen)
        names = model.tiled_parts(unit)
        tile_sequence(block, names, self._tile_tokens)
        nested = mapped(arguments_on_meta(self._arguments[position]).nested, self._longer)
        given = self._arguments[position].with_nested(nested)
        width = (1, self._tokens, model.hidden_width // model.state_items)
        state = torch.float32 if model.state_items > 1 else TORCH_DTYPES[model.dtype]
        hidden = torch.empty(width, dtype=state, device="meta").requires_grad_(has_input_gradient)
        above, live = torch.empty_like(hidden), LiveBytes()
        with torch.enable_grad(), FusedAttention() as attention, live:
            out = self._specimens.run(position, given, block, hidden)
            kept = live.now - out.untyped_storage().nbytes()
            if not names or not attention.has_run or not out.requires_grad:
                return None
            inputs = [each for each in (hidden, *parameters.values()) if each.requires_grad]
            # The gradients are held until the end, as a step holds them.
            _gradients = torch.autograd.grad(out, inputs, above, allow_unused=True)
        return _TiledBytes(live.outside, live.inside, kept)

    def _longer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an argument of a block, of any shape, as it is for rows of `tokens` tokens."""
        sizes = {_CAPTURED: self._tokens}
        return tensor.new_empty([sizes.get(size, size) for size in tensor.shape])
