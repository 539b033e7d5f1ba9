"""`shape_of`: the shape of a built model."""

from __future__ import annotations

from typing import Any

from engine.model.activations import Counted, argument_numel, count_activations
from engine.model.layout import PLANE_ITEM_BYTES, Activations, UnitLayout
from engine.model.shape import ModelShape, UnitShape
from engine.model.units import StreamedModel

ACTIVATION_FACTOR = 1.3
"""Where a block's activations cannot be counted: bytes that autograd keeps over those of its
matrices' inputs and outputs (within 6 % for Llama, Qwen and Mixtral; up to 35 % too few for blocks
with many norms).
"""


def shape_of(model: StreamedModel, source: str = "") -> ModelShape:
    """Summary of a built model; `source` is only carried along."""
    text = model.config.get_text_config()
    embed, *blocks, head = model.layouts
    attention = getattr(model.skeleton.model.config, "_attn_implementation", None) or "eager"
    heads, width = _attention_heads(text)
    item = PLANE_ITEM_BYTES[model.dtype]["weight_high"]
    experts, chosen = routed_experts(text)
    counted = count_activations(model) or [
        Counted(*_estimated(layout, experts, chosen, item, attention, heads)) for layout in blocks
    ]

    def outer(layout: UnitLayout) -> UnitShape:
        return UnitShape(layout.unit, layout.numel, layout.parameter_count)

    def block(layout: UnitLayout, counted: Counted) -> UnitShape:
        widest = max(
            (passes * max(shape) for passes, shape in _matrices(layout, experts, chosen)), default=0
        )
        return UnitShape(
            layout.unit,
            layout.numel,
            layout.parameter_count,
            widest,
            counted.plain,
            counted.masked,
            counted.compiled,
        )

    positions = getattr(text, "max_position_embeddings", None)
    tables = [spec.shape[0] for spec in embed.parameters if len(spec.shape) == 2]
    kinds = getattr(text, "layer_types", None)
    softcap = getattr(text, "final_logit_softcapping", None)
    return ModelShape(
        model_type=model.config.model_type,
        source=source,
        dtype=model.dtype,
        attention=attention,
        units=(outer(embed), *map(block, blocks, counted), outer(head)),
        tied=model.tied,
        packs=model.packing.safe,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        active_parameters=model.active_parameters,
        max_position_embeddings=positions,
        # OPT's table has two rows more than positions.
        learned_positions=positions is not None
        and any(positions <= rows <= positions + 2 and rows < text.vocab_size for rows in tables),
        sliding_window=getattr(text, "sliding_window", None),
        mask_kinds=len(set(kinds)) if kinds else 1,
        # The logits, their softmax and its gradient in fp32, and another fp32 gradient on the way;
        # a soft cap keeps one more.
        logit_bytes=12 + item * (2 if softcap else 1),
        argument_numel=argument_numel(model),
        attention_heads=heads,
        attention_width=width,
    )


def _attention_heads(text: Any) -> tuple[int, int]:
    """(heads of queries, features of all of them, the mean of a query's and of what is summed for
    it), of the first layer.
    """
    if getattr(
        text, "is_heterogeneous", False
    ):  # which does not say what may differ from layer to layer
        text = text.per_layer_config[0]
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    values = getattr(text, "v_head_dim", None)
    if values:  # of latent attention, where head_dim is but the part that turns with the position
        width = (
            getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0) + values
        ) // 2
    return heads, heads * width


def routed_experts(text_config: Any) -> tuple[int, int]:
    """(experts of a block, experts that a token is routed to); (0, 0) for a dense model."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(text_config, name, None)
        if experts:
            chosen = getattr(text_config, "num_experts_per_tok", None) or getattr(
                text_config, "top_k_experts", None
            )
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


def _estimated(
    layout: UnitLayout, experts: int, chosen: int, item: int, attention: str, heads: int
) -> tuple[Activations, Activations, Activations]:
    features = sum(passes * sum(shape) for passes, shape in _matrices(layout, experts, chosen))
    per_token = item * ACTIVATION_FACTOR * features
    if attention == "eager":
        weights = Activations(per_token, heads * (4 + 2 * item))
        return weights, weights, weights
    return Activations(per_token), Activations(per_token, item), Activations(per_token)
