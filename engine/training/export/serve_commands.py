"""Commands by which other programs use an exported folder."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import safe_files
from engine.model.lora.peft_folder import CONFIG
from engine.training.export.gguf_known import GGUF_LABELS, GGUF_SUFFIX, gguf_file_name
from engine.training.export.modelfile import MODELFILE, stops_in

_PARTS = "mmproj-"
"""llama.cpp's converter puts this before the name of a file with what reads images or sound."""


@dataclass(frozen=True)
class ExportCommand:
    """The command that exports the same run once more."""

    program: str
    run: str
    runs_dir: str
    folder: str
    """A folder that is not there yet."""
    name: str
    """Name of the run."""

    def text(self, form: str, dtype: str = "auto") -> str:
        """Returns the command for a form and a dtype."""
        words = ["export", self.run, self.folder, "--runs-dir", self.runs_dir, "--form", form]
        if dtype != "auto":
            words += ["--dtype", dtype]
        return f"{self.program} {shlex.join(words)}"

    def file(self, dtype: str) -> str:
        """Returns the GGUF file that it writes in a dtype."""
        return str(Path(self.folder) / gguf_file_name(self.name, dtype))


def what_to_type(
    folder: str | Path,
    name: str,
    is_read_by_llama_cpp: bool = True,
    export: ExportCommand | None = None,
    question: str = "",
) -> list[tuple[str, str]]:
    """Returns labels with commands for the exported `folder`. name: of the model in Ollama, which
    is llama.cpp, too. export: writes a GGUF file of the run, if there can be one. question: what
    the model is asked in Python, if anything.
    """
    path = Path(folder)
    quoted = shlex.quote(str(path))
    typed = [
        ("Load it in Python (transformers)", _python(str(path), question)),
        ("Serve it with vLLM", f"vllm serve {quoted}"),
    ]
    if not is_read_by_llama_cpp:
        return typed
    llama = _converted(path)
    if export is not None:
        llama = (
            "Chat with it in llama.cpp",
            f"{export.text('gguf', 'q8_0')}\n{_llama_cli(export.file('q8_0'))}",
        )
    return [*typed, llama, ("Chat with it in Ollama", _ollama(path, name))]


def _converted(path: Path) -> tuple[str, str]:
    """Returns a label and commands by which llama.cpp uses a folder that is no GGUF file."""
    has_parts = bool(_whole_class(path))
    file = f"{path.name}.gguf"
    lines, name = to_convert(path, has_parts), shlex.quote(file)
    if has_parts:
        lines.append(f"llama-server -m {name} --mmproj {shlex.quote(_PARTS + file)} --jinja")
        return "Serve it with llama.cpp, from its folder", "\n".join(lines)
    lines.append(f"llama-cli -m {name} --jinja -cnv{_stops(path)}")
    return "Chat with it in llama.cpp, from its folder", "\n".join(lines)


def to_convert(path: Path, has_parts: bool) -> list[str]:
    """Returns the commands by which llama.cpp converts an exported folder. has_parts: it also reads
    images or sound. Those parts come into a file of their own, with `_PARTS` before its name.
    """
    command = ["python", "convert_hf_to_gguf.py", str(path)]
    file = ["--outfile", f"{path.name}.gguf"]
    lines = [shlex.join([*command, "--outtype", "auto", *file])]
    return [*lines, shlex.join([*command, "--mmproj", *file])] if has_parts else lines


def in_a_sentence(export: ExportCommand, has_parts: bool) -> str:
    """Returns how a model becomes a GGUF file that is not written as one here."""
    lines = [export.text("model"), *to_convert(Path(export.folder), has_parts)]
    first, *others = (f"`{line}`" for line in lines)
    return f"Export a folder by {first}, and convert it in llama.cpp by {' and '.join(others)}."


def gguf_to_type(
    folder: str | Path, file: str, name: str, export: ExportCommand | None = None
) -> list[tuple[str, str]]:
    """Returns labels with commands for a GGUF file in a folder. name: of the model in Ollama.
    export: of the same run, if its weights are still there.
    """
    path = Path(folder)
    quoted = shlex.quote(str(path / file))
    return [
        ("Chat with it in llama.cpp", _llama_cli(str(path / file))),
        ("Serve it with llama.cpp", f"llama-server -m {quoted} --jinja"),
        ("Chat with it in Ollama", _ollama(path, name)),
        ("Open it in LM Studio", f"lms import {quoted}"),
        *_in_four_bits(path / file, export),
    ]


def _llama_cli(file: str) -> str:
    return f"llama-cli -m {shlex.quote(file)} --jinja -cnv"


def _in_four_bits(file: Path, export: ExportCommand | None) -> list[tuple[str, str]]:
    """Returns the command that makes a file of 4 bits. llama.cpp's own program rounds in groups of
    256 values (Q4_K); the package `gguf` writes the plain Q4_0 alone, which is clearly worse, so
    there is none of ours. It takes files of 16 or 32 bits.
    """
    lines = []
    if file.stem.endswith(GGUF_LABELS["q8_0"]):
        if export is None:
            return []
        lines = [export.text("gguf", "float16")]
        file = Path(export.file("float16"))
    small = file.with_name(f"{file.stem.rpartition('-')[0]}-{_FOUR_BITS}{GGUF_SUFFIX}")
    names = f"{shlex.quote(str(file))} {shlex.quote(str(small))}"
    lines.append(f"llama-quantize {names} {_FOUR_BITS}")
    return [("Make it smaller, in 4 bits", "\n".join(lines))]


def adapter_to_type(
    folder: str | Path,
    name: str,
    base: str,
    export: ExportCommand | None = None,
    question: str = "",
) -> list[tuple[str, str]]:
    """Returns labels with commands for a folder that holds an adapter alone, which belongs to the
    model `base`. Servers call it `name`. export: writes the whole model instead. question: what the
    model is asked in Python, if anything.
    """
    path = str(Path(folder))
    settings, more, ends = "", "", ""
    # Adapters of earlier versions have no generation settings.
    if not Path(folder).is_dir() or (Path(folder) / "generation_config.json").is_file():
        settings, more = f" --generation-config {shlex.quote(path)}", ", GenerationConfig"
        ends = (
            "\nmodel.generation_config = GenerationConfig.from_pretrained(folder)"
            "  # says what ends an answer"
        )
    return [
        (
            "Load it in Python (PEFT)",
            "from peft import AutoPeftModelForCausalLM\n"
            f"from transformers import AutoTokenizer{more}\n\n"
            f"folder = {path!r}\n"
            "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto"){ends}'
            + _asked(Path(folder), "tokenizer", question),
        ),
        (
            "Serve it with vLLM",
            _refused_by_vllm(Path(folder), export)
            or f"vllm serve {shlex.quote(base)} --enable-lora{_rank_for_vllm(Path(folder))} "
            f"--lora-modules {name}={shlex.quote(path)}{settings}",
        ),
    ]


def _ollama(folder: Path, name: str) -> str:
    return f"ollama create {name} -f {shlex.quote(str(folder / MODELFILE))}\nollama run {name}"


_FOUR_BITS = "Q4_K_M"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `--max-lora-rank` may have, beside 1 (vllm/config/lora.py)."""
_USUAL_RANK = 16
"""Default of `--max-lora-rank`."""
_REFUSED = {
    "modules_to_save": "with modules that are trained whole, such as the embedding",
    "trainable_token_indices": "with tokens whose vectors are trained",
    "use_dora": "with DoRA",
    "rank_pattern": "that has other ranks in some layers",
    "alpha_pattern": "that is scaled otherwise in some layers",
    "target_parameters": "on stacked experts, but for some families and versions",
}
"""Settings of adapters that vLLM refuses or ignores."""


def _adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the settings of PEFT in a folder, empty where they cannot be read."""
    try:
        return safe_files.read_json(folder / CONFIG, folder, dict[str, Any])
    except OSError:
        return {}


def _rank(config: dict[str, Any]) -> int:
    rank = config.get("r")
    return rank if isinstance(rank, int) else 0


def _rank_for_vllm(folder: Path) -> str:
    """Returns the option for an adapter whose rank is above vLLM's default."""
    rank = _rank(_adapter_config(folder))
    if rank <= _USUAL_RANK:
        return ""
    return f" --max-lora-rank {next(most for most in _RANKS if most >= rank)}"


def _refused_by_vllm(folder: Path, export: ExportCommand | None) -> str:
    """Returns a sentence where vLLM does not serve such an adapter as it was trained, with what to
    do; else an empty text.
    """
    config = _adapter_config(folder)
    why = next((why for name, why in _REFUSED.items() if config.get(name)), "")
    if config.get("bias", "none") != "none":
        why = "with biases that are trained"
    elif not why and _rank(config) > _RANKS[-1]:
        why = f"of a rank above {_RANKS[-1]}"
    if not why:
        return ""
    told = (
        f"# vLLM does not serve an adapter {why}.\n"
        "# Export the whole model, with the adapters merged, and serve that folder."
    )
    if export is None:
        return told
    return f"{told}\n{export.text('model')}\nvllm serve {shlex.quote(export.folder)}"


def _stops(folder: Path) -> str:
    """Returns the options that end an answer where the Modelfile does, for a program that knows the
    end token of the tokenizer alone.
    """
    try:
        file = folder / "tokenizer_config.json"
        config = safe_files.read_json(file, folder, dict[str, Any], safe_files.MEDIUM)
        stops = stops_in(safe_files.read_text(folder / MODELFILE, folder))
        eos = config.get("eos_token")
    except OSError:
        return ""
    known = eos.get("content") if isinstance(eos, dict) else eos
    return "".join(f" -r {shlex.quote(stop)}" for stop in stops if stop != known)


def _python(folder: str, question: str) -> str:
    name = _whole_class(Path(folder))
    reader = "processor" if name else "tokenizer"
    model, tokens = name or "AutoModelForCausalLM", "AutoProcessor" if name else "AutoTokenizer"
    return (
        f"from transformers import {', '.join(sorted((model, tokens)))}\n\n"
        f"folder = {folder!r}\n"
        f"{reader} = {tokens}.from_pretrained(folder)\n"
        f'model = {model}.from_pretrained(folder, dtype="auto")'
    ) + _asked(Path(folder), reader, question)


def _asked(folder: Path, reader: str, question: str) -> str:
    """Returns lines that print the answer to a question, for what was loaded; empty without one.
    reader: the variable that reads text.
    """
    if not question:
        return ""
    said = json.dumps(question, ensure_ascii=False)
    prompt = f'{reader}({said}, return_tensors="pt")'
    if _has_template(folder):
        content = said if reader == "tokenizer" else f'[{{"type": "text", "text": {said}}}]'
        prompt = (
            f"{reader}.apply_chat_template(\n"
            f'    [{{"role": "user", "content": {content}}}],\n'
            "    add_generation_prompt=True,\n"
            "    tokenize=True,\n"
            "    return_dict=True,\n"
            '    return_tensors="pt",\n'
            ")"
        )
    return (
        f"\n\nprompt = {prompt}\n"
        "answer = model.generate(**prompt, max_new_tokens=200)\n"
        'new = answer[0, prompt["input_ids"].shape[1] :]\n'
        f"print({reader}.decode(new, skip_special_tokens=True))"
    )


def _has_template(folder: Path) -> bool:
    """Returns whether the tokenizer of an exported folder has a chat template."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if safe_files.is_file(folder / name, folder):
            return True
    try:
        file = folder / "tokenizer_config.json"
        config = safe_files.read_json(file, folder, dict[str, Any], safe_files.MEDIUM)
    except OSError:
        return False
    return bool(config.get("chat_template"))


def _whole_class(folder: Path) -> str:
    """Returns the class of an exported model that also reads images or sound; empty for others."""
    try:
        config = safe_files.read_json(folder / "config.json", folder, dict[str, Any])
        return str(config["architectures"][0]) if "text_config" in config else ""
    except (OSError, LookupError, TypeError):
        return ""
