"""Models seen before are answered from the cache folder without torch, with the same report; what
is kept is never trusted further than it can be checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import ModelError
from engine.fit.report import estimate
from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine
from engine.model import find_shape as shapes
from engine.model import kept_shapes
from engine.model.build import build_model
from engine.model.find_shape import shape_from_source
from engine.model.kept_shapes import keep_shape, kept_shape, shape_key
from engine.model.layout import Activations
from engine.model.measure_shape import shape_of
from engine.model.pretrained_files import load_config
from engine.model.shape import ModelShape, UnitShape
from engine.paths import PROGRAM_ROOT
from engine.words import GIB
from tests.support.folders import make_model
from tests.support.tiny import tiny_config

MACHINES = (
    Machine("a CPU", 8, 64 * GIB, 64 * GIB, 60 * GIB, disk_free=100 * GIB),
    Machine(
        "a CPU",
        8,
        64 * GIB,
        64 * GIB,
        60 * GIB,
        (GpuInfo("a GPU", 24 * GIB, 23 * GIB),),
        "",
        100 * GIB,
    ),
)

SCRIPT = """
import json, sys
from engine.config.settings import TrainConfig
from engine.fit.report import estimate
from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine
data = json.loads(sys.argv[1])
config = TrainConfig.from_dict(data["config"])
reports = []
for given in data["machines"]:
    gpus = tuple(GpuInfo(**gpu) for gpu in given["gpus"])
    reports.append(estimate(config, Machine(**(given | {"gpus": gpus}))).to_dict())
print(json.dumps([reports, sorted({"torch", "transformers", "numpy.testing"} & set(sys.modules))]))
"""


def in_a_new_process(config: TrainConfig) -> tuple[list[dict], list[str]]:
    """(reports on MACHINES, which of the slow libraries were imported for them)"""
    given = json.dumps(
        {"config": config.to_dict(), "machines": [machine.to_dict() for machine in MACHINES]}
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given], cwd=PROGRAM_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reports, imported = json.loads(done.stdout)
    return reports, imported


def here(config: TrainConfig) -> list[dict]:
    """The reports as they are for a model that is built anew."""
    model = config.model
    shape = shape_of(build_model(load_config(model.source), model), model.source)
    return json.loads(
        json.dumps([estimate(config, machine, shape).to_dict() for machine in MACHINES])
    )


def job(folder: Path, **model) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": {"source": str(folder), **model},
            "data": {"source": "any", "max_seq_len": 32},
            "train": {"steps": 8, "batch_size": 4},
        }
    )


@pytest.fixture(autouse=True)
def unedited(monkeypatch):
    """The engine is what this process read, also while somebody edits it."""
    monkeypatch.setattr(kept_shapes, "_sources", lambda: kept_shapes._SOURCES)


@pytest.fixture
def forgetful(monkeypatch):
    """`forget()`: as a new process would, the memory is empty. Its `built` lists what was built
    since.
    """
    built, build = [], shapes._build
    monkeypatch.setattr(shapes, "_build", lambda model: built.append(model.source) or build(model))

    def forget() -> None:
        monkeypatch.setattr(shapes, "_known", {})
        monkeypatch.setattr(shapes, "_failures", {})
        built.clear()

    forget.built = built
    forget()
    return forget


# ---------------------------------------------------------------------- without torch


def test_the_starter_s_verdict_takes_no_torch():
    config = TrainConfig.load(PROGRAM_ROOT / "presets" / "starter.yaml")
    reports, imported = in_a_new_process(config)
    assert imported == [] and reports == here(config)
    assert reports[0]["verdict"] == "fits" and reports[0]["model"]["parameters"] == 637_728


def test_a_copy_of_the_starter_is_answered_as_well(tmp_path, forgetful):
    shutil.copytree(PROGRAM_ROOT / "assets" / "starter-model", tmp_path / "mine")
    shape = shape_from_source(ModelConfig(source=str(tmp_path / "mine")))
    assert (
        shape.source == str(tmp_path / "mine")
        and shape.parameter_count == 637_728
        and forgetful.built == []
    )


@pytest.mark.parametrize("family,dtype", [("llama", "float32"), ("qwen3_moe", "bfloat16")])
def test_a_second_process_answers_without_torch_until_the_configuration_changes(
    tmp_path, family, dtype
):
    folder = make_model(tmp_path / "model", family)
    config = job(folder, dtype=dtype)
    first, imported = in_a_new_process(config)
    assert "torch" in imported and first == here(config)
    assert in_a_new_process(config) == (first, [])

    file = folder / "config.json"
    text = file.read_text(encoding="utf-8")
    assert text.count('"num_hidden_layers": 3') == 1
    stamp = file.stat()
    file.write_text(
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2').replace(
            '"full_attention",\n    "full_attention",\n    "full_attention"',
            '"full_attention",\n    "full_attention"',
        )
    )
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    changed, imported = in_a_new_process(config)
    assert "torch" in imported and changed == here(config) != first
    assert [report["model"]["blocks"] for report in changed] == [2, 2]
    assert in_a_new_process(config) == (changed, [])


# ---------------------------------------------------------------------- what is answered


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype,attention", [("bfloat16", "auto"), ("float32", "eager")])
def test_what_is_kept_is_the_shape_itself(tmp_path, forgetful, family, dtype, attention):
    tiny_config(family).save_pretrained(tmp_path)
    model = ModelConfig(source=str(tmp_path), dtype=dtype, attention=attention)
    built = shape_from_source(model)
    assert forgetful.built == [str(tmp_path)] and shape_from_source(model) is built
    forgetful()
    kept = shape_from_source(model)
    for item in dataclasses.fields(built):
        assert getattr(kept, item.name) == getattr(built, item.name), item.name
    assert forgetful.built == [] and shape_from_source(model) is kept


def test_another_folder_with_the_same_configuration_is_the_same_model_by_another_name(
    tmp_path, forgetful
):
    for name in ("a", "b"):
        tiny_config("llama").save_pretrained(tmp_path / name)
    one = shape_from_source(ModelConfig(source=str(tmp_path / "a")))
    two = shape_from_source(ModelConfig(source=str(tmp_path / "b" / "config.json")))
    assert two == dataclasses.replace(one, source=str(tmp_path / "b" / "config.json"))
    assert forgetful.built == [str(tmp_path / "a")]


def test_a_configuration_in_the_hub_cache_is_answered_as_well(tmp_path, monkeypatch, forgetful):
    """In the cache's own layout, where the file is a link to one without a suffix; the hub is never
    asked.
    """
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    snapshot = model / "snapshots" / "0123456789abcdef"
    for folder in (snapshot, model / "refs", model / "blobs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(snapshot.name)
    tiny_config("llama").save_pretrained(tmp_path / "made")
    (tmp_path / "made" / "config.json").rename(model / "blobs" / "fedcba")
    (snapshot / "config.json").symlink_to("../../blobs/fedcba")
    built = shape_from_source(ModelConfig(source="some/model"))
    assert (
        forgetful.built == ["some/model"]
        and built.source == "some/model"
        and built.hidden_size == 32
    )
    forgetful()
    assert shape_from_source(ModelConfig(source="some/model")) == built and forgetful.built == []


def test_what_a_key_depends_on(monkeypatch):
    content = b'{"model_type": "llama"}'
    key = shape_key(content, "bfloat16", "auto")
    others = {
        shape_key(content + b" ", "bfloat16", "auto"),
        shape_key(content, "float32", "auto"),
        shape_key(content, "bfloat16", "eager"),
    }
    monkeypatch.setattr(kept_shapes, "_versions", lambda: ["2.0", "5.0", None, None])
    others.add(shape_key(content, "bfloat16", "auto"))
    monkeypatch.undo()
    monkeypatch.setattr(kept_shapes, "_SOURCES", "of an edited engine")
    others.add(shape_key(content, "bfloat16", "auto"))
    assert len(others | {key}) == 6 and None not in others
    # Another file has a say in it, or it is no configuration.
    assert [
        shape_key(other, "bfloat16", "auto")
        for other in (
            b'{"model_type": "llama", "configuration_files": ["config.4.0.0.json"]}',
            b"[]",
            b"{",
            b"\xff",
            b"[" * 100_000,
        )
    ] == [None] * 5


def test_a_configuration_that_names_other_files_is_read_each_time(tmp_path, forgetful):
    tiny_config("llama").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.4.0.0.json").write_text(json.dumps(values | {"hidden_size": 64}))
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"configuration_files": ["config.4.0.0.json"]})
    )
    model = ModelConfig(source=str(tmp_path))
    assert shape_from_source(model).hidden_size == 64
    (tmp_path / "config.4.0.0.json").write_text(json.dumps(values | {"hidden_size": 96}))
    forgetful()
    assert shape_from_source(model).hidden_size == 96


# ---------------------------------------------------------------------- files that cannot be truste

KEY = "0" * 64
SHAPE = ModelShape(
    "llama",
    "any",
    "bfloat16",
    "documents",
    (
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
    True,
    True,
    8,
    12,
    708,
    64,
    sliding_window=None,
    logit_bytes=14,
    attention_heads=2,
    attention_width=8,
)


@pytest.fixture
def file(own_cache):
    keep_shape(KEY, SHAPE)
    return own_cache / "shapes" / f"{KEY}.json"


def test_a_file_is_read_as_it_was_written(file):
    assert kept_shape(KEY, "bfloat16", "any") == SHAPE
    assert kept_shape(KEY, "bfloat16", "other") == dataclasses.replace(SHAPE, source="other")
    assert (
        kept_shape("1" * 64, "bfloat16", "any") is None
        and kept_shape(KEY, "float32", "any") is None
    )
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
    file.write_text(json.dumps(found | {"shape": row, "sha256": kept_shapes._checksum(row)}))
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
    file.write_text(json.dumps(found | {"shape": row, "sha256": kept_shapes._checksum(row)}))
    assert kept_shape(KEY, "bfloat16", "any") is None


def test_a_damaged_file_is_made_again(tmp_path, own_cache, forgetful):
    tiny_config("llama").save_pretrained(tmp_path)
    model = ModelConfig(source=str(tmp_path))
    built = shape_from_source(model)
    [file] = (own_cache / "shapes").iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-9])
    forgetful()
    assert (
        shape_from_source(model) == built
        and forgetful.built == [str(tmp_path)]
        and file.read_bytes() == good
    )


# ---------------------------------------------------------------------- what is kept, and where

OTHER_NAMES = tuple(
    dataclasses.replace(unit, name=unit.name.replace("block", "layer")) for unit in SHAPE.units
)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": [8]},
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
    monkeypatch.setattr(kept_shapes, "_sources", lambda: "of an edited engine")
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
    def fails(*_paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    keep_shape(KEY, SHAPE)
    assert list((own_cache / "shapes").iterdir()) == []


def test_the_oldest_go_and_what_is_in_use_stays(own_cache, monkeypatch):
    monkeypatch.setattr(kept_shapes, "MOST_FILES", 5)
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
