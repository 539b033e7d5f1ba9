"""The families whose models are written as a GGUF file: their metadata and the names, layouts and
types of their weights, as llama.cpp reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import RunError
from engine.training.export.gguf_known import FAMILIES, NoGguf

_PAIRED = ("q_proj", "k_proj")
_STACKED = ".mlp.experts.gate_up_proj"
_ROUTER = ".ffn_gate_inp."
_FREQUENCIES = "rope_freqs.weight"
# What llama.cpp takes for granted of Gemma 3 (gemma3.cpp): each sixth layer sees all of a text, and
# in the others positions turn with this base.
_LOCAL_LAYERS, _LOCAL_BASE = 6, 10000.0
_LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Family:
    """One model's family, by its configuration of transformers."""

    config: Any
    names: Any
    """Names of the file by those of transformers (gguf.TensorNameMap)."""

    @property
    def name(self) -> str:
        return FAMILIES[self.config.model_type]

    @property
    def head_dim(self) -> int:
        config = self.config
        own = getattr(config, "head_dim", None)
        return int(own or config.hidden_size // config.num_attention_heads)

    def tensors(self, full_name: str, values: Tensor) -> list[tuple[str, Tensor]]:
        """Returns what the file has of a weight: its name there, and its values in their shape.
        Raises RunError if llama.cpp has no name for it.
        """
        if full_name.endswith(_STACKED):
            gate, up = values.chunk(2, dim=1)
            before = full_name.removesuffix("gate_up_proj")
            return [
                (self._name_of(f"{before}gate_proj"), gate),
                (self._name_of(f"{before}up_proj"), up),
            ]
        return [(self._name_of(full_name), self._laid_out(full_name, values))]

    def _name_of(self, full_name: str) -> str:
        found = self.names.get_name(full_name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RunError(
                f"llama.cpp has no name for the weight {full_name} of this model; export a folder "
                "instead."
            )
        # Stacked experts are parameters without a module of their own.
        return found if found.endswith((".weight", ".bias")) else f"{found}.weight"

    def _laid_out(self, full_name: str, values: Tensor) -> Tensor:
        """Returns the values of a weight in the order of the file: llama.cpp rotates pairs of
        neighbors in the heads of a llama, where transformers rotates halves. Norms of Gemma
        multiply by one more than their weight, and in llama.cpp by the weight.
        """
        owner = full_name.rsplit(".", 2)[-2]
        if self.name == "gemma3" and owner.endswith("norm"):
            return values.to(torch.float32) + 1
        if self.name != "llama" or owner not in _PAIRED:
            return values
        config = self.config
        is_query = owner == "q_proj"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    def write(self, writer: Any, name: str) -> None:
        """Adds the metadata of the model, which is called `name`. writer: gguf.GGUFWriter."""
        config, rope = self.config, _rope(self.config)
        writer.add_name(name)
        writer.add_context_length(self._context_length())
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(_linear())
            writer.add_rope_scaling_factor(rope["factor"])
        if self.name == "gemma3":
            writer.add_sliding_window(config.sliding_window)
        experts = _experts(config)
        if experts:
            writer.add_expert_count(experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        if self.name == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)

    def _context_length(self) -> int:
        """Returns the tokens of a text at most. Of the families here, llama.cpp slides the window
        of Gemma alone; within a window, there is no difference.
        """
        most, window = self.config.max_position_embeddings, _window(self.config)
        return int(min(most, window) if window and self.name != "gemma3" else most)

    def more(self) -> dict[str, Tensor]:
        """Returns tensors that the file has beside the weights, in fp32."""
        rope = _rope(self.config)
        if rope["rope_type"] != "llama3":
            return {}
        return {_FREQUENCIES: _llama3_factors(rope, self.head_dim)}


def is_router(name: str) -> bool:
    """Returns whether a tensor of a file chooses experts. Rounded, it would choose others."""
    return _ROUTER in name


def family_of(config: Any) -> Family:
    """Returns the family of a model. Raises RunError for one that is not written as a GGUF file.
    config: of transformers.
    """
    import gguf

    kind = config.model_type
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise _unknown(f"of the family {kind}, and those that are known are {known}")
    for what in (_other_layers(config), *_of_own_family(config)):
        if what:
            raise _unknown(what)
    kinds = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[FAMILIES[kind]], config.num_hidden_layers)
    return Family(config, names)


def _other_layers(config: Any) -> str:
    """Returns what of a model's layers llama.cpp does not compute, or an empty text."""
    is_gemma = config.model_type == "gemma3_text"
    activation = config.hidden_activation if is_gemma else config.hidden_act
    if activation != ("gelu_pytorch_tanh" if is_gemma else "silu"):
        return f"with the activation {activation}"
    if getattr(config, "use_sliding_window", False):
        return "with a sliding window"
    if getattr(config, "mlp_bias", False):
        return "with biases in its MLP"
    if _rope(config)["rope_type"] not in ("default", "linear", "llama3"):
        return f"with positions of the kind {_rope(config)['rope_type']}"
    return ""


def _of_own_family(config: Any) -> list[str]:
    """Returns what llama.cpp takes for granted of a family and a model has otherwise."""
    if config.model_type == "qwen3_moe":
        return [
            "" if config.norm_topk_prob else "whose experts' weights do not add up to one",
            "with layers that have no experts"
            if config.mlp_only_layers or config.decoder_sparse_step != 1
            else "",
        ]
    return _of_gemma(config) if config.model_type == "gemma3_text" else []


def _of_gemma(config: Any) -> list[str]:
    local = (config.rope_parameters or {}).get("sliding_attention", {})
    kinds = ["sliding_attention"] * (_LOCAL_LAYERS - 1) + ["full_attention"]
    pattern = [kinds[k % _LOCAL_LAYERS] for k in range(config.num_hidden_layers)]
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B
    scaled_by = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    softened = config.attn_logit_softcapping or config.final_logit_softcapping
    return [
        "with a cap on its logits" if softened else "",
        "that attends to later tokens" if config.use_bidirectional_attention else "",
        "with other local layers than those of Gemma 3"
        if config.layer_types != pattern or local.get("rope_theta", _LOCAL_BASE) != _LOCAL_BASE
        else "",
        f"whose attention is scaled by {config.query_pre_attn_scalar}"
        if config.query_pre_attn_scalar != scaled_by
        else "",
    ]


def _unknown(what: str) -> NoGguf:
    return NoGguf(f"A model {what} is not written as a GGUF file here.")


def _experts(config: Any) -> int:
    return int(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0) or 0)


def _window(config: Any) -> int:
    return int(getattr(config, "sliding_window", 0) or 0)


def _rope(config: Any) -> dict[str, Any]:
    """Returns how positions turn, in Gemma those of the layers that see all of a text."""
    own = config.rope_parameters or {}
    return {"rope_type": "default", "rope_theta": 10000.0} | own.get("full_attention", own)


def _linear() -> Any:
    import gguf

    return gguf.RopeScalingType.LINEAR


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Returns by what each frequency of Llama 3.1 and later is divided (modeling_rope_utils of
    transformers), which is 1 for high ones, and `factor` for low ones.
    """
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - share) / rope["factor"] + share)
