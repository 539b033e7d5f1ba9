"""Trained parameters of two dimensions in blocks that are something other than the weight of one
linear layer are found. Muon is refused for their models.
"""

from __future__ import annotations

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.linear_weights import non_linear_matrix
from tests.support.families import tiny_family_config
from tests.support.family_parity import SUPPORTED
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED

pytestmark = pytest.mark.computing

REFUSED = {
    "cohere": ("q_norm.weight", {"use_qk_norm": True}),
    "dbrx": ("experts.mlp.w1", {}),
    "deepseek_v4": ("attn_hc.fn", {}),
    "falcon_mamba": ("A_log", {}),
    "gpt_oss": ("experts.gate_up_proj_bias", {}),
    "jamba": ("A_log", {}),
    "mamba": ("A_log", {}),
}


def built(family: str, parts: Adapters | None = None, **changes):
    model = ModelConfig(source=family, dtype="float32")
    return build_model(tiny_family_config(family, **changes), model, parts)


@pytest.mark.parametrize("family", REFUSED)
def test_other_matrices_are_found_by_name(family):
    name, changes = REFUSED[family]
    assert non_linear_matrix(built(family, **changes)).endswith(f".{name}")


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "qwen2_moe", "qwen3"])
def test_linear_layers_and_routers_are_trained(family):
    assert non_linear_matrix(built(family)) == ""


def test_factors_of_linear_layers_are_trained_and_those_of_stacked_experts_are_found():
    assert non_linear_matrix(built("gpt_oss", Adapters(targets=("q_proj",)))) == ""
    assert non_linear_matrix(built("gpt2", Adapters(targets=("c_attn",)))) == ""
    stacked = Adapters(targets=("q_proj",), target_parameters=("experts.down_proj",))
    assert non_linear_matrix(built("mixtral", stacked)).endswith("experts.lora_A.weight")


@pytest.mark.parametrize("family", slow_but(SUPPORTED, MOST_USED, FAMILY_SWEEP))
def test_every_family_has_linear_weights_alone_or_tells_another(family):
    model = built(family)
    others = []
    for unit in model.blocks:
        of_linear = {
            f"{name}.weight"
            for name, module in unit.block.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) or "router" in type(module).__name__.lower()
        }
        others += [
            spec.full_name
            for spec, _ in unit.layout.trained
            if len(spec.shape) == 2 and spec.name not in of_linear
        ]
    assert non_linear_matrix(model) == (others[0] if others else "")
