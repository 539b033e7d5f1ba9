"""The bundled catalog of published models, and the starter's shape: counts are right, are the
engine's own, and are had without torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.find_shape import shape_from_source
from engine.model.hub.hub_cache import cached_config
from engine.paths import PROGRAM_ROOT
from engine.planning.shape.catalog import catalog, catalog_shape, entry_of, starter_shape
from engine.planning.shape.serialize import ACTIVATION_FIELDS

UNITS = {"M": 10**6, "B": 10**9}


def counted(written: str) -> float:
    """7.61B as a number."""
    return float(written[:-1]) * UNITS[written[-1]]


def test_the_catalog_is_wide_and_each_model_is_in_it_once():
    entries = catalog()
    ids = [known.lower() for entry in entries for known in (entry.id, *entry.also)]
    assert len(entries) >= 40 and len(ids) == len(set(ids))
    assert {entry.family for entry in entries} >= {
        "Llama 2",
        "Llama 3.1",
        "Qwen2.5",
        "Qwen3",
        "Qwen3 MoE",
        "Mistral",
        "Mixtral",
        "Gemma 2",
        "Gemma 3",
        "Gemma 4",
        "Phi-3",
        "Phi-4",
        "DeepSeek",
        "GLM-4.5",
        "gpt-oss",
        "OLMo 2",
        "Yi",
        "Qwen2.5-VL",
        "Qwen3-VL",
        "Llama 4",
        "InternVL",
        "SmolVLM",
    }
    assert max(entry.shape().parameter_count for entry in entries) > 400e9
    assert all(
        set(entry.contexts) <= set(entry.also) and entry.source.startswith("https://")
        for entry in entries
    )


@pytest.mark.parametrize("entry", catalog(), ids=lambda entry: entry.id)
def test_counts_are_those_that_the_publisher_gives(entry):
    shape = entry.shape()
    whole = shape.parameter_count + shape.untouched_numel
    within = 0.01 if shape.untouched_numel else 0.015
    assert whole == pytest.approx(counted(entry.published), rel=within)
    if entry.published_active is None:
        assert shape.active_parameters == shape.parameter_count
    else:
        assert shape.active_parameters < shape.parameter_count / 2


# ---------------------------------------------------------------------- by hand, from the published


def test_llama_3_1_8b_by_hand():
    vocabulary, hidden, ffn, layers, key_value = 128256, 4096, 14336, 32, 8 * 128
    block = (
        2 * hidden * hidden
        + 2 * hidden * key_value  # q and o; k and v
        + 3 * hidden * ffn  # gate, up, down
        + 2 * hidden
    )  # two norms
    shape = catalog_shape("meta-llama/Llama-3.1-8B")
    assert [unit.parameter_count for unit in shape.units] == [
        vocabulary * hidden,
        *[block] * layers,
        vocabulary * hidden + hidden,
    ]
    assert (
        shape.parameter_count == 2 * vocabulary * hidden + layers * block + hidden == 8_030_261_248
    )


def test_mixtral_8x7b_by_hand():
    vocabulary, hidden, ffn, layers, key_value, experts, chosen = (
        32000,
        4096,
        14336,
        32,
        8 * 128,
        8,
        2,
    )
    expert = 3 * hidden * ffn
    shared = (
        2 * hidden * hidden + 2 * hidden * key_value + hidden * experts + 2 * hidden
    )  # the router is hidden x experts
    outside = 2 * vocabulary * hidden + hidden
    shape = catalog_shape("mistralai/Mixtral-8x7B-v0.1")
    assert shape.parameter_count == outside + layers * (shared + experts * expert) == 46_702_792_704
    assert (
        shape.active_parameters == outside + layers * (shared + chosen * expert) == 12_879_925_248
    )


# ---------------------------------------------------------------------- against the meta device


def _meta_config(entry):
    from engine.model.build.library import transformers

    return transformers().AutoConfig.for_model(**entry.config_of(entry.id))


@pytest.mark.parametrize(
    "model_id,dtype",
    [
        ("HuggingFaceTB/SmolLM2-135M", "bfloat16"),
        ("Qwen/Qwen3-0.6B", "float32"),
        ("google/gemma-3-270m", "bfloat16"),
        ("Qwen/Qwen2.5-0.5B", "bfloat16"),
        ("allenai/OLMoE-1B-7B-0924", "bfloat16"),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "bfloat16"),
    ],
)
def test_bundled_shapes_are_the_meta_device_s_field_by_field(model_id, dtype):
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of

    built = shape_of(
        build_model(_meta_config(entry_of(model_id)), ModelConfig(source=model_id, dtype=dtype)),
        model_id,
    )
    bundled = catalog_shape(model_id, dtype)
    for item in dataclasses.fields(built):
        assert getattr(bundled, item.name) == getattr(built, item.name), item.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "model_id",
    ["Qwen/Qwen2.5-0.5B", "google/gemma-3-270m", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3.5-9B"],
)
def test_bundled_shapes_with_adapters_are_the_meta_device_s(model_id, dtype):
    """One that shares embeddings, one with windows, one of which routers stay in fp32, and one
    whose activations are estimated; with a rank that is not stored.
    """
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of

    adapters, entry = Adapters(rank=24), entry_of(model_id)
    settings = ModelConfig(source=model_id, dtype=dtype)
    built = shape_of(build_model(_meta_config(entry), settings, adapters), model_id)
    bundled = catalog_shape(model_id, dtype, adapters=adapters)
    non_text = built.untouched_numel + entry.unread
    built = dataclasses.replace(built, untouched_numel=non_text)
    for found, wanted in zip(bundled.units, built.units, strict=True):
        for name in ACTIVATION_FIELDS:
            kept, counted_so = getattr(found, name), getattr(wanted, name)
            assert kept.per_token == pytest.approx(counted_so.per_token, rel=1e-9)
            assert kept.per_pair == pytest.approx(counted_so.per_pair, rel=1e-9)
        same = {name: getattr(wanted, name) for name in ACTIVATION_FIELDS}
        assert dataclasses.replace(found, **same) == wanted
    assert dataclasses.replace(bundled, units=built.units) == built


def test_every_model_of_the_catalog_has_adapters_and_only_plain_ones_are_known():
    for entry in catalog():
        shape = entry.shape(adapters=Adapters(rank=4))
        assert 0 < shape.trained_count < 0.01 * shape.parameter_count
        assert shape.embed.is_frozen and shape.head.is_frozen
    for other in ({"dropout": 0.1}, {"targets": ("q_proj",)}, {"save_modules": ("norm",)}):
        assert catalog_shape("Qwen/Qwen2.5-0.5B", adapters=Adapters(**other)) is None
    like = Adapters(alpha=3.0, rslora=True)
    assert catalog_shape("Qwen/Qwen2.5-0.5B", adapters=like) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_starter_s_shape_is_the_meta_device_s_field_by_field(dtype):
    """Found by what its configuration says, wherever it lies; `assets/make/models.py
    assets/starter-model` writes it.
    """
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of
    from engine.model.build.pretrained_files import load_config

    folder = PROGRAM_ROOT / "assets" / "starter-model"
    content = (folder / "config.json").read_bytes()
    built = shape_of(
        build_model(load_config(str(folder)), ModelConfig(source="a copy", dtype=dtype)), "a copy"
    )
    bundled = starter_shape(content, dtype, "auto", "a copy")
    for item in dataclasses.fields(built):
        assert getattr(bundled, item.name) == getattr(built, item.name), item.name
    assert starter_shape(content, dtype, "eager", "a copy") is None
    assert starter_shape(content + b"\n", dtype, "auto", "a copy") is None


@pytest.mark.parametrize(
    "entry",
    [entry for entry in catalog() if len(entry.shape().blocks) <= 28],
    ids=lambda entry: entry.id,
)
def test_counts_are_those_of_the_library_s_own_model(entry):
    import torch

    from engine.model.build.library import empty_model

    model, shape = empty_model(_meta_config(entry), torch.bfloat16), entry.shape()
    whole = shape.parameter_count + shape.untouched_numel - entry.unread
    assert sum(parameter.numel() for parameter in model.parameters()) == whole


# ---------------------------------------------------------------------- what is answered, and what


def test_ids_are_found_in_any_case_and_a_shape_is_named_as_it_was_asked_for():
    entry = entry_of(" qwen/qwen2.5-7b-instruct ")
    assert entry is entry_of("Qwen/Qwen2.5-7B") and entry_of("Qwen/no-such-model") is None
    shape = catalog_shape(" qwen/qwen2.5-7b-instruct ")
    assert shape.source == "qwen/qwen2.5-7b-instruct" and shape.max_position_embeddings == 32768
    assert (
        dataclasses.replace(shape, source=entry.id, max_position_embeddings=131072) == entry.shape()
    )
    assert entry.config_of(shape.source) == {**entry.config, "max_position_embeddings": 32768}


def test_only_what_is_bundled_is_answered():
    plain, keep_in_fp32 = catalog_shape("Qwen/Qwen3-8B"), catalog_shape("Qwen/Qwen3-8B", "float32")
    assert catalog_shape("Qwen/Qwen3-8B", "bfloat16", "eager") is None
    assert catalog_shape("no/such-model") is None
    assert keep_in_fp32.dtype == "float32"
    assert keep_in_fp32.states.plane_bytes() == plain.in_dtype("float32").states.plane_bytes()
    assert (
        keep_in_fp32.blocks[0].activations.per_token > 1.5 * plain.blocks[0].activations.per_token
    )
    entry = entry_of("Qwen/Qwen3-8B")
    uncounted = dataclasses.replace(entry, _shape={**entry._shape, "logit_bytes": {"bfloat16": 14}})
    assert uncounted.shape("float32") is None and uncounted.shape() == entry.shape()


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_large_model_is_checked_without_torch_and_without_a_network(tmp_path):
    script = """
import sys
from engine.tools.cli.check import CheckedJob, NamedMachine, check
job = CheckedJob(model="meta-llama/Llama-3.1-405B")
machine = NamedMachine(ram_gib=8192, gpu_gib=141, disk_gib=20000)
text, code = check(job, machine, sys.argv[1])
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = sorted(loaded & {"torch", "transformers", "huggingface_hub"})
print(text.splitlines()[0], code, heavy)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=PROGRAM_ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "meta-llama/Llama-3.1-405B: llama, 405.85 billion parameters in 126 blocks, bfloat16 0 []"
    )


# ---------------------------------------------------------------------- what is here wins over what

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _into_cache(hub: Path, model_id: str) -> Path:
    model = hub / f"models--{model_id.replace('/', '--')}"
    snapshot = model / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    return snapshot / "config.json"


def test_a_configuration_in_the_hub_cache_is_the_truth(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "engine.model.build.find_shape._build",
        lambda model, parts: asked.append(model.source) or "from the configuration",
    )
    for name, hub in (
        ("HF_HUB_CACHE", tmp_path / "a"),
        ("HUGGINGFACE_HUB_CACHE", tmp_path / "b"),
        ("HF_HOME", tmp_path / "c"),
        ("XDG_CACHE_HOME", tmp_path / "d"),
    ):
        for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(name, str(hub))
        monkeypatch.setattr("engine.model.build.find_shape._known", {})
        folder = hub / {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(name, "")
        assert shape_from_source(ModelConfig(source="Qwen/Qwen3-8B")) == catalog_shape(
            "Qwen/Qwen3-8B"
        )
        file = _into_cache(folder, "Qwen/Qwen3-8B")
        assert cached_config("Qwen/Qwen3-8B") == file and cached_config("Qwen/Qwen3-4B") is None
        assert shape_from_source(ModelConfig(source="Qwen/Qwen3-8B")) == "from the configuration"
        file.unlink()
        assert cached_config("Qwen/Qwen3-8B") is None
    assert asked == ["Qwen/Qwen3-8B"] * 4


def test_a_local_folder_named_like_an_id_wins(tmp_path, monkeypatch):
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    assert shape_from_source(ModelConfig(source="Qwen/Qwen3-8B")).model_type == "llama"
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="has no config.json"):
        shape_from_source(ModelConfig(source="Qwen/Qwen3-8B"))
