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
from engine.files import code_digest
from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine
from engine.model.build.build import build_model
from engine.model.build.find_shape import shape_from_source
from engine.model.build.measure_shape import shape_of
from engine.model.build.pretrained_files import load_config
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.report import estimate
from engine.planning.shape import shape_cache
from engine.planning.shape.shape_cache import shape_key
from engine.text import GIB
from tests.support.folders import make_model
from tests.support.imported import imported_by, packages_of
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("unedited")

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
from engine.planning.fit.report import estimate
from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine
from engine.model.build.shape_of_run import shape_of_run
data = json.loads(sys.argv[1])
config = TrainConfig.from_dict(data["config"])
reports = []
for given in data["machines"]:
    gpus = tuple(GpuInfo(**gpu) for gpu in given["gpus"])
    machine = Machine(**(given | {"gpus": gpus}))
    reports.append(estimate(config, machine, shape_of_run(config)).to_dict())
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


# ---------------------------------------------------------------------- without torch


def test_the_starter_s_verdict_takes_no_torch():
    config = TrainConfig.load(PROGRAM_ROOT / "presets" / "starter.yaml")
    reports, imported = in_a_new_process(config)
    assert imported == [] and reports == here(config)
    assert reports[0]["verdict"] == "fits" and reports[0]["model"]["parameters"] == 637_728


def test_a_copy_of_the_starter_is_answered_as_well(tmp_path, forgetful):
    shutil.copytree(PROGRAM_ROOT / "assets" / "starter-model", tmp_path / "mine")
    shape = shape_from_source(ModelConfig(source=str(tmp_path / "mine")))
    assert shape.source == str(tmp_path / "mine")
    assert shape.parameter_count == 637_728
    assert forgetful.built == []


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("family,dtype", [("llama", "float32"), ("qwen3_moe", "bfloat16")])
def test_a_second_process_answers_without_torch_until_the_configuration_changes(
    tmp_path, family, dtype
):
    folder = make_model(tmp_path / "model", family)
    config = job(folder, dtype=dtype)
    shape_from_source(config.model)  # this process is the first
    first = here(config)
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
    assert forgetful.built == ["some/model"]
    assert built.source == "some/model"
    assert built.hidden_size == 32
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
    monkeypatch.setattr(shape_cache, "_versions", lambda: ["2.0", "5.0", None, None])
    others.add(shape_key(content, "bfloat16", "auto"))
    monkeypatch.undo()
    monkeypatch.setattr(shape_cache.FILES, "first", ["of an edited engine"])
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


def test_a_change_of_any_file_that_decides_a_shape_makes_kept_ones_old():
    modules = imported_by("engine.model.build.measure_shape", "engine.model.build.build")
    found = packages_of(modules)
    assert {"planning/layout", "model/lora", "model/blocks", "planning/shape"} < found
    # What is said where memory is short decides no shape.
    shown = {name for name in modules if name.startswith("engine.machine.")}
    assert shown <= {"engine.machine.cgroups", "engine.machine.short_memory"}
    wings = {each.partition("/")[0] for each in shape_cache.ROOMS if "/" not in each}
    others = {each for each in found if each.partition("/")[0] not in wings}
    assert others - {"machine"} <= set(shape_cache.ROOMS)
    # How a run changes the model before it is built.
    assert "model/build" in packages_of(imported_by("engine.model.build.read_model"))
    assert "model" in wings


@pytest.mark.parametrize(
    "room", ["", "planning/layout", "model/lora", "model/blocks", "model/build"]
)
def test_code_with_other_content_has_another_digest(tmp_path, monkeypatch, room):
    """Also of the same size, and written at the same time."""
    shutil.copytree(PROGRAM_ROOT / "engine", tmp_path / "engine")
    monkeypatch.setattr("engine.files.__file__", str(tmp_path / "engine" / "files.py"))
    before = code_digest(shape_cache.ROOMS)
    assert [before] == shape_cache.FILES.first, "a copy of the same code"
    file = max((tmp_path / "engine" / room).glob("*.py"))
    content, stamp = file.read_bytes(), file.stat()
    file.write_bytes(content.replace(b"e", b"E", 1))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert file.read_bytes() != content and code_digest(shape_cache.ROOMS) != before
    file.write_bytes(content)
    assert code_digest(shape_cache.ROOMS) == before
    file.rename(file.with_name("renamed.py"))
    assert code_digest(shape_cache.ROOMS) != before
