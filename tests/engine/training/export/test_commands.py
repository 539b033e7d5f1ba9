"""What is typed to serve an adapter: vLLM takes ranks up to 16 unasked, and no saved modules."""

from __future__ import annotations

import json
import shlex

import pytest

from engine.paths import PROGRAM_ROOT
from engine.training.export.serve_commands import (
    ExportCommand,
    adapter_to_type,
    gguf_to_type,
    in_a_sentence,
    what_to_type,
)


def typed(folder, **config) -> str:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return dict(adapter_to_type(folder, "it", "base", again(folder)))["Serve it with vLLM"]


def again(folder) -> ExportCommand:
    return ExportCommand("python launch.py", "run-1", "my runs", f"{folder}/new one", "It's")


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
    told, _, *commands = typed(tmp_path, **config).splitlines()
    assert "vLLM does not serve an adapter" in told
    export, serve = map(shlex.split, commands)
    assert export[1:5] == ["launch.py", "export", "run-1", f"{tmp_path}/new one"]
    assert export[5:] == ["--runs-dir", "my runs", "--form", "model"]
    assert serve == ["vllm", "serve", f"{tmp_path}/new one"]


def test_vllm_is_told_what_ends_an_answer(tmp_path):
    assert "--generation-config" not in typed(tmp_path, r=8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert f"--generation-config {tmp_path}" in typed(tmp_path, r=8)


def test_each_program_is_given_the_file_of_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my models"
    for label, text in gguf_to_type(folder, "It-F16.gguf", "it"):
        named = folder / ("Modelfile" if "Ollama" in label else "It-F16.gguf")
        assert str(named) in shlex.split(text.replace("\n", " ")), label


def test_four_bits_are_made_of_a_file_that_is_not_rounded_already(tmp_path):
    label = "Make it smaller, in 4 bits"
    plain = dict(gguf_to_type(tmp_path, "It-is-F16.gguf", "it"))[label]
    names = [str(tmp_path / f"It-is-{kind}.gguf") for kind in ("F16", "Q4_K_M")]
    assert shlex.split(plain) == ["llama-quantize", *names, "Q4_K_M"]
    assert label not in dict(gguf_to_type(tmp_path, "It-Q8_0.gguf", "it"))
    export, rounded = dict(gguf_to_type(tmp_path, "It-Q8_0.gguf", "it", again(tmp_path)))[
        label
    ].splitlines()
    assert shlex.split(export)[-4:] == ["--form", "gguf", "--dtype", "float16"]
    assert shlex.split(rounded)[1] == f"{tmp_path}/new one/It-s-F16.gguf"


def test_a_folder_is_made_a_file_by_this_program_where_it_can(tmp_path):
    label = "Chat with it in llama.cpp"
    export, chat = dict(what_to_type(tmp_path, "it", export=again(tmp_path)))[label].splitlines()
    assert shlex.split(export)[-4:] == ["--form", "gguf", "--dtype", "q8_0"]
    assert shlex.split(chat)[:3] == ["llama-cli", "-m", f"{tmp_path}/new one/It-s-Q8_0.gguf"]
    assert "convert_hf_to_gguf" in str(what_to_type(tmp_path, "it"))


def test_the_lines_for_python_print_an_answer(capsys):
    folder = PROGRAM_ROOT / "assets" / "starter-model"
    label = "Load it in Python (transformers)"
    typed = dict(what_to_type(folder, "it", question='Write 7 as "Roman".'))[label]
    assert "apply_chat_template" in typed
    exec(typed, {})
    assert capsys.readouterr().out.strip()
    assert "print(" not in dict(what_to_type(folder, "it"))[label], "nothing is asked"


def test_what_reads_images_becomes_two_files(tmp_path):
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = dict(what_to_type(tmp_path, "it"))["Serve it with llama.cpp, from its folder"]
    text, parts, serve = map(shlex.split, told.splitlines())
    file = f"{tmp_path.name}.gguf"
    assert text[2:] == [str(tmp_path), "--outtype", "auto", "--outfile", file]
    assert parts[2:] == [str(tmp_path), "--mmproj", "--outfile", file]
    # The converter puts a prefix before the name.
    assert serve == ["llama-server", "-m", file, "--mmproj", f"mmproj-{file}", "--jinja"]
    sentence = in_a_sentence(again(tmp_path), has_parts=True)
    assert sentence.count("convert_hf_to_gguf.py") == 2 and "--form model" in sentence
