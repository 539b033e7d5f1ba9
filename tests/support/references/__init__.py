"""Families' chat templates and tokenizers with their real special tokens, and a slow reference for
each.

A reference writes a conversation as segments of its own (no template engine), says which documents
it must become, tokenizes what stands between special tokens piece by piece, and finds the bytes of
each token by its spelling: nothing in it is shared with `engine.data`.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tests.support.references import chatml, headers, instructions
from tests.support.references.family import Family
from tests.support.references.tokenizers_of_families import made_tokenizer

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*chatml.FAMILIES, *headers.FAMILIES, *instructions.FAMILIES)
}
INVENTED = ("qwen", "marked")
"""These two are no model's own: an abridged Qwen, and role markers that are not special."""


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Returns a family's tokenizer, made anew."""
    return made_tokenizer(FAMILIES[family])
