"""The weight files of an export: as few as their size asks for, all that plain transformers needs,
and readable by whoever the umask lets read.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.config.export_choice import ExportChoice
from engine.training.export import export, export_parts
from engine.training.export.export import TrainedModel, export_run, write_model
from engine.training.export.weight_files import SMALLEST, WeightFiles
from tests.support.checkpoints_of_families import load_plain, save_family
from tests.support.folders import make_config, make_tokenizer
from tests.support.multimodal import make_multimodal
from tests.support.trained_runs import trained

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

INDEX = "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def exported(poured, source: Path, dtype: str) -> Path:
    model, states = poured(source)
    folder = source.with_name(f"{source.name}-{dtype}")
    trained = TrainedModel(model, states, make_tokenizer(), str(source), dtype)
    write_model(trained, folder)
    return folder


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of all weight files in a folder, as they are stored."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def sizes_of(folder: Path) -> list[int]:
    """Returns the bytes of weights in each file, in the order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    return [sum(each.nbytes for each in load_file(file).values()) for file in files]


def expect_whole(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Fails where plain transformers reads other weights from `folder` than from `source`."""
    ours, theirs = load_plain(folder, dtype), load_plain(source, dtype)
    for (name, weight), (other, true) in zip(ours.named_parameters(), theirs.named_parameters()):
        assert name == other and torch.equal(weight, true), name


def expect_index(folder: Path) -> None:
    """Fails where the index says anything but what the files have."""
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / INDEX).read_text("utf-8"))
    there = {}
    for number, file in enumerate(files, 1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            there |= dict.fromkeys(opened.keys(), file.name)
    assert index["weight_map"] == there
    assert index["metadata"]["total_size"] == sum(sizes_of(folder))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral"])
def test_an_export_that_is_written_in_parts_is_one_file(
    family, dtype, poured, tmp_path, monkeypatch
):
    monkeypatch.setattr(export_parts, "_PART_BYTES", 1)
    source = save_family(tmp_path / "source", family, torch.bfloat16)
    folder = exported(poured, source, dtype)
    there = {file.name for file in folder.iterdir() if file.is_file()}
    assert "model.safetensors" in there and INDEX not in there
    assert [name for name in there if name[0] == "."] == []
    assert len(list(folder.glob("*.safetensors"))) == 1
    # A tied head has no values of its own, as in the source.
    assert sizes_of(folder) == [sizes_of(source)[0] * DTYPES[dtype].itemsize // 2]
    expect_whole(folder, source, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [20_000, 60_000, 150_000, 400_000])
def test_there_are_as_few_files_as_the_library_would_write(
    dtype, most, poured, tmp_path, monkeypatch
):
    """Also where parts end in other places than files."""
    monkeypatch.setattr(export_parts, "_PART_BYTES", 30_000)
    monkeypatch.setattr(export, "FILE_BYTES", most)
    source = save_family(tmp_path / "source", "llama", torch.bfloat16)
    folder = exported(poured, source, dtype)
    weights = load_plain(source, DTYPES[dtype]).state_dict()
    wanted = split_torch_state_dict_into_shards(weights, max_shard_size=most)
    found = sizes_of(folder)
    assert len(found) <= len(wanted.filename_to_tensors)
    assert sum(found) == wanted.metadata["total_size"]
    largest = max(weight.nbytes for weight in weights.values())
    assert max(found) <= max(most, largest) + 2 * SMALLEST * most
    if len(found) > 1:
        assert min(found) >= SMALLEST * most
        expect_index(folder)
    expect_whole(folder, source, DTYPES[dtype])


def test_the_files_of_a_model_that_sees_have_what_was_not_trained_too(tmp_path, monkeypatch):
    monkeypatch.setattr(export_parts, "_PART_BYTES", 1)
    source = make_multimodal(tmp_path / "model", "gemma3", tied=True)
    values = {"model.source": str(source), "output.export": True}
    run = trained(make_config(tmp_path, **values), tmp_path / "runs")
    assert len(sizes_of(run.folder.export_path)) == 1
    one = weights_in(run.folder.export_path)
    assert one.keys() == weights_in(source).keys()
    monkeypatch.setattr(export, "FILE_BYTES", sum(sizes_of(source)) // 4)
    several = tmp_path / "several"
    export_run(tmp_path / "runs", run.folder.id, several)
    assert 4 <= len(sizes_of(several)) <= 6
    expect_index(several)
    found = weights_in(several)
    assert found.keys() == one.keys() and all(torch.equal(found[name], one[name]) for name in one)


def test_files_hold_types_of_any_width_and_no_file_is_tiny(tmp_path):
    """Values of fewer bytes do not stand where those of wider types must be aligned."""
    random = torch.Generator().manual_seed(1)
    parts = [
        {"a": torch.rand(7, generator=random).half(), "b": torch.rand(300, generator=random)},
        {"c": torch.tensor(3), "d": torch.tensor([True] * 5), "e": torch.rand(0)},
        {"f": torch.rand(2000, generator=random)},
        {"g": torch.rand(3, generator=random).bfloat16()},
    ]
    files = WeightFiles(tmp_path, 4000)
    for number, tensors in enumerate(parts):
        file = tmp_path / f".part-{number}"
        save_file(tensors, file, metadata={"format": "pt"})
        files.take(file)
    everything = {name: tensor for tensors in parts for name, tensor in tensors.items()}
    assert sorted(files.names) == sorted(everything)
    files.finish()
    assert [math.floor(size / 1000) for size in sizes_of(tmp_path)] == [1, 8]
    expect_index(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    found = weights_in(tmp_path)
    assert found.keys() == everything.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in everything.items())


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("form", ["model", "float32", "adapter", "merged"])
def test_exported_files_have_the_mode_of_new_files(form, umask, tmp_path):
    values = {"train.method": "lora"} if form in ("adapter", "merged") else {}
    values |= {"model.dtype": "bfloat16", "train.steps": 1}
    run = trained(make_config(tmp_path, **values), tmp_path / "runs")
    choice = ExportChoice(
        form="adapter" if form == "adapter" else None,
        dtype="float32" if form == "float32" else "auto",
    )
    folder = tmp_path / "home"
    export_run(tmp_path / "runs", run.folder.id, folder, choice)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert any(name.endswith(".safetensors") for name in modes) and "README.md" in modes
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


def test_the_export_of_a_run_has_the_mode_of_new_files(umask, tmp_path):
    run = trained(make_config(tmp_path, **{"output.export": True}), tmp_path / "runs")
    modes = {stat.S_IMODE(file.stat().st_mode) for file in run.folder.export_path.iterdir()}
    assert modes == {0o666 & ~umask}
