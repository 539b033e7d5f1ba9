"""Tokenizers of the kinds that llama.cpp reads, with a chat template."""

from __future__ import annotations

import json

from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.support.data_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

PATTERNS = {
    name: rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, digits in (("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}"))
}
"""Of the tokenizer.json of Qwen 2 and Llama 3."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def known_tokenizer(divided_by):
    """A tokenizer that llama.cpp knows."""
    tokenizer = byte_level_tokenizer(TEMPLATE)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[divided_by]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = divided_by == "llama-bpe"
    return tokenizer


def pieces_tokenizer(space):
    """A tokenizer that was made of SentencePiece's, which puts a space before texts: `always`, as
    Llama 2 does, at the `first` letter alone, or `never`, as Gemma does.
    """
    tokenizer = sentencepiece_tokenizer(TEMPLATE, legacy=True)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    model |= {"byte_fallback": True, "fuse_unk": True}
    ids = model["vocab"]
    ids.update({added["content"]: added["id"] for added in content["added_tokens"]})
    ids.update({f"<0x{code:02X}>": len(ids) + code for code in range(256)})
    if space == "never":
        content["normalizer"] = content["normalizer"]["normalizers"][1]
    if space == "first":
        content["normalizer"] = None
        content["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        }
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer
