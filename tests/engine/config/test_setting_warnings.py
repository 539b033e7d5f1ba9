"""Settings that are valid and hardly meant are doubted; those of the presets are not."""

from __future__ import annotations

import pytest

from engine.config.setting_warnings import setting_warnings
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT

LORA = {"train__method": "lora", "train__learning_rate": 2e-5}
PRESETS = sorted((PROGRAM_ROOT / "presets").glob("*.yaml"))


def of(**values):
    plain = {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"steps": 450}}
    config = TrainConfig.from_dict(plain)
    return setting_warnings(
        config.with_values({n.replace("__", "."): v for n, v in values.items()})
    )


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_no_preset_is_doubted(path):
    assert setting_warnings(TrainConfig.load(path)) == ()


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"train__learning_rate": 1000.0}, "train.learning_rate", "rate of 1000 is far too high"),
        ({"train__learning_rate": 1e-9}, "train.learning_rate", "rate of 1e-09 is far too low"),
        ({"train__method": "lora"}, "train.learning_rate", "rate of 1e-05 is low for adapters"),
        ({"train__warmup_steps": 9999}, "train.warmup_steps", "(9,999 steps) is as long as"),
        ({"output__eval_every": 500}, "output.eval_every", "is evaluated only at the end"),
        ({"train__lora_rank": 64}, "train.lora_rank", "for the method lora, and train.method is f"),
        ({"train__lora_alpha": 8.0}, "train.lora_alpha", "lora_alpha changes nothing"),
        ({"train__lora_dropout": 0.1}, "train.lora_dropout", "changes nothing"),
        ({"train__lora_rslora": True}, "train.lora_rslora", "changes nothing"),
        ({"train__lora_targets": ["q_proj"]}, "train.lora_targets", "changes nothing"),
        ({"train__lora_save_modules": ["norm"]}, "train.lora_save_modules", "changes nothing"),
        ({"train__part_names": ["*"]}, "train.part_names", "for the method parts"),
        ({"train__last_blocks": 1} | LORA, "train.last_blocks", "train.method is lora"),
        ({"output__export_form": "adapter"}, "output.export_form", "whole model is exported"),
        ({"preference__beta": 0.5}, "preference.beta", "beta is 0.5 and changes nothing"),
        ({"model__source": "acme/Tiny-7B-GGUF"}, "model.source", "GGUF, the format of llama.cpp"),
    ],
)
def test_what_is_hardly_meant_is_doubted(values, field, words):
    (found,) = of(**values)
    assert found.field == field and words in found.text


@pytest.mark.parametrize(
    "values",
    [
        {"train__learning_rate": 2e-2},
        {"train__warmup_steps": 449},
        {"output__eval_every": 450},
        LORA,
        LORA | {"train__lora_rank": 64, "output__export_form": "adapter"},
        {"train__method": "parts", "train__last_blocks": 1},
        {"train__objective": "dpo", "preference__beta": 0.5},
    ],
)
def test_the_limits_themselves_are_not_doubted(values):
    assert of(**values) == ()
