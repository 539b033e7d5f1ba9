"""The settings form converts values in both directions, words errors in its own terms, and loads
presets.
"""

from __future__ import annotations

import dataclasses

import gradio as gr
import pytest

from app.form.settings_form import (
    CHOICE_LABELS,
    PROMINENT,
    as_labeled,
    describe_error,
    read_config,
    settings,
    shown_values,
)
from app.pages.new.panels import component
from engine.config.optimizers import OPTIMIZERS
from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError

DPO = {"train.objective": "dpo"}
KTO = {"train.objective": "kto"}
READ_WITH = {
    "preference.loss": DPO,
    "preference.label_smoothing": DPO | {"preference.loss": "robust"},
    "preference.sft_weight": DPO,
    "preference.desirable_weight": KTO,
    "preference.undesirable_weight": KTO,
}
"""These settings are refused where another one has not this value."""


def config_with(**values):
    return TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}}).with_values(
        values
    )


def all_fields(cls=TrainConfig, prefix=""):
    for field in dataclasses.fields(cls):
        default = (
            field.default_factory if field.default_factory is not dataclasses.MISSING else None
        )
        if default is not None and dataclasses.is_dataclass(default):
            yield from all_fields(default, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def another_value(setting, default):
    """Returns a valid value that differs from the default."""
    special = {
        "model.rope_factor": 4.5,
        "train.epochs": 1.5,
        "train.steps": 7,
        "train.micro_batch_size": 4,
        "data.eval_fraction": 0.25,
        "train.beta1": 0.5,
        "train.beta2": 0.75,
        "engine.gpu_memory_gib": 12.5,
        "train.max_grad_norm": None,
        "output.webhook": "https://example.org/hook",
        "data.roles": ("customer=user", "critic=critic"),
        "output.trackers": ("wandb", "tensorboard"),
    }
    if setting.dotted in special:
        return special[setting.dotted]
    return {
        "lines": lambda: ("one", " two", "three\nlines", '"four'),
        "switch": lambda: not default,
        "text": lambda: "another",
        "whole": lambda: 16,
        "number": lambda: 3.25e-7,
        "choice": lambda: next(c for c in setting.choices if c != default),
    }[setting.kind]()


def test_every_field_has_exactly_one_setting_with_help():
    assert [s.dotted for s in settings()] == list(all_fields())
    assert all(s.help for s in settings())
    assert len({s.elem_id for s in settings()}) == len(settings())
    assert set(PROMINENT) <= {s.dotted for s in settings()}


@pytest.mark.parametrize("setting", settings(), ids=lambda s: s.dotted)
def test_each_field_survives_the_way_to_its_component_and_back(setting):
    def value_of(config):
        for part in setting.dotted.split("."):
            config = getattr(config, part)
        return config

    # A patience needs evaluations, a choice by exact match needs prompts, and parts have names.
    base = {"output.eval_every": 8, "output.exact_match_samples": 4, "train.last_blocks": 2}
    base |= READ_WITH.get(setting.dotted, {})
    plain = config_with(**base)
    other = {setting.dotted: another_value(setting, value_of(plain))}
    with gr.Blocks():
        box = component(setting)
    for config in (plain, config_with(**base | other)):
        shown = shown_values(config)
        shown[setting.dotted] = box.preprocess(box.postprocess(shown[setting.dotted]))
        assert read_config(shown) == config


def test_words_of_choices_are_of_choices_that_exist():
    by_name = {setting.dotted: setting for setting in settings()}
    for dotted, words in CHOICE_LABELS.items():
        assert set(words) == set(by_name[dotted].choices) - {AUTO}, dotted


def test_the_optimizer_is_a_choice_in_words_with_its_bytes():
    setting = next(setting for setting in settings() if setting.dotted == "train.optimizer")
    with gr.Blocks():
        box = component(setting)
    assert [value for _, value in box.choices] == list(OPTIMIZERS)
    assert ("AdamW, moments in 8 bits", "adamw_8bit") in box.choices
    assert "14, 10 or 8.03 bytes of RAM a parameter" in box.info
    assert "change results slightly" in box.info


def test_numbers_are_shown_as_people_write_them():
    shown = shown_values(config_with(**{"train.learning_rate": 1e-5, "train.weight_decay": 0.01}))
    assert shown["train.learning_rate"] == "1e-5"
    assert shown["train.weight_decay"] == "0.01"
    assert shown["engine.slots"] == "" and shown["train.steps"] == ""


def test_empty_boxes_mean_auto_or_none():
    shown = shown_values(config_with(**{"engine.slots": 3, "train.steps": 5}))
    assert read_config(shown | {"engine.slots": " ", "train.steps": ""}).engine.slots == AUTO
    assert read_config(shown | {"engine.slots": "auto", "train.steps": None}).train.steps is None


@pytest.mark.parametrize(
    "field, text, part",
    [
        ("train.batch_size", "many", "Batch size: 'many' is not a whole number"),
        ("train.batch_size", "2.5", "Batch size: 2.5 is not a whole number"),
        ("train.batch_size", "", "Batch size: this is empty"),
        ("train.learning_rate", "nan", "Learning rate"),
        ("train.learning_rate", "-1", "Learning rate: -1.0 is not above 0"),
        ("model.source", "  ", "Model: no model is given"),
        ("engine.slots", "0", "Slots: 0 is too small"),
    ],
)
def test_wrong_text_is_refused_under_the_label_of_its_field(field, text, part):
    with pytest.raises(ConfigError) as caught:
        read_config(shown_values(config_with()) | {field: text})
    assert caught.value.field == field
    assert part in describe_error(caught.value)


def test_an_empty_text_that_may_be_left_out_is_none():
    shown = shown_values(config_with())
    assert shown["output.webhook"] == "" and read_config(shown).output.webhook is None
    assert read_config(shown | {"output.webhook": " none "}).output.webhook is None
    address = "https://example.org/hook"
    assert read_config(shown | {"output.webhook": f" {address} "}).output.webhook == address
    assert shown_values(config_with(**{"output.webhook": address}))["output.webhook"] == address


def test_sentences_of_the_engine_call_settings_and_their_groups_as_the_form_does():
    assert as_labeled(
        "In data.columns, only prompt is named; set data.columns.completion too, or data.format."
    ) == ("In Columns of the data, only prompt is named; set Column of the answer too, or Format.")
    assert as_labeled("See odd.jsonl and a.b.c.") == "See odd.jsonl and a.b.c."


@pytest.mark.parametrize(
    "column", ["Frage", " padded ", "none", "null", '"quoted"', "two\nlines", "<b>"]
)
def test_a_column_of_any_name_survives_the_form(column):
    config = config_with(**{"data.columns.prompt": column})
    assert read_config(shown_values(config)) == config


@pytest.mark.parametrize(
    "wrong",
    [
        {"train.steps": "10", "train.epochs": "2"},
        {"train.max_grad_norm": "-1"},
        {"engine.gpu_memory_gib": "-1"},
    ],
)
def test_no_sentence_of_the_form_speaks_of_null(wrong):
    with pytest.raises(ConfigError, match="null") as caught:
        read_config(shown_values(config_with()) | wrong)
    assert "null" not in describe_error(caught.value)
