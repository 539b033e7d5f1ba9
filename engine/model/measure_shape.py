"""`shape_of` measures a built model and returns its shape for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.adapters.factors import adapted_stacks
from engine.model.activation_sizes import Activations
from engine.model.activations import Counted, argument_numel, count_activations
from engine.model.shape import FP32_LOGIT_BYTES, ModelShape, UnitShape
from engine.model.units import StreamedModel
from engine.planes.active_parameters import routed_experts
from engine.planes.layout import PLANE_ITEM_BYTES, UnitLayout

ACTIVATION_FACTOR = 1.3
"""Autograd is assumed to keep this many times the bytes of the inputs and outputs of a block's
matrices if the block's activations cannot be counted. The estimate is within 6 % for Llama, Qwen
and Mixtral, and up to 35 % too low for blocks with many norms.
"""


@dataclass(frozen=True)
class _Attention:
    """The attention of a model has this implementation and these sizes."""

    implementation: str
    heads: int
    """Queries have this many heads."""
    width: int
    """This is the number of features in all heads together: the mean of the query's width and of
    the value's width.
    """


def shape_of(model: StreamedModel, source: str = "") -> ModelShape:
    """Returns the shape of a built model; `source` is only copied into it."""
    text = model.config.get_text_config()
    embed, *blocks, head = model.layouts
    attention = _attention_of(model, text)
    item = PLANE_ITEM_BYTES[model.dtype]["weight_high"]
    experts = routed_experts(text)
    counts = count_activations(model)
    if counts is None:
        counts = [_estimated(layout, experts, item, attention) for layout in blocks]
    block_shapes = [_block(layout, experts, counted) for layout, counted in zip(blocks, counts)]
    positions = getattr(text, "max_position_embeddings", None)
    kinds = getattr(text, "layer_types", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    return ModelShape(
        model_type=model.config.model_type,
        source=source,
        dtype=model.dtype,
        attention=attention.implementation,
        units=(_outer(embed), *block_shapes, _outer(head)),
        tied=model.tied,
        packs=model.packing.safe,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        active_parameters=model.active_parameters,
        work_parameters=model.work_parameters,
        residual_streams=model.residual_streams,
        max_position_embeddings=positions,
        learned_positions=_has_position_table(embed, positions, text.vocab_size),
        sliding_window=getattr(text, "sliding_window", None),
        mask_kinds=len(set(kinds)) if kinds else 1,
        # The peak holds the logits, their softmax and its gradient in fp32, and another fp32
        # gradient on the way. A soft cap keeps one more copy of the logits.
        logit_bytes=FP32_LOGIT_BYTES + item * (2 if softcap else 1),
        argument_numel=argument_numel(model),
        attention_heads=attention.heads,
        attention_width=attention.width,
        untouched_numel=sum(model.untouched.values()),
        stored_as=None if model.quantised is None else model.quantised.method,
    )


def _outer(layout: UnitLayout) -> UnitShape:
    """Returns the shape of the embed unit or of the head unit."""
    counts = layout.moment_counts
    return UnitShape(
        layout.unit,
        layout.numel,
        layout.parameter_count,
        exact_numel=layout.exact_numel,
        small_numel=counts.small,
        block_count=counts.blocks,
        frozen_numel=layout.high_numel - layout.numel,
        frozen_count=layout.parameter_count - layout.trained_count,
    )


def _block(layout: UnitLayout, experts: tuple[int, int], counted: Counted) -> UnitShape:
    counts = layout.moment_counts
    widths = [passes * max(shape) for passes, shape in _matrices(layout, experts)]
    return UnitShape(
        layout.unit,
        layout.numel,
        layout.parameter_count,
        widest=max(widths, default=0),
        activations=counted.plain,
        masked_activations=counted.masked,
        compiled_activations=counted.compiled,
        exact_numel=layout.exact_numel,
        small_numel=counts.small,
        block_count=counts.blocks,
        frozen_numel=layout.high_numel - layout.numel,
        frozen_count=layout.parameter_count - layout.trained_count,
        # The rank is the other size of a factor, and smaller but for models of tests.
        adapter_features=sum(
            max(s.shape) for s in layout.parameters if s.adapter and not s.experts
        ),
        adapted_numel=adapted_stacks(layout),
    )


def _has_position_table(embed: UnitLayout, positions: int | None, vocabulary: int) -> bool:
    """Returns whether a table in the embed unit holds positions, with one row for each position."""
    if positions is None:
        return False
    tables = [spec.shape[0] for spec in embed.parameters if len(spec.shape) == 2]
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


def _matrices(layout: UnitLayout, experts: tuple[int, int]) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (number of times that a token passes through it, its two widths) for every matrix in
    a block.

    `experts` is the result of `routed_experts`.
    """
    stacked, chosen = experts
    found: list[tuple[int, tuple[int, ...]]] = []
    for spec in layout.parameters:
        if len(spec.shape) == 2 and not spec.experts:  # no token passes through these factors
            found.append((1, spec.shape))
        elif len(spec.shape) == 3 and stacked and spec.shape[0] == stacked:
            found.append((chosen, spec.shape[1:]))
    return found


def _estimated(
    layout: UnitLayout, experts: tuple[int, int], item: int, attention: _Attention
) -> Counted:
    """Estimates what autograd keeps for a block; `item` is the size of an element in bytes."""
    features = sum(passes * sum(shape) for passes, shape in _matrices(layout, experts))
    per_token = item * ACTIVATION_FACTOR * features
    if attention.implementation == "eager":
        # Autograd keeps attention weights for each pair of tokens: once in fp32, and twice in the
        # model's dtype.
        kept = Activations(per_token, attention.heads * (4 + 2 * item))
        return Counted(plain=kept, masked=kept, compiled=kept)
    plain = Activations(per_token)
    return Counted(plain=plain, masked=Activations(per_token, item), compiled=plain)
