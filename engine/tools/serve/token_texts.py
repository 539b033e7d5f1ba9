"""Single tokens as texts and bytes, for log-probabilities."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Returns a token as text. Part of a character is U+FFFD."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def bytes_of(self, token: int) -> list[int] | None:
        """Returns the bytes of a token, or None where the tokenizer does not tell them."""
        text = self.text(token)
        if INCOMPLETE not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if found := _BYTE.fullmatch(piece):
            return [int(found[1], 16)]
        known = _byte_of_letter()
        if all(letter in known for letter in piece):
            return [known[letter] for letter in piece]
        return None


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """Returns the byte of each letter in which byte-level BPE writes its tokens: a printable byte
    is its own letter, and the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
