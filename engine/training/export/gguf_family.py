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
from engine.training.export.gguf_known import FAMILIES

_PAIRED = ("q_proj", "k_proj")
_FREQUENCIES = "rope_freqs.weight"


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

    def name_of(self, full_name: str) -> str:
        """Returns the name of a weight in the file. Raises RunError if it has none there."""
        found = self.names.get_name(full_name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RunError(
                f"llama.cpp has no name for the weight {full_name} of this model; export a folder "
                "instead."
            )
        return str(found)

    def laid_out(self, full_name: str, values: Tensor) -> Tensor:
        """Returns the values of a weight, in its shape, in the order of the file: llama.cpp rotates
        pairs of neighbors in the heads of a llama, where transformers rotates halves.
        """
        owner = full_name.rsplit(".", 2)[-2]
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
        writer.add_context_length(config.max_position_embeddings)
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

    def more(self) -> dict[str, Tensor]:
        """Returns tensors that the file has beside the weights, in fp32."""
        rope = _rope(self.config)
        if rope["rope_type"] != "llama3":
            return {}
        return {_FREQUENCIES: _llama3_factors(rope, self.head_dim)}


def family_of(config: Any) -> Family:
    """Returns the family of a model. Raises RunError for one that is not written as a GGUF file.
    config: of transformers.
    """
    import gguf

    kind = config.model_type
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise _unknown(f"of the family {kind}, and those that are known are {known}")
    if getattr(config, "use_sliding_window", False):
        raise _unknown("with a sliding window")
    if config.hidden_act != "silu":
        raise _unknown(f"with the activation {config.hidden_act}")
    if getattr(config, "mlp_bias", False):
        raise _unknown("with biases in its MLP")
    if _rope(config)["rope_type"] not in ("default", "linear", "llama3"):
        raise _unknown(f"with positions of the kind {_rope(config)['rope_type']}")
    kinds = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[FAMILIES[kind]], config.num_hidden_layers)
    return Family(config, names)


def _unknown(what: str) -> RunError:
    return RunError(
        f"A model {what} is not written as a GGUF file here; export a folder, and convert it by "
        "convert_hf_to_gguf.py of llama.cpp."
    )


def _rope(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0} | (config.rope_parameters or {})


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
