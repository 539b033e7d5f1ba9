"""`what_to_type` says how an exported folder is used by other programs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path


def what_to_type(folder: str | Path, name: str) -> list[tuple[str, str]]:
    """Returns labels with what to type. `folder` was exported, and `name` is what Ollama is to call
    the model.
    """
    path = Path(folder)
    quoted = shlex.quote(str(path))
    gguf = shlex.quote(f"{path.name}.gguf")
    return [
        ("Load it in Python (transformers)", _python(str(path))),
        ("Serve it with vLLM", f"vllm serve {quoted}"),
        (
            "Talk to it with llama.cpp, from its folder",
            f"python convert_hf_to_gguf.py {quoted} --outtype auto --outfile {gguf}\n"
            f"llama-cli -m {gguf} --jinja -cnv",
        ),
        (
            "Talk to it with Ollama",
            f"ollama create {name} -f {shlex.quote(str(path / 'Modelfile'))}\nollama run {name}",
        ),
    ]


def adapter_to_type(folder: str | Path, name: str, base: str) -> list[tuple[str, str]]:
    """Returns labels with what to type for a folder that holds an adapter alone, which belongs to
    the model `base`. Servers call it `name`.
    """
    path = str(Path(folder))
    return [
        (
            "Load it in Python (PEFT)",
            "from peft import AutoPeftModelForCausalLM\n"
            "from transformers import AutoTokenizer, GenerationConfig\n\n"
            f"folder = {path!r}\n"
            "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
            'model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto")\n'
            "# It says what ends an answer.\n"
            "model.generation_config = GenerationConfig.from_pretrained(folder)",
        ),
        (
            "Serve it with vLLM",
            f"vllm serve {shlex.quote(base)} --enable-lora "
            f"--lora-modules {name}={shlex.quote(path)} --generation-config {shlex.quote(path)}",
        ),
    ]


def _python(folder: str) -> str:
    name = _whole_class(Path(folder))
    model, tokens = name or "AutoModelForCausalLM", "AutoProcessor" if name else "AutoTokenizer"
    return (
        f"from transformers import {', '.join(sorted((model, tokens)))}\n\n"
        f"folder = {folder!r}\n"
        f"{'processor' if name else 'tokenizer'} = {tokens}.from_pretrained(folder)\n"
        f'model = {model}.from_pretrained(folder, dtype="auto")'
    )


def _whole_class(folder: Path) -> str:
    """Returns the class of an exported model that also reads images or sound; empty for others."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config["architectures"][0]) if "text_config" in config else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
