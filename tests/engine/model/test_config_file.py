"""A broken config.json: one sentence that names the file, the field and what it must be."""

from __future__ import annotations

import json

import pytest

from engine.errors import ModelError
from engine.model.build.pretrained_files import load_config
from engine.paths import PROGRAM_ROOT

STARTER = json.loads((PROGRAM_ROOT / "assets/starter-model/config.json").read_text("utf-8"))
TEXT = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
OFTEN = "must be a whole number, and is"
FIELDS = {
    "a text": ({"hidden_size": "big"}, f'hidden_size {OFTEN} "big"'),
    "a fraction": ({"hidden_size": 1.5}, f"hidden_size {OFTEN} 1.5"),
    "null": ({"intermediate_size": None}, f"intermediate_size {OFTEN} null"),
    "true": ({"hidden_size": True}, f"hidden_size {OFTEN} true"),
    "a list": ({"num_attention_heads": [4]}, f"num_attention_heads {OFTEN} [4]"),
    "a number for a text": ({"hidden_act": 4}, "hidden_act must be a text, and is 4"),
    "a text for a number": ({"rms_norm_eps": "x"}, 'rms_norm_eps must be a number, and is "x"'),
    "a text for a switch": (
        {"tie_word_embeddings": "yes"},
        'tie_word_embeddings must be true or false, and is "yes"',
    ),
    "one of two types": (
        {"pad_token_id": "x"},
        'pad_token_id must be a whole number or null, and is "x"',
    ),
    "a name that is mapped": (
        {"rope_scaling": "yes"},
        "rope_parameters must be a mapping or null, and is 'yes'",
    ),
    "negative": ({"hidden_size": -64}, "hidden_size in {file} is -64, and must be at least 1"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers in {file} is 0, and must be"),
    "heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads in {file} is 3, and must divide num_attention_heads, which is 4",
    ),
    "too many layers": ({"num_hidden_layers": 10**12}, "must be equal to the number of"),
    "wrong kinds of layers": ({"layer_types": ["a"] * 6}, "`layer_types` entries must be in"),
    "no type": ({"model_type": None}, 'it has no model_type, such as "qwen3"'),
    "an unknown type": ({"model_type": "marvel"}, 'no model of the type "marvel"'),
    "a type that is no text": ({"model_type": [3]}, "such as qwen3, and is [3]"),
    "its own code": (
        {"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}},
        "brings code of its own, which Ramstream never runs",
    ),
    "a nested text": (
        {"model_type": "gemma3", "text_config": TEXT | {"hidden_size": "x"}},
        f'text_config.hidden_size {OFTEN} "x"',
    ),
    "a nested negative": (
        {"model_type": "gemma3", "text_config": TEXT | {"hidden_size": -4}},
        "text_config.hidden_size in {file} is -4",
    ),
    "no mapping within": (
        {"model_type": "gemma3", "text_config": [1]},
        "text_config must be a mapping or null, and is [1]",
    ),
}
CONTENTS = {
    "a list": (b"[]", "must hold an object in braces"),
    "null": (b"null", "must hold an object in braces"),
    "cut off": (b'{"model_type": ', "is not valid JSON (Expecting value: line 1"),
    "empty": (b"", "is not valid JSON"),
    "no text": (b"\xff\xfe\x00", "is not valid JSON"),
    "deep": (b"[" * 100_000, "is not valid JSON (maximum recursion depth"),
}


def refused(folder, content: bytes) -> str:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as error:
        load_config(str(folder))
    found = str(error.value)
    assert found.startswith("model.source: ")
    assert "\n" not in found
    assert len(found) < 600
    assert found.endswith(".")
    assert "alidation error" not in found
    assert "(:" not in found
    assert str(folder / "config.json") in found
    return found


@pytest.mark.parametrize("changes, reported", FIELDS.values(), ids=FIELDS)
def test_a_wrong_field_is_named_with_its_file_and_what_it_must_be(tmp_path, changes, reported):
    config = {name: value for name, value in (STARTER | changes).items() if value is not None}
    if changes.get("intermediate_size", 0) is None:
        config["intermediate_size"] = None
    found = refused(tmp_path, json.dumps(config).encode())
    assert reported.format(file=tmp_path / "config.json") in found


@pytest.mark.parametrize("content, reported", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_configuration_is_told_as_such(tmp_path, content, reported):
    assert reported in refused(tmp_path, content)


def test_a_whole_configuration_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STARTER), encoding="utf-8")
    assert load_config(str(tmp_path)).hidden_size == STARTER["hidden_size"]
