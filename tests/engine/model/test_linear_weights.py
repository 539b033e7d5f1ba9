"""Muon is refused for models in whose blocks a trained parameter of two dimensions is something
other than the weight of one linear layer.
"""

from __future__ import annotations

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.errors import ConfigError
from engine.model.build.build import build_model
from engine.model.build.linear_weights import refuse_other_matrices
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
def test_other_matrices_are_refused_by_name(family):
    name, changes = REFUSED[family]
    model = built(family, **changes)
    with pytest.raises(ConfigError) as caught:
        refuse_other_matrices(model, "muon")
    text = str(caught.value)
    assert text.startswith("train.optimizer: muon would orthogonalize updates of ")
    assert f"{name} of {family}, which" in text
    assert text.endswith("set train.optimizer to adamw.")
    refuse_other_matrices(model, "adamw_8bit")


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "qwen2_moe", "qwen3"])
def test_linear_layers_and_routers_are_trained(family):
    refuse_other_matrices(built(family), "muon")


def test_factors_of_linear_layers_are_trained_and_those_of_stacked_experts_refused():
    refuse_other_matrices(built("gpt_oss", Adapters(targets=("q_proj",))), "muon")
    refuse_other_matrices(built("gpt2", Adapters(targets=("c_attn",))), "muon")
    stacked = Adapters(targets=("q_proj",), target_parameters=("experts.down_proj",))
    with pytest.raises(ConfigError, match=r"experts\.lora_A\.weight of mixtral, which"):
        refuse_other_matrices(built("mixtral", stacked), "muon")


@pytest.mark.parametrize("family", slow_but(SUPPORTED, MOST_USED, FAMILY_SWEEP))
def test_every_family_has_linear_weights_alone_or_is_refused(family):
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
    if not others:
        refuse_other_matrices(model, "muon")
        return
    with pytest.raises(ConfigError, match=f"updates of {others[0]} of {family}"):
        refuse_other_matrices(model, "muon")
