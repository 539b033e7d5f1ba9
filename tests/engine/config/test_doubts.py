"""Settings that are valid and hardly meant are doubted; those of the presets are not."""

from __future__ import annotations

import pytest

from engine.config.doubts import doubts
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT

PRESETS = sorted((PROGRAM_ROOT / "presets").glob("*.yaml"))


def of(**values):
    plain = {"model": {"source": "m"}, "data": {"source": "d"}, "train": {"steps": 450}}
    config = TrainConfig.from_dict(plain)
    return doubts(config.with_values({n.replace("__", "."): v for n, v in values.items()}))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_no_preset_is_doubted(path):
    assert doubts(TrainConfig.load(path)) == ()


@pytest.mark.parametrize(
    ("values", "field", "words"),
    [
        ({"train__learning_rate": 1000.0}, "train.learning_rate", "rate of 1000 is far above"),
        ({"train__learning_rate": 1e-9}, "train.learning_rate", "rate of 1e-09 is far below"),
        ({"train__method": "lora"}, "train.learning_rate", "rate of 1e-05 is low for adapters"),
        ({"train__warmup_steps": 9999}, "train.warmup_steps", "9,999 steps is as long as"),
        ({"output__eval_every": 500}, "output.eval_every", "comes only at the end"),
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
        {"train__method": "lora", "train__learning_rate": 2e-5},
    ],
)
def test_the_limits_themselves_are_not_doubted(values):
    assert of(**values) == ()
