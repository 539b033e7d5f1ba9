"""Experts that are stacked in one weight have no adapters, and are refused by name."""

from __future__ import annotations

import pytest

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.errors import ConfigError
from engine.model.build import build_model
from tests.support.families import tiny_family_config

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


def built(family: str, *targets: str):
    model = ModelConfig(source=family, dtype="float32")
    return build_model(tiny_family_config(family), model, Adapters(targets=targets))


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_experts_are_refused_with_the_name_of_their_weight(family):
    with pytest.raises(ConfigError) as caught:
        built(family, "q_proj" if family != "deepseek_v3" else "o_proj", "gate_up_proj")
    said = str(caught.value)
    assert caught.value.field == "train.lora_targets" and "gate_up_proj fits model.layers." in said
    assert "stacked experts can have no adapters" in said and "train.method to parts" in said
    with pytest.raises(ConfigError, match=r"\*\.experts\.\* fits model\.layers\."):
        built(family, "*.experts.*")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_leaves_stacked_experts_as_they_are(family):
    specs = [spec for layout in built(family, "all-linear").layouts for spec in layout.parameters]
    experts = [spec for spec in specs if ".experts." in spec.full_name]
    assert experts and all(spec.frozen and not spec.adapter for spec in experts)
