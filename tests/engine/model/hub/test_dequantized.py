"""Quantized weights fill the masters with the values that transformers dequantizes them to."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Mxfp4Config

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config
from engine.training.export.export import TrainedModel, write_model
from tests.support.checkpoints_of_families import load_plain, save_family
from tests.support.folders import make_model, make_tokenizer
from tests.support.multimodal import multimodal_config
from tests.support.pickled_folders import pickle_weights
from tests.support.quantized_folders import (
    fp8_of,
    quantize_to_fp8,
    quantize_to_mxfp4,
    write_quantized,
)

pytestmark = pytest.mark.computing

WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""In MXFP4, widths are multiples of 32."""
FP8 = FineGrainedFP8Config(dequantize=True)


def masters(model, states) -> dict[str, torch.Tensor]:
    return {
        spec.full_name: states.parameters.master(unit.name, spec.name)
        for unit in model.units
        for spec in unit.layout.parameters
    }


def assert_as_transformers(poured, folder, how) -> None:
    ours = masters(*poured(folder))
    theirs = load_plain(folder, torch.float32, quantization_config=how).state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].float()), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_fp8_is_what_transformers_makes_of_it(family, poured, tmp_path):
    source = save_family(tmp_path / "source", family, torch.bfloat16)
    block = (8, 8)
    before = load_file(source / "model.safetensors")
    stored = quantize_to_fp8(source, block)
    assert sum(name.endswith("_scale_inv") for name in stored) > 10
    assert_as_transformers(poured, source, FP8)
    assert before.keys() == {name for name in stored if not name.endswith("_scale_inv")}


def test_one_scale_for_a_whole_weight(poured, tmp_path):
    source = save_family(tmp_path / "source", "llama")
    quantize_to_fp8(source, None)
    assert_as_transformers(poured, source, FP8)


def test_blocks_at_the_ends_of_a_weight_may_be_smaller(poured, tmp_path):
    """576 rows of DeepSeek V3 have five scales. transformers takes the size of a block from the
    number of scales, so the values are worked out here.
    """
    source = save_family(tmp_path / "source", "llama")
    stored = quantize_to_fp8(source, (20, 20))
    ours = masters(*poured(source))
    name = "model.layers.0.mlp.up_proj.weight"
    numbers, scales = stored[name].float(), stored[f"{name}_scale_inv"]
    rows, columns = numbers.shape
    assert rows % 20 and columns % 20
    expected = torch.tensor(
        [
            [(numbers[i, j] * scales[i // 20, j // 20]).item() for j in range(columns)]
            for i in range(rows)
        ]
    )
    assert torch.equal(ours[name], expected)


@pytest.mark.slow("it sweeps over many cases")
@pytest.mark.parametrize("piece", [64, 1 << 22])
def test_mxfp4_is_what_transformers_makes_of_it(piece, poured, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.model.hub.dequantize._CHUNK", piece)
    source = make_model(tmp_path / "source", "gpt_oss", torch.bfloat16, **WIDE)
    stored = quantize_to_mxfp4(source)
    assert sum(name.endswith("_blocks") for name in stored) == 2 * 3
    assert_as_transformers(poured, source, Mxfp4Config(dequantize=True))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_is_in_the_dtype_of_the_settings_and_not_quantized(
    dtype, method, poured, tmp_path
):
    family = "llama" if method == "fp8" else "gpt_oss"
    source = make_model(tmp_path / "source", family, torch.bfloat16, **WIDE)
    (quantize_to_fp8 if method == "fp8" else quantize_to_mxfp4)(source)
    model, states = poured(source)
    shown = {
        spec.full_name: states.parameters.view(unit.name, spec.name).float()
        for unit in model.units
        for spec in unit.layout.parameters
    }
    ours = masters(model, states) if dtype == "float32" else shown
    write_model(TrainedModel(model, states, make_tokenizer(), str(source), dtype), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config and config["dtype"] == dtype
    for name, tensor in load_plain(tmp_path / "out", torch.float32).state_dict().items():
        assert torch.equal(tensor, ours[name]), name


def test_pickled_weights_may_be_quantized_too(poured, tmp_path):
    source = save_family(tmp_path / "source", "llama")
    quantize_to_fp8(source)
    first = masters(*poured(source))
    pickle_weights(source, 2)
    for name, tensor in masters(*poured(source)).items():
        assert torch.equal(tensor, first[name]), name


def other_numbers(stored, name):
    stored[name] = torch.zeros(stored[name].shape, dtype=torch.int8)


def fewer_scales(stored, name):
    stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"][:1].clone()


def other_scales(stored, name):
    stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"].to(torch.uint8)


@pytest.mark.parametrize(
    "damage, reported",
    [
        (other_numbers, "is stored as int8"),
        (fewer_scales, r"has scales of the shape \(1, 2\)"),
        (other_scales, "has scales in uint8"),
    ],
)
def test_what_does_not_belong_to_the_method_is_refused_by_name(damage, reported, poured, tmp_path):
    source = save_family(tmp_path / "source", "llama")
    stored = quantize_to_fp8(source)
    name = "model.layers.1.mlp.up_proj.weight"
    damage(stored, name)
    how = json.loads((source / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    write_quantized(source, stored, how)
    with pytest.raises(ModelError, match=f"^model.source: {name} {reported}") as refused:
        poured(source)
    assert "\n" not in str(refused.value)


def test_fp8_without_its_scales_is_refused_by_name(poured, tmp_path):
    source = save_family(tmp_path / "source", "llama")
    stored = quantize_to_fp8(source)
    name = "model.layers.1.mlp.up_proj.weight"
    del stored[f"{name}_scale_inv"]
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError,
        match=f"{name} is stored as float8_e4m3fn, which is no floating-point type of 16",
    ):
        poured(source)


@pytest.mark.parametrize(
    "how, reported",
    [
        ({"quant_method": "gptq", "bits": 4}, r"is a quantized checkpoint \(gptq\)"),
        ({"quant_method": "awq"}, r"is a quantized checkpoint \(awq\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\)"),
        ({"quant_method": "compressed-tensors"}, r"\(compressed-tensors\)"),
        ({"bits": 4}, r"\(of an unknown method\)"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "whose scale_fmt is ue8m0"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "whose expert_dtype is fp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "whose weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "whose weight_block_size is"),
    ],
)
def test_other_methods_are_refused_by_name(how, reported, tmp_path):
    source = make_model(tmp_path / "source")
    write_quantized(source, load_file(source / "model.safetensors"), how)
    with pytest.raises(ModelError, match=reported):
        build_model(load_config(str(source)), ModelConfig(source=str(source)))


def test_scales_of_ones_keep_the_numbers():
    """What the tests quantize with is what they mean."""
    weight = torch.tensor([[448.0, 1.0, 448.0], [-448.0, 0.5, 448.0]])
    made = fp8_of("w", weight, (2, 2))
    assert torch.equal(made["w_scale_inv"], torch.ones(1, 2))
    assert torch.equal(made["w"].float(), weight)


def test_a_quantized_model_that_also_reads_images_is_refused(tmp_path):
    config = multimodal_config("gemma3")
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match="quantized checkpoint of a model that reads more than"):
        build_model(config, ModelConfig(source="tiny"))
