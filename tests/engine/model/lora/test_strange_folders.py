"""Adapters' folders of strangers end with one sentence, at once."""

from __future__ import annotations

import json
import os

import pytest

from engine.config.adapters import Adapters
from engine.errors import ModelError
from engine.model.lora.peft_folder import CONFIG, WEIGHTS, PeftFolder

GOOD = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
BAD = {
    "a negative rank": {"r": -1},
    "a huge rank": {"r": 10**400},
    "a rank that is a text": {"r": "8"},
    "a rank that is true": {"r": True},
    "an alpha without end": {"lora_alpha": 10**400},
    "parameters as a text": {"target_parameters": "a"},
    "parameters as numbers": {"target_parameters": [1]},
    "a million parameters": {"target_parameters": ["a"] * 10**5},
    "a long name": {"target_parameters": ["a" * 10**5]},
    "a kind that is a list": {"peft_type": ["LORA"]},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / WEIGHTS).write_bytes(b"")
    return tmp_path


def taken(folder) -> None:
    PeftFolder.read(folder).refuse_other(Adapters(rank=8, alpha=16.0))


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_settings_of_other_types_are_refused(folder, values):
    (folder / CONFIG).write_text(json.dumps(GOOD | values))
    with pytest.raises(ModelError, match="adapter_config.json cannot be read") as found:
        taken(folder)
    assert "\n" not in str(found.value) and len(str(found.value)) < 500


@pytest.mark.parametrize("text", ["[" * 100_000, "", "[]", '{"r": NaN}', "\xff", "{" + " " * 2**21])
def test_what_is_no_such_file_is_refused(folder, text):
    (folder / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="adapter_config.json cannot be read"):
        taken(folder)


def test_patterns_of_a_stranger_are_not_searched_with(folder):
    """They name layers, and those that are trained here are named by this run's settings."""
    (folder / CONFIG).write_text(json.dumps(GOOD | {"target_modules": "(a+)+$" * 100}))
    taken(folder)


def test_files_may_be_links_as_in_the_cache_of_the_hub(folder, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "blob"
    blob.write_text(json.dumps(GOOD))
    (folder / CONFIG).symlink_to(blob)
    taken(folder)
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(ModelError, match="a pipe, not a file"):
        taken(folder)
