"""Where parameters are in a plane, and which of them decay."""

from __future__ import annotations

import pytest
from transformers import Trainer

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.planning.layout.alignment import ALIGN_ELEMENTS
from engine.planning.layout.layout import ParameterSpec, lay_out
from tests.support.tiny import plain_model, tiny_config


def test_parameters_are_aligned_in_order_and_the_decayed_ones_come_first():
    shapes = {"norm": (7,), "up": (5, 13), "bias": (1,), "down": (8, 8), "gate": (3, 43)}
    specs = [
        ParameterSpec(name, f"model.{name}", shape, decay=len(shape) > 1)
        for name, shape in shapes.items()
    ]
    layout = lay_out("block 0", specs)
    assert [spec.name for spec in layout.parameters] == ["up", "down", "gate", "norm", "bias"]
    assert layout.offsets == (0, 128, 192, 384, 448)
    assert all(offset % ALIGN_ELEMENTS == 0 for offset in layout.offsets)
    assert (layout.decay_numel, layout.numel) == (384, 512)
    assert layout.parameter_count == 65 + 64 + 129 + 7 + 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi3", "gemma3_text", "mixtral"])
def test_weight_decay_is_where_transformers_trainer_has_it(family):
    config = tiny_config(family)
    model = build_model(config, ModelConfig(source="tiny", dtype="float32"))
    ours = {s.full_name for layout in model.layouts for s in layout.parameters if s.decay}
    theirs = Trainer.get_decay_parameter_names(None, plain_model(config))
    named = {s.full_name for layout in model.layouts for s in layout.parameters}
    assert ours == set(theirs) & named and ours != named
