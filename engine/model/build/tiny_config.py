"""`shrunk` makes a tiny configuration of the same family, for a quick trial.

The kinds of layers and the head sizes are kept, since they decide what the model computes. Widths,
windows and the numbers of heads, layers, experts and tokens are made small. They are recognized by
the names that families use for them.
"""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 61
_LAYERS = 4
_HEADS = 4
_LOCAL = 5
"""Number of tokens of a window or a chunk of attention, fewer than most documents in a trial."""
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", VOCABULARY),
    (
        r"(.*_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(.*_)?ffn_dim|n_inner|d_inner|"
        r"dff|dim_ff|d_ff",
        48,
    ),
    (r"(num_(local_|routed_)?|n_routed_|moe_num_)experts|zero_expert_num", 8),
    (r"(q|kv|o)_lora_rank", 32),
    (r"(mamba_|ssm_)?chunk_size", 16),
    (r"(n|num_expert)_groups?", 2),
    (r"topk_group", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_selected_experts", 2),
    (r"(.*_)?n(um)?_shared_experts", 1),
    (
        r"sliding_window(_size)?|window_size|attention_(chunk|window)_size|local_attention|"
        r"attention_window|index_topk|"
        r"keep_window_size",
        _LOCAL,
    ),
)
"""Size to which a whole number is reduced whose name matches the pattern; it is never made larger.
"""
_DEPTHS = r"num_hidden_layers|n_layers?|num_layers"
_WIDTHS = r"hidden_size|d_model|n_embd|word_embed_proj_dim|embedding_size"
_QUERY_HEADS = r"(.*_)?num_attention_heads|n_heads?|num_heads|index_n_heads|linear_num_value_heads"
_KEY_HEADS = r"(.*_)?num_(key_value|kv)_heads|multi_query_group_num|linear_num_key_heads"
_SHARED = "num_kv_shared_layers"
"""Number of layers, the last ones, that take keys and values of earlier layers."""
_OWN = "per_layer_config"
"""Values of single layers that differ from the model's, given by the layer's position."""
_RANDOM = r".*(dropout|pdrop|layerdrop|jitter|drop_rate).*"
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MADE_ANEW = (
    "transformers_version",
    "model_type",
    "dtype",
    "torch_dtype",
    "_name_or_path",
)
"""Values that a configuration class sets itself."""


def shrunk(config: Any) -> Any:
    """Returns a configuration of the same family, with the same kinds of layers and head sizes but
    few heads, layers, experts and tokens.

    Head sizes are kept, because rotary settings depend on them.
    """
    values = config.to_dict()
    for name in _MADE_ANEW:
        values.pop(name, None)
    if values.get(_OWN):
        values[_OWN] = {int(position): own for position, own in values[_OWN].items()}
    for name in config.sub_configs:
        if isinstance(values.get(name), dict) and hasattr(getattr(config, name), "to_dict"):
            values[name] = shrunk(getattr(config, name)).to_dict()
    if getattr(config, "num_hidden_layers", None):
        _fewer_layers(values, config.num_hidden_layers)
        _narrower(values, config)
    for part in _parts(values):
        _smaller(part)
    values["use_cache"] = False
    if "tie_word_embeddings" in values:
        # Tied weights make no difference to the separation of documents.
        values["tie_word_embeddings"] = False
    return type(config)(**values)


def _parts(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the values of the model, and those of each layer that has its own."""
    return [values, *(values.get(_OWN) or {}).values()]


def _smaller(values: dict[str, Any]) -> None:
    """Reduces sizes that the number of layers and the width of the model do not depend on."""
    for name, value in list(values.items()):
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)) and re.fullmatch(_RANDOM, name):
            values[name] = type(value)(0)
        elif isinstance(value, int):
            values[name] = min(value, _size(name, value))
        if name.endswith("token_id"):
            values[name] = _TOKENS.get(name, 0)


def _size(name: str, value: int) -> int:
    """Returns the size for the first pattern that `name` matches, or `value` if it matches none."""
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return size
    return value


def _fewer_layers(values: dict[str, Any], depth: int) -> None:
    """Keeps one layer of each kind, and fills up with the first layers.

    Lists with an entry for every layer show the kind of each layer, and so do its own values and
    whether it takes the keys and values of an earlier one.
    """
    own, first_shared = values.get(_OWN) or {}, depth - (values.get(_SHARED) or 0)
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == depth
    }
    kinds: dict[tuple, int] = {}
    for position in range(depth):
        listed = [value[position] for value in lists.values()]
        kind = (repr(listed), repr(own.get(position)), position >= first_shared)
        kinds.setdefault(kind, position)
    chosen = set(list(kinds.values())[: 2 * _LAYERS])
    for position in range(depth):
        if len(chosen) < min(_LAYERS, depth):
            chosen.add(position)
    for name, value in lists.items():
        values[name] = [value[position] for position in sorted(chosen)]
    for name, value in values.items():
        if isinstance(value, int) and re.fullmatch(_DEPTHS, name):
            values[name] = max(1, value * len(chosen) // depth)
    if values.get(_SHARED):
        values[_SHARED] = sum(position >= first_shared for position in chosen)
    if own:
        places = enumerate(sorted(chosen))
        values[_OWN] = {place: own[position] for place, position in places if position in own}


def _narrower(values: dict[str, Any], config: Any) -> None:
    """Reduces the number of heads, and the hidden size to match."""
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= _HEADS:
        return
    for part in _parts(values):
        _with_fewer_heads(part, heads, hidden)


def _with_fewer_heads(values: dict[str, Any], heads: int, hidden: int) -> None:
    """Reduces these numbers of heads and widths. The model has `heads` heads of queries and the
    width `hidden`.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if value == hidden and re.fullmatch(_WIDTHS, name):
            values[name] = _HEADS * max(1, hidden // heads)
        elif re.fullmatch(_QUERY_HEADS, name):
            values[name] = min(value, _HEADS)
        elif re.fullmatch(_KEY_HEADS, name):
            # Shared keys stay shared, each by two queries.
            values[name] = _HEADS if value >= heads else min(value, _HEADS // 2)
