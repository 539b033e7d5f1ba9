"""What is typed to serve an adapter: vLLM takes ranks up to 16 unasked, and no saved modules."""

from __future__ import annotations

import json
import shlex

import pytest

from engine.training.export.serve_commands import adapter_to_type, gguf_to_type


def typed(folder, **config) -> str:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return dict(adapter_to_type(folder, "it", "base"))["Serve it with vLLM"]


@pytest.mark.parametrize(
    "config, option",
    [
        ({"r": 8}, None),
        ({"r": 16}, None),
        ({"r": 17}, "32"),
        ({"r": 64}, "64"),
        ({"r": 257}, "320"),
        ({"r": 512, "use_rslora": True}, "512"),
        ({"r": 16, "modules_to_save": None, "rank_pattern": {}, "bias": "none"}, None),
        ({}, None),
    ],
)
def test_the_rank_is_told_where_vllm_would_refuse_it(tmp_path, config, option):
    words = typed(tmp_path, **config).split()
    assert words[:4] == ["vllm", "serve", "base", "--enable-lora"]
    found = words[words.index("--max-lora-rank") + 1] if "--max-lora-rank" in words else None
    assert found == option


@pytest.mark.parametrize(
    "config",
    [
        {"r": 8, "modules_to_save": ["embed_tokens"]},
        {"r": 8, "trainable_token_indices": {"embed_tokens": [3]}},
        {"r": 8, "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"r": 8, "use_dora": True},
        {"r": 8, "rank_pattern": {"q_proj": 100}},
        {"r": 8, "alpha_pattern": {"q_proj": 100}},
        {"r": 8, "bias": "lora_only"},
        {"r": 513},
    ],
)
def test_an_adapter_that_vllm_refuses_is_exported_whole(tmp_path, config):
    words = typed(tmp_path, **config)
    assert "vllm serve" not in words and "Export the whole model" in words


def test_vllm_is_told_what_ends_an_answer(tmp_path):
    assert "--generation-config" not in typed(tmp_path, r=8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert f"--generation-config {tmp_path}" in typed(tmp_path, r=8)


def test_each_program_is_given_the_file_of_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my models"
    for label, text in gguf_to_type(folder, "It-Q8_0.gguf", "it"):
        named = folder / ("Modelfile" if "Ollama" in label else "It-Q8_0.gguf")
        assert str(named) in shlex.split(text.replace("\n", " ")), label
