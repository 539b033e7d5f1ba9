"""A tiny random configuration of every family that transformers has a causal language model for."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.build import build_model

TEXT_FAMILIES = tuple(
    family
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(family) != name
)
"""These have a class for text alone. tests/support/multimodal.py has the others."""
VOCAB = 97
LAYERS = 4
PAGE_WIDTH = 124

DEPTH = (
    r"num_hidden_layers|n_layers?|num_layers|num_blocks|(en|de)coder_layers|num_(en|de)coder_layers"
)
SIZES = (
    (
        r"((un)?padded_)?vocab_size|decoder_vocab_size|.*_vocab_size|type_vocab_size|"
        r"vocab_size_per_layer_input",
        VOCAB,
    ),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id|sep_token_id", 2),
    (r".*_token_(id|index)|unk_index|mask_index|lang_id", 3),
    (
        r"max_(source_|target_)?position(s|_embeddings)|n_positions|n_ctx|max_seq_len|"
        r"model_max_length|context_length|"
        r"original_max_position_embeddings",
        64,
    ),
    (DEPTH, LAYERS),
    (
        r"hidden_size|d_model|n_embd|embedding_(size|dim)|emb_dim|dim|word_embed_proj_dim|"
        r"lru_width|attention_hidden_size|"
        r"(input|output)_embedding_size|backbone_hidden_size|dim_model_base|hidden_dim",
        32,
    ),
    (
        r"(.*_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(.*_)?ffn_dim|n_inner|d_inner|"
        r"dff|dim_ff|d_ff|"
        r"(.*_)?expert_intermediate_size",
        48,
    ),
    (r"n_heads?|num_heads|(.*_)?attention_heads|index_n_heads|num_query_groups", 4),
    (r"(.*_)?num_(key_value|kv)_heads", 2),
    (
        r"(?!qk_rope)(.*_)?head_dim|attention_head_(dim|size)|dim_head|d_head|kv_channels|"
        r"query_pre_attn_scalar",
        8,
    ),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (
        r"sliding_window(_size)?|window_size|attention_(chunk_size|window_size)|local_attention|"
        r"keep_window_size|"
        r"index_topk|rel_extent",
        8,
    ),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*lora_rank|.*_rank|time_step_rank|.*_lowrank", 8),
    (r"(.*_)?d_state|(ssm_)?state_size", 8),
    (r"(.*_)?chunk_size|hidden_size_per_layer_input", 8),
)
"""(pattern of an integer's name, its size here), the first that matches; a size is never made
larger.
"""

DROPOUT = re.compile(
    r".*(dropout|pdrop|drop_rate|layerdrop|dropout_rate|dropout_prob|_drop)|.*jitter.*"
)

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [2]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
        ]
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "fuyu": {
        "text_config": {
            "model_type": "persimmon",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 2},
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "moshi": {"audio_vocab_size": VOCAB},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
}
"""What the sizes above leave inconsistent, and what a default configuration leaves out."""

COMPLETED: dict[str, dict[str, Any]] = {
    family: {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
            "num_hidden_layers": 4,
        }
    }
    for family in ("gemma4_assistant", "gemma4_unified_assistant")
}
"""What a default configuration cannot even be made without."""


def tiny_family_config(
    family: str, tied: bool | None = None, dropout: float = 0.0, **changes: Any
) -> Any:
    """A configuration of `family` with a few narrow blocks, each kind that its default has among
    them.

    `tied`: whether the head uses the embedding's weights (None: as the family does). `dropout`: of
    every kind it knows.
    """
    kind = CONFIG_MAPPING[family]
    config = kind(**(shrunk(kind, dropout) | OVERRIDES.get(family, {}) | changes))
    if tied is not None:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    return config


def shrunk(kind: type, dropout: float = 0.0) -> dict[str, Any]:
    """What differs from the default configuration of the class `kind`."""
    completed = COMPLETED.get(kind.model_type, {})
    default = vars(kind(**completed))
    depths = {value for name, value in default.items() if re.fullmatch(DEPTH, name)}
    values: dict[str, Any] = dict(completed)
    for name, value in default.items():
        if isinstance(value, bool) or name.startswith("_"):
            continue
        if isinstance(value, (int, float)) and DROPOUT.fullmatch(name):
            values[name] = 0.0 if name == "layerdrop" else dropout
        elif isinstance(value, int):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
            if size < value:
                values[name] = size
        elif isinstance(value, (list, tuple)) and len(value) in depths and len(value) > LAYERS:
            kinds = list(dict.fromkeys(map(repr, value)))
            chosen = [next(v for v in value if repr(v) == kind) for kind in kinds][:LAYERS]
            values[name] = type(value)([*value[: LAYERS - len(chosen)], *chosen])
    if (
        "num_attention_heads" in values
        and default.get("num_key_value_heads") == default["num_attention_heads"]
    ):
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "qk_rope_head_dim" in default:  # these follow from the others
        values.pop("head_dim", None)
        values.pop("qk_head_dim", None)
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if getattr(part, "model_type", None):
            values[name] = (
                shrunk(part, dropout) | OVERRIDES.get(part.model_type, {}) | completed.get(name, {})
            )
    return values


@dataclass(frozen=True)
class Verdict:
    """What Ramstream says of a family: why it is refused (empty when it trains), and why its rows
    are not packed.
    """

    refused: str = ""
    unpacked: str = ""


def verdict(family: str) -> Verdict:
    """From a tiny model of the family, as `check` and the start of a run find it out."""
    try:
        model = build_model(tiny_family_config(family), ModelConfig(source=family, dtype="float32"))
    except ModelError as error:
        return Verdict(refused=str(error))
    return Verdict(unpacked=model.packing.problem)


def table(found: dict[str, Verdict]) -> str:
    """The tables of docs/families.md, in Markdown, of the verdict on each family."""
    training = {
        family: reported for family, reported in sorted(found.items()) if not reported.refused
    }
    packing = [family for family, reported in training.items() if not reported.unpacked]
    alone = _reasons(
        {family: reported.unpacked for family, reported in training.items() if reported.unpacked}
    )
    refused = _reasons(
        {
            family: reported.refused.split(" ", 1)[1]
            for family, reported in sorted(found.items())
            if reported.refused
        }
    )
    trained = (
        f"**{len(training)} families train.** {len(packing)} of them with several documents in a "
        f"row, none of which sees another: {', '.join(packing)}."
    )
    return "\n".join(
        [
            textwrap.fill(trained, PAGE_WIDTH, break_on_hyphens=False),
            "",
            f"The other {len(training) - len(packing)} train one document a row:",
            "",
            "| family | why |",
            "|---|---|",
            *alone,
            "",
            f"**{len(found) - len(training)} are refused by name:**",
            "",
            "| family | why: it |",
            "|---|---|",
            *refused,
        ]
    )


def _reasons(found: dict[str, str]) -> list[str]:
    """Lines of a table, a reason each."""
    families: dict[str, list[str]] = {}
    for family, why in found.items():
        families.setdefault(why, []).append(family)
    return [
        f"| {', '.join(same)} | {why} |"
        for why, same in sorted(families.items(), key=lambda r: r[1])
    ]


if __name__ == "__main__":
    from tests.support.answer_ways import way_of_family, ways_text

    verdicts = {family: verdict(family) for family in TEXT_FAMILIES}
    print(table(verdicts))
    trained = [family for family, reported in verdicts.items() if not reported.refused]
    print("", ways_text({family: way_of_family(family) for family in trained}), sep="\n")
