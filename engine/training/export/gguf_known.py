"""The families and tokenizers of which there are GGUF files. This needs no torch."""

from __future__ import annotations

from typing import Any

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's names for model types of transformers."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLITS = {
    _CONTRACTIONS + _WORDS + r"|\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST: "llama-bpe",
}
"""llama.cpp's names for the patterns that divide a text (llama-vocab.cpp)."""
OTHER_TOKENIZER = (
    "llama.cpp does not divide texts as this model's tokenizer does, so there is no GGUF file of "
    "it. Export a folder. SmolLM2, Qwen2.5, Qwen3 and Llama 3 can be GGUF files."
)


def divided_by_name(content: dict[str, Any]) -> str | None:
    """Returns llama.cpp's name for how a tokenizer divides a text, or None if it would read a text
    otherwise. content: of tokenizer.json.
    """
    model = content["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        return None
    outer = content.get("pre_tokenizer") or {}
    steps = outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
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
        name = _SPLITS.get(steps[0]["pattern"].get("Regex"))
    # llama.cpp takes whole words that are tokens, without merging them, where the name says so.
    return name if (name == "llama-bpe") == bool(model.get("ignore_merges")) else None
