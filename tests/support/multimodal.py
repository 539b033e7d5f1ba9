"""Tiny random models that read images, with the names, layouts and code of those that people
download.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.library import no_progress_bars
from tests.support.families import verdict
from tests.support.folders import make_tokenizer

VOCAB = 97
IMAGE = 90
"""This token stands where an image does."""
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28
)
"""A vision tower that sees 28 x 28 pixels."""
PATCHES = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=14, out_hidden_size=32
)
"""A vision tower that sees patches of 14 x 14 pixels, two after another and two below."""


def _rope(**more: Any) -> dict[str, Any]:
    return {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more},
    }


def _part(kind: str, *values: dict[str, Any], **more: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"model_type": kind, **more}
    for each in values:
        part = part | each
    return part


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _part("gemma3_text", TEXT, head_dim=8, sliding_window=8),
        "vision_config": _part("siglip_vision_model", TOWER, patch_size=14),
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _part(
            "gemma4_text",
            TEXT | {"num_hidden_layers": 4},
            layer_types=["sliding_attention", "full_attention"] * 2,
            head_dim=8,
            global_head_dim=16,
            sliding_window=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=2,
        ),
        "vision_config": _part(
            "gemma4_vision",
            {name: size for name, size in TOWER.items() if name != "image_size"},
            num_key_value_heads=4,
            head_dim=8,
            patch_size=14,
            pooling_kernel_size=2,
        ),
        "audio_config": None,
    },
    "llava": {
        "text_config": _part("llama", TEXT),
        "vision_config": _part("clip_vision_model", TOWER, patch_size=14),
        "vision_feature_layer": -1,
    },
    "mistral3": {
        "text_config": _part("mistral", TEXT, head_dim=8),
        "vision_config": _part("pixtral", TOWER, patch_size=14, head_dim=8),
        "vision_feature_layer": -1,
        "spatial_merge_size": 1,
    },
    "internvl": {
        "text_config": _part("qwen2", TEXT),
        "vision_config": _part("internvl_vision", TOWER, patch_size=[7, 7], image_size=[28, 28]),
        "downsample_ratio": 0.5,
    },
    "qwen2_5_vl": {
        "text_config": _part("qwen2_5_vl_text", TEXT, _rope(mrope_section=[2, 1, 1])),
        "vision_config": _part("qwen2_5_vl", PATCHES, window_size=28, fullatt_block_indexes=[1]),
    },
    "qwen3_vl": {
        "text_config": _part("qwen3_vl_text", TEXT, _rope(mrope_section=[2, 1, 1])),
        "vision_config": _part(
            "qwen3_vl", PATCHES, deepstack_visual_indexes=[0], num_position_embeddings=16
        ),
    },
    "qwen3_vl_moe": {
        "text_config": _part(
            "qwen3_vl_moe_text",
            TEXT,
            _rope(mrope_section=[2, 1, 1]),
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "vision_config": _part(
            "qwen3_vl_moe", PATCHES, deepstack_visual_indexes=[0], num_position_embeddings=16
        ),
    },
    "llama4": {
        "text_config": _part(
            "llama4_text",
            TEXT | {"num_hidden_layers": 4},
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=8,
        ),
        "vision_config": _part(
            "llama4_vision_model",
            TOWER | {"intermediate_size": 4 * 32},
            patch_size=14,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
        ),
    },
    "glm4v": {
        "text_config": _part("glm4v_text", TEXT, _rope(mrope_section=[2, 1, 1])),
        "vision_config": _part("glm4v", PATCHES, image_size=28),
    },
    "idefics3": {
        "text_config": _part("llama", TEXT),
        "vision_config": _part("idefics3_vision", TOWER, patch_size=14),
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": _part("llama", TEXT),
        "vision_config": _part("smolvlm_vision", TOWER, patch_size=14),
        "scale_factor": 2,
    },
    "qwen3_5": {
        "text_config": _part(
            "qwen3_5_text",
            TEXT,
            _rope(mrope_section=[2, 1, 1], partial_rotary_factor=1.0, mrope_interleaved=True),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "vision_config": _part("qwen3_5", PATCHES, num_position_embeddings=16),
    },
    "aya_vision": {
        "text_config": _part("cohere2", TEXT, head_dim=8, sliding_window=8),
        "vision_config": _part("siglip_vision_model", TOWER, patch_size=14),
        "vision_feature_layer": -1,
        "downsample_factor": 2,
    },
}
"""By family: a configuration of a model that trains its language model."""

IN_A_GRID = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
"""Their images are patches in a row, with the sizes of a grid."""
FOUR_TOKENS = ("gemma3", "gemma4", "llava", "mistral3", "internvl")
"""Their image of 28 x 28 pixels becomes four tokens, those of the others one."""


def multimodal_config(family: str, tied: bool = False) -> Any:
    """A configuration with three or four blocks of width 32 and a tower of two."""
    config = CONFIG_MAPPING[family](**CONFIGS[family])
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, IMAGE)
    for name, number in (("video_token_id", 91), ("vision_start_token_id", 92)):
        if hasattr(config, name):
            setattr(config, name, number)
    config.architectures = [MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[family]]
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    return config


def multimodal_model(config: Any, seed: int = 0) -> Any:
    """The whole model with random weights in float32."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms at exactly one and biases at exactly zero would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def image_prompt(family: str) -> dict[str, torch.Tensor]:
    """What the whole model of `family` is given for a text with an image in it: token ids
    [1, tokens], pixels, and what the family wants beside.
    """
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(5))
    count = 4 if family in FOUR_TOKENS else 1
    ids = torch.tensor([[1, 5, 92, *[IMAGE] * count, 6, 7, 8]])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    if family in IN_A_GRID:
        given["pixel_values"] = torch.randn(
            4, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(5)
        )
        given["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    if family == "gemma4":  # its patches have places in an image of 4 x 4, and 2 x 2 become a token
        patches = torch.rand(1, 16, 3 * 14 * 14, generator=torch.Generator().manual_seed(5))
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        given["pixel_values"], given["image_position_ids"] = patches, places[None]
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    if family == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    if family == "mistral3":
        given["image_sizes"] = torch.tensor([[28, 28]])
    if family in ("idefics3", "smolvlm"):
        given["pixel_values"] = pixels[None]
    return given


def make_multimodal(folder: Path, family: str, tied: bool = False, dtype=torch.float32) -> Path:
    """A saved whole model with its tokenizer and files of a processor, in several weight files."""
    whole = multimodal_model(multimodal_config(family, tied)).to(dtype)
    with no_progress_bars():
        whole.save_pretrained(folder, max_shard_size="150KB")
    # transformers reads every tokenizer of Qwen 3.5 as byte-level BPE.
    make_tokenizer(of_letters=family == "qwen3_5").save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}\n')
    (folder / "chat_template.json").write_text('{"chat_template": "for images"}\n')
    return folder


ALSO_REFUSED = ("git", "phi4_multimodal")
"""Families of `families.tiny_family_config` that are refused."""


def multimodal_table() -> str:
    """The second part of docs/families.md, in Markdown: which classes train their language model on
    text.
    """
    lines = ["| class | family | several documents in a row |", "|---|---|---|"]
    for family in CONFIGS:
        config = multimodal_config(family)
        model = build_model(config, ModelConfig(source=family, dtype="float32"))
        packs = model.packing.problem or "yes"
        lines.append(f"| {model.whole_class} | {family} | {packs} |")
    lines += ["", "These are refused by name:", "", "| family | why: it |", "|---|---|"]
    for family in ALSO_REFUSED:
        lines.append(f"| {family} | {verdict(family).refused.partition(' ')[2]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(multimodal_table())
