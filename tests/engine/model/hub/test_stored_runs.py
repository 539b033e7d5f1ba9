"""Runs that begin with weights as publishers store them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.machine.read_machine import read_machine
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.model.build.pretrained_files import load_config
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.report import estimate
from engine.planning.shape.quantized_weights import Method
from engine.planning.shape.shape_cache import keep_shape, kept_shape
from engine.runs.record.events import FitReported, LogLine
from engine.training.loop.run import Run
from tests.support.checkpoints_of_families import load_plain
from tests.support.folders import make_config, make_model
from tests.support.multimodal import make_multimodal
from tests.support.pickled_folders import pickle_weights
from tests.support.quantized_folders import quantize_to_fp8, quantize_to_mxfp4
from tests.support.trained_runs import events_of, trained

pytestmark = pytest.mark.computing

EXPORTED = {"output.export": True, "train.steps": 3}
QUANTIZED = {"fp8": ("llama", quantize_to_fp8), "mxfp4": ("gpt_oss", quantize_to_mxfp4)}
ON_LOADING = {
    "fp8": "stored in fp8, with a scale for each block. They",
    "mxfp4": "stored in MXFP4, with a scale for every 32 values. They",
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def run_of(tmp_path: Path, **values) -> Run:
    """A run that has finished."""
    run = trained(make_config(tmp_path, **values), tmp_path / "runs")
    assert run.folder.export_path.is_dir() or not values.get("output.export")
    return run


def assert_equal(ours: Path, theirs: Path) -> None:
    first, second = weights_of(ours), weights_of(theirs)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("files", [1, 2])
def test_a_run_of_pickled_weights_is_that_of_the_same_safetensors(tmp_path, files):
    first = run_of(tmp_path, **EXPORTED).folder.export_path
    pickle_weights(tmp_path / "model", files)
    second = run_of(tmp_path, **EXPORTED).folder.export_path
    assert_equal(first, second)
    assert not list(second.glob("*.bin"))


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_untouched_weights_of_a_pickled_model_are_copied_bit_by_bit(tmp_path):
    source = make_multimodal(tmp_path / "model", "gemma3")
    before = pickle_weights(source, 2)
    values = {"model.source": str(source), "output.export": True, "train.learning_rate": 1e-30}
    export = run_of(tmp_path, **values).folder.export_path
    after = weights_of(export)
    assert after.keys() == before.keys() and any("vision" in name for name in after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert not list(export.glob("*.bin*"))


def make_quantized(folder: Path, method: str) -> Path:
    family, quantize = QUANTIZED[method]
    source = make_model(folder, family, hidden_size=64, intermediate_size=96)
    quantize(source)
    return source


def dequantized_by_transformers(source: Path, folder: Path) -> Path:
    """Writes the same model with the weights to which transformers dequantizes them, in fp32."""
    whole = load_plain(source, torch.float32)
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", QUANTIZED)
def test_a_run_of_quantized_weights_is_that_of_the_dequantized_ones(tmp_path, method, dtype):
    values = EXPORTED | {"model.dtype": dtype}
    source = make_quantized(tmp_path / "model", method)
    quantized = run_of(tmp_path, **values)
    other = dequantized_by_transformers(source, tmp_path / "other")
    plain = run_of(tmp_path, **values | {"model.source": str(other)})
    assert_equal(quantized.folder.export_path, plain.folder.export_path)
    for run, is_said in ((quantized, True), (plain, False)):
        log = "\n".join(line.text for line in events_of(run, LogLine))
        reports = [event.report for event in events_of(run, FitReported)]
        reasons = "\n".join(reports[0]["reasons"])
        for text in (log, reasons):
            assert (ON_LOADING[method] in text) == is_said
    assert "exported without quantization" in "\n".join(
        events_of(quantized, FitReported)[0].report["reasons"]
    )
    config = json.loads((quantized.folder.export_path / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config


@pytest.mark.parametrize("method", QUANTIZED)
def test_frozen_weights_are_the_dequantized_ones_in_bf16(tmp_path, method):
    """The base of adapters: what is exported merged has them, where no adapter is."""
    source = make_quantized(tmp_path / "model", method)
    values = {"model.dtype": "bfloat16", "train.method": "lora", "train.lora_targets": ["q_proj"]}
    export = run_of(tmp_path, **EXPORTED | values).folder.export_path
    plain = load_plain(source, torch.float32).state_dict()
    ours = load_plain(export, torch.float32).state_dict()
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        is_base = "q_proj" not in name
        assert torch.equal(tensor, plain[name].bfloat16().float()) or not is_base, name


def test_random_weights_are_not_said_to_be_dequantized(tmp_path):
    make_quantized(tmp_path / "model", "fp8")
    config = make_config(tmp_path, **{"model.init": "random"})
    report = estimate(config, read_machine(), shape_of_run(config))
    assert not any("dequantized" in reason for reason in report.reasons)


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_kept_shape_knows_how_weights_are_stored(tmp_path, method, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_quantized(tmp_path / "model", method)
    config = make_config(tmp_path)
    shape = shape_of(build_model(load_config(str(source)), config.model), str(source))
    assert shape.stored_as is Method(method)
    keep_shape("key", shape)
    again = kept_shape("key", shape.dtype, str(source))
    assert again == shape and again.stored_as is Method(method)
