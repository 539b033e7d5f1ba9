"""The files that shapes of models are kept in: a damaged one counts as not there, and the
folder stays small.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.find_shape import shape_from_source
from engine.planning.shape import shape_cache
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.attention_shape import AttentionShape
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.shape_cache import keep_shape, kept_shape
from engine.planning.shape.unit_shape import UnitShape
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("unedited")

# ---------------------------------------------------------------------- files that cannot be truste

KEY = "0" * 64


SHAPE = ModelShape(
    model_type="llama",
    source="any",
    dtype="bfloat16",
    attention=AttentionShape(implementation="documents", heads=2, width=8),
    units=(
        UnitShape("embed", 128, 100),
        *(
            UnitShape(
                f"block {k}",
                256,
                200,
                8,
                Activations(64.5),
                Activations(64.5, 2.0),
                Activations(32.0),
            )
            for k in range(3)
        ),
        UnitShape("head", 64, 8),
    ),
    tied=True,
    packs=True,
    hidden_size=8,
    vocab_size=12,
    active_parameters=708,
    work_parameters=64,
    logit_bytes=14,
)


@pytest.fixture
def file(own_cache):
    keep_shape(KEY, SHAPE)
    return own_cache / "shapes" / f"{KEY}.json"


def test_a_file_is_read_as_it_was_written(file):
    assert kept_shape(KEY, "bfloat16", "any") == SHAPE
    assert kept_shape(KEY, "bfloat16", "other") == dataclasses.replace(SHAPE, source="other")
    assert kept_shape("1" * 64, "bfloat16", "any") is None
    assert kept_shape(KEY, "float32", "any") is None
    shutil.copy(file, file.with_name("1" * 64 + ".json"))
    assert kept_shape("1" * 64, "bfloat16", "any") is None  # one that was renamed
    assert [entry.name for entry in file.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_damaged_file_counts_as_not_there(file):
    good = file.read_bytes()
    for length in range(0, len(good), 40):
        file.write_bytes(good[:length])
        assert kept_shape(KEY, "bfloat16", "any") is None, length
    for position in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        assert kept_shape(KEY, "bfloat16", "any") is None, position
    for content in (
        b"[" * 200_000,
        b"null",
        b"[]",
        b"{}",
        b"9" * 5000,
        b"\xff\xfe",
        b" " * (2 << 20),
    ):
        file.write_bytes(content)
        assert kept_shape(KEY, "bfloat16", "any") is None
    file.unlink()
    file.mkdir()
    assert kept_shape(KEY, "bfloat16", "any") is None
    file.rmdir()
    os.mkfifo(file)  # which would be waited for
    assert kept_shape(KEY, "bfloat16", "any") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": 7},
        {"tied": 1},
        {"packs": None},
        {"hidden_size": 0},
        {"hidden_size": 8.0},
        {"hidden_size": True},
        {"vocab_size": -1},
        {"active_parameters": "708"},
        {"max_position_embeddings": -5},
        {"sliding_window": [8]},
        {"attention_heads": 0},
        {"mask_kinds": 1 << 80},
        {"logit_bytes": {}},
        {"logit_bytes": {"bfloat16": 0}},
        {"logit_bytes": {"bfloat16": 14, "float32": 16}},
        {"kinds": {}},
        {"kinds": [3]},
        {"kinds": []},
        {"units": []},
        {"units": [[0, 1]]},
        {"units": [[0, 1], [9, 3], [2, 1]]},
        {"units": [[0, 1], [-1, 3]]},
        {"units": [[0, 10**9], [1, 1]]},
        {"units": [[0, 60_000], [1, 60_000]]},
        {"units": [[0, 1, 2], [1, 3]]},
        {"units": [[0, 0], [1, 3]]},
        {"units": "units"},
        {"kinds": [{"numel": 128, "parameters": 100}] * 3},
        {"kinds": [{"numel": -1, "parameters": 0, "widest": 0}] * 3},
        {"kinds": [{"numel": 1, "parameters": 1, "widest": 0, "bfloat16": [1.0] * 5}] * 3},
        {
            "kinds": [
                {"numel": 1, "parameters": 1, "widest": 0, "bfloat16": [1.0] * 5 + [float("inf")]}
            ]
            * 3
        },
        {
            "kinds": [
                {"numel": 1, "parameters": 1, "widest": 0, "bfloat16": [1.0] * 5 + [float("nan")]}
            ]
            * 3
        },
        {"kinds": [{"numel": 1, "parameters": 1, "widest": 0, "bfloat16": None}] * 3},
        {"kinds": [[]] * 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_file_with_values_of_another_kind_counts_as_not_there_whatever_its_checksum(
    file, changes
):
    found = json.loads(file.read_text())
    row = found["shape"] | changes
    file.write_text(json.dumps(found | {"shape": row, "sha256": shape_cache._checksum(row)}))
    assert kept_shape(KEY, "bfloat16", "any") is None


@pytest.mark.parametrize(
    "missing",
    [
        "model_type",
        "tied",
        "hidden_size",
        "max_position_embeddings",
        "sliding_window",
        "logit_bytes",
        "kinds",
        "units",
    ],
)
def test_a_file_that_lacks_something_counts_as_not_there(file, missing):
    found = json.loads(file.read_text())
    row = {name: value for name, value in found["shape"].items() if name != missing}
    file.write_text(json.dumps(found | {"shape": row, "sha256": shape_cache._checksum(row)}))
    assert kept_shape(KEY, "bfloat16", "any") is None


def test_a_damaged_file_is_made_again(tmp_path, own_cache, forgetful):
    tiny_config("llama").save_pretrained(tmp_path)
    model = ModelConfig(source=str(tmp_path))
    built = shape_from_source(model)
    [file] = (own_cache / "shapes").iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-9])
    forgetful()
    assert shape_from_source(model) == built
    assert forgetful.built == [str(tmp_path)]
    assert file.read_bytes() == good


# ---------------------------------------------------------------------- what is kept, and where

OTHER_NAMES = tuple(
    dataclasses.replace(unit, name=unit.name.replace("block", "layer")) for unit in SHAPE.units
)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": dataclasses.replace(SHAPE.attention, sliding_window=[8])},
        {"hidden_size": 8.0},
        {"logit_bytes": float("nan")},
        {"model_type": None},
        {"max_position_embeddings": object()},
        {"units": OTHER_NAMES},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_would_not_be_read_again_is_not_kept(own_cache, changes):
    keep_shape(KEY, dataclasses.replace(SHAPE, **changes))
    assert not (own_cache / "shapes").exists()


def test_nothing_is_kept_of_an_engine_that_was_edited_meanwhile(own_cache, monkeypatch):
    monkeypatch.setattr(shape_cache.FILES, "sources", lambda: ["of an edited engine"])
    keep_shape(KEY, SHAPE)
    assert not (own_cache / "shapes").exists()


def test_failures_are_not_kept(tmp_path, own_cache, forgetful):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError):
        shape_from_source(ModelConfig(source=str(tmp_path)))
    assert not (own_cache / "shapes").exists() and len(forgetful.built) == 1
    with pytest.raises(ModelError):  # in this process it is, for a while
        shape_from_source(ModelConfig(source=str(tmp_path)))
    assert len(forgetful.built) == 1


@pytest.mark.parametrize("where", ["/dev/null/cache", "/proc/cache", "~nobody-of-this-name/cache"])
def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch, forgetful, where):
    monkeypatch.setenv("RAMSTREAM_CACHE", where)
    keep_shape(KEY, SHAPE)
    assert kept_shape(KEY, "bfloat16", "any") is None
    tiny_config("llama").save_pretrained(tmp_path)
    assert shape_from_source(ModelConfig(source=str(tmp_path))).hidden_size == 32


def test_a_full_disk_leaves_nothing_behind(own_cache, monkeypatch):
    def fails(*_paths, **_folders):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    keep_shape(KEY, SHAPE)
    assert list((own_cache / "shapes").iterdir()) == []


def test_the_oldest_go_and_what_is_in_use_stays(own_cache, monkeypatch):
    monkeypatch.setattr(shape_cache.FILES, "most", 5)
    keys = [f"{k:064x}" for k in range(7)]
    for age, key in enumerate(keys[:5]):
        keep_shape(key, SHAPE)
        os.utime(own_cache / "shapes" / f"{key}.json", (1000 + age, 1000 + age))
    (own_cache / "shapes" / ".shape-left").write_bytes(b"half")  # by a process that was killed
    os.utime(own_cache / "shapes" / ".shape-left", (10, 10))
    assert kept_shape(keys[0], "bfloat16", "any") is not None
    for key in keys[5:]:
        keep_shape(key, SHAPE)
    left = sorted(entry.name for entry in (own_cache / "shapes").iterdir())
    assert left == sorted(f"{keys[k]}.json" for k in (0, 3, 4, 5, 6))
