"""The families and tokenizers of which there are GGUF files. This needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import RunError

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
"""llama.cpp's names for model types of transformers."""
BYTE_PAIRS = "gpt2"
PIECES = "llama"
"""llama.cpp's names for tokenizers that merge bytes, and for those of SentencePiece, which merge
characters.
"""
SPACE = "▁"
GGUF_SUFFIX = ".gguf"
GGUF_LABELS = {"q8_0": "Q8_0", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""llama.cpp's names for types of weights."""
BLOCK = 32
"""Values that share a factor in Q8_0."""
_ITEM_BYTES = {"q8_0": 1 + 2 / BLOCK, "bfloat16": 2, "float16": 2, "float32": 4}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERNS = {
    "qwen2": _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,
    "llama-bpe": _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,
}
"""Patterns that divide a text, by llama.cpp's names (llama-vocab.cpp)."""
_NAMES = {pattern: name for name, pattern in PATTERNS.items()}
_OTHER_TOKENIZER = (
    "llama.cpp does not divide texts as this model's tokenizer does, so there is no GGUF file of "
    "it. Export a folder. SmolLM2, Qwen2.5, Qwen3, Llama, Mistral 7B and Gemma 3 can be GGUF files."
)
_OTHER_KIND = "A GGUF file needs a BPE tokenizer, and that of this model is {}. Export a folder."


class NoGguf(RunError):
    """A model that is not written as a GGUF file here. llama.cpp may convert an exported folder of
    it; `has_parts`: in two steps, since it also reads images or sound.
    """

    def __init__(self, sentence: str, has_parts: bool = False):
        self.has_parts = has_parts
        super().__init__(sentence)


@dataclass(frozen=True)
class TokenizerKind:
    """How llama.cpp reads a text as a tokenizer does."""

    model: str
    """`BYTE_PAIRS` or `PIECES`."""
    divided_by: str = "default"
    """llama.cpp's name for how a text is divided before bytes are merged."""
    space: Literal["never", "first", "always"] = "never"
    """Whether a space is put before a text: never, at its start alone, or behind each special token
    as well.
    """


def gguf_file_name(run: str, kind: str) -> str:
    """Returns the name of the file of a run that is called `run`, with weights of a type."""
    return f"{as_file_name(run)}-{GGUF_LABELS[kind]}{GGUF_SUFFIX}"


def as_file_name(run: str) -> str:
    """Returns the name of a run in letters that every file system takes."""
    return re.sub(r"[^\w.-]", "-", run).strip("-.") or "model"


def stored_type(shape: Sequence[int], kind: str) -> str:
    """Returns the type in which a tensor of a file of type `kind` is kept. Vectors are a hundredth
    of a percent of a model, and llama.cpp computes with them in fp32.
    """
    if len(shape) < 2:
        return "float32"
    return "float16" if kind == "q8_0" and shape[-1] % BLOCK else kind


def gguf_item_bytes(shape: Sequence[int], kind: str) -> float:
    """Returns the bytes of a value of such a tensor."""
    return _ITEM_BYTES[stored_type(shape, kind)]


def kind_of_tokenizer(content: dict[str, Any]) -> TokenizerKind | None:
    """Returns how llama.cpp reads a text as a tokenizer does, or None if it would read one
    otherwise. content: of tokenizer.json.
    """
    model = content["model"]
    if model["type"] != "BPE":
        return None
    return _of_pieces(content) if model.get("byte_fallback") else _of_bytes(content)


def refusal_of_tokenizer(content: dict[str, Any]) -> str:
    """Returns a sentence on a tokenizer of which there is no GGUF file. content: of
    tokenizer.json.
    """
    kind = content["model"]["type"]
    return _OTHER_TOKENIZER if kind == "BPE" else _OTHER_KIND.format(kind)


def _of_bytes(content: dict[str, Any]) -> TokenizerKind | None:
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    has_own_pattern = steps[-1].get("use_regex", True)
    kinds = [step["type"] for step in steps[:-1]]
    name = None
    if has_own_pattern and not kinds:
        name = "gpt-2"
    elif has_own_pattern and kinds == ["Digits"] and steps[0].get("individual_digits"):
        name = "smollm"
    elif not has_own_pattern and kinds == ["Split"] and steps[0]["behavior"] == "Isolated":
        name = _NAMES.get(steps[0]["pattern"].get("Regex"))
    # llama.cpp takes whole words that are tokens, without merging them, where the name says so.
    if name is None or (name == "llama-bpe") != bool(content["model"].get("ignore_merges")):
        return None
    return TokenizerKind(BYTE_PAIRS, name)


def _of_pieces(content: dict[str, Any]) -> TokenizerKind | None:
    """Returns the kind of a tokenizer that was made of SentencePiece's: spaces become a letter, in
    the normalizer or in Metaspace, and merges may cross them.
    """
    if content["model"].get("ignore_merges"):
        return None
    normalizers = _steps(content.get("normalizer"), "normalizers")
    divided = _steps(content.get("pre_tokenizer"), "pretokenizers")
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    if normalizers in ([replaces], [prepends, replaces]):
        # Where no space is left, a split at spaces does nothing.
        if any(step["type"] != "Split" or step["pattern"] != {"String": " "} for step in divided):
            return None
        return TokenizerKind(PIECES, space="always" if prepends in normalizers else "never")
    if normalizers or [step["type"] for step in divided] != ["Metaspace"]:
        return None
    if divided[0].get("replacement") != SPACE or divided[0].get("split", True):
        return None
    return TokenizerKind(PIECES, space=divided[0].get("prepend_scheme", "always"))


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return step[name] if step.get("type") == "Sequence" else [step]
