"""What follows from another model, other data or another batch, and nothing else."""

from __future__ import annotations

import pytest

from app.form.derived_defaults import derived_defaults, with_even_rows
from app.form.presets import read_presets
from app.form.settings_form import read_config, shown_values
from app.form.source_names import run_name

STARTER = shown_values(read_presets()["starter.yaml"].config)
NAMES = {"Starter"}


def changed(before=STARTER, **values):
    after = {**before, **{name.replace("__", "."): value for name, value in values.items()}}
    return derived_defaults(before, after, NAMES)


def test_micro_batches_that_no_longer_divide_the_batch_are_chosen_automatically():
    found = changed(train__batch_size="4")
    assert found.changes == {"train.micro_batch_size": ""}
    assert found.notes == (
        "Micro-batch size 8 does not divide the batch size, so it is chosen automatically.",
    )
    assert changed(train__batch_size="16").changes == {}
    for text in ("", "four", "8.5", "-3"):
        assert changed(train__batch_size=text).changes == {}


def test_a_form_on_its_way_to_another_batch_is_valid():
    shown, notes = with_even_rows({**STARTER, "train.batch_size": "12"})
    assert read_config(shown).train.micro_batch_size == "auto" and len(notes) == 1
    assert with_even_rows(STARTER) == (STARTER, ())
    # Micro-batches of no rows are an error of their own.
    zero = {**STARTER, "train.micro_batch_size": "0"}
    assert with_even_rows(zero) == (zero, ())


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ('{"dtype": "float32"}', "float32"),
        ('{"torch_dtype": "float32"}', "float32"),
        ('{"text_config": {"dtype": "float32"}}', "float32"),
        ('{"dtype": "bfloat16"}', "bfloat16"),
        ('{"dtype": "float16"}', "bfloat16"),
        ("{}", "bfloat16"),
        ("[]", "bfloat16"),
        ("no json", "bfloat16"),
    ],
)
def test_another_model_brings_its_own_precision(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    before = {**STARTER, "model.dtype": "bfloat16" if dtype == "float32" else "float32"}
    found = changed(before, model__source=str(tmp_path))
    assert found.changes["model.dtype"] == dtype


def test_a_model_of_the_hub_computes_in_bf16_unless_a_person_said_otherwise():
    assert changed(model__source="Qwen/Qwen2.5-7B").changes["model.dtype"] == "bfloat16"
    in_bf16 = {**STARTER, "model.dtype": "bfloat16"}
    both = changed(in_bf16, model__source="Qwen/Qwen2.5-7B", model__dtype="float32")
    assert "model.dtype" not in both.changes


def test_another_model_starts_from_its_own_weights_and_not_from_those_of_a_run():
    before = {**STARTER, "model.start_from": "/runs/taught"}
    found = changed(before, model__source="Qwen/Qwen2.5-7B")
    assert found.changes["model.start_from"] == "" and "its own weights" in found.notes[0]
    assert "model.start_from" not in changed(before, data__source="own.csv").changes
    both = changed(before, model__source="Qwen/Qwen2.5-7B", model__start_from="/runs/other")
    assert "model.start_from" not in both.changes and both.notes == ()


def test_format_and_split_belong_to_the_data_before():
    before = {**STARTER, "data.format": "messages", "data.split": "train_sft"}
    found = changed(before, data__source="own.csv")
    assert found.changes["data.format"] == "auto" and found.changes["data.split"] == "train"
    kept = changed(before, data__source="own.csv", data__split="test")
    assert "data.split" not in kept.changes
    assert changed(before, train__steps="3").changes == {}


def test_a_name_that_nobody_gave_follows_the_data():
    assert changed(data__source="/home/me/questions.csv").changes["name"] == "Questions"
    assert "name" not in changed(model__source="Qwen/Qwen2.5-7B").changes
    for name in ("Questions", "Questions 2", " "):
        named = {**STARTER, "data.source": "/home/me/questions.csv", "name": name}
        assert changed(named, data__source="org/World-facts_v1.5").changes["name"] == (
            "World facts v1.5"
        )
    own = {**STARTER, "name": "The fourth try"}
    assert "name" not in changed(own, data__source="other.csv").changes
    assert "name" not in changed(data__source="other.csv", name="Mine").changes


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("runs/uploads/a1/fragen-antworten.jsonl.gz", "Fragen antworten"),
        ("C:\\data\\FAQ.xlsx", "FAQ"),
        ('[{"source": "/d/capitals.csv", "weight": 2}, "cities.csv"]', "Capitals + Cities"),
        ("[a.csv, b.csv, c.csv, d.csv]", "A + B + 2 more"),
        ("[a.csv", ""),
        ("x" * 300, "X" + "x" * 38 + "…"),
        (None, ""),
    ],
)
def test_a_run_is_named_after_its_data_in_words(source, name):
    assert run_name(source) == name


@pytest.mark.parametrize(
    ("rate", "of_adapters", "back"),
    [("1e-5", "0.0001", "1e-5"), ("2e-6", "0.0001", "1e-5"), ("2e-5", "0.0002", "2e-5")],
)
def test_adapters_take_ten_times_the_rate_within_what_is_usual(rate, of_adapters, back):
    whole = {**STARTER, "train.learning_rate": rate}
    found = changed(whole, train__method="lora").changes
    assert found == {"train.learning_rate": of_adapters}
    lora = whole | found | {"train.method": "lora"}
    assert changed(lora, train__method="full").changes == {"train.learning_rate": back}


def test_a_rate_above_those_of_adapters_stays():
    assert changed(train__method="lora").changes == {}
    assert changed(train__method="lora", train__learning_rate="1e-6").changes == {}


def test_a_published_model_does_not_have_the_rate_of_a_tiny_one():
    other = {"model__source": "Qwen/Qwen2.5-0.5B"}
    assert changed(**other).changes["train.learning_rate"] == "1e-5"
    lora = {**STARTER, "train.method": "lora"}
    assert changed(lora, **other).changes["train.learning_rate"] == "0.0001"
    assert "train.learning_rate" not in changed(model__source="own/model").changes


def test_own_data_take_three_passes_unless_a_length_comes_with_them():
    found = changed(data__source="mine.csv").changes
    assert (found["train.epochs"], found["train.steps"]) == ("3", "")
    assert "train.epochs" not in changed(data__source="mine.csv", train__steps="9").changes


def with_starter(before, **values):
    after = {**before, **{name.replace("__", "."): value for name, value in values.items()}}
    return {**after, **derived_defaults(before, after, NAMES, STARTER).changes}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_rate_and_precision_of_a_preset_come_back_with_its_model_and_method(method):
    shown = with_starter(STARTER, model__source="Qwen/Qwen2.5-14B")
    assert (shown["train.learning_rate"], shown["model.dtype"]) == ("1e-5", "bfloat16")
    shown = with_starter(shown, train__method=method)
    shown = with_starter(shown, model__source="assets/starter-model")
    assert with_starter(shown, train__method="full") == STARTER


def test_a_typed_rate_and_precision_stay_with_another_model():
    typed = {**STARTER, "train.learning_rate": "0.003"}
    other = with_starter(typed, model__source="Qwen/Qwen2.5-14B")
    assert other["train.learning_rate"] == "0.003"
    assert with_starter(other, model__source="assets/starter-model") == typed
    in_fp32 = {**other, "model.dtype": "float32"}
    assert with_starter(in_fp32, model__source="Qwen/Qwen2.5-7B")["model.dtype"] == "float32"
