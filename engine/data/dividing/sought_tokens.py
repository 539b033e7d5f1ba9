"""A tokenizer looks for added tokens before it divides a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


class AddedTokens:
    """An `AddedTokens` finds added tokens in a text."""

    def __init__(self, tokens: Sequence[dict[str, Any]], alone: Collection[str] = ()):
        """tokens: as the tokenizer's file has them. alone: runs of these characters are not looked
        for.
        """
        sought = [token for token in tokens if token["content"][:1] not in alone]
        contents = sorted((token["content"] for token in sought), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        """Where several begin, the tokenizer takes the longest."""
        self._firsts = sorted({content[:1] for content in contents})
        self.plain = {token["content"]: token["id"] for token in sought if _is_plain(token)}
        """These are looked for in the text as it stands, and take nothing of what is around."""

    def are_in(self, text: str) -> bool:
        """Returns whether any of them is in a text."""
        if not any(first in text for first in self._firsts):
            return False
        return self.pattern.search(text) is not None


def alone_in(tokens: Sequence[dict[str, Any]]) -> frozenset[str]:
    """Returns the characters, of ASCII and no space, that added tokens consist of alone: each token
    in which such a character is, is plain and a run of it. Lines are such tokens with Gemma.
    """
    runs: set[str] = set()
    others = {" "}
    for token in tokens:
        letters = set(token["content"])
        is_run = len(letters) == 1 and _is_plain(token)
        (runs if is_run else others).update(letters)
    return frozenset(letter for letter in runs - others if letter.isascii())


def _is_plain(token: dict[str, Any]) -> bool:
    return not any(token[flag] for flag in _FLAGS)
