"""`TextTokens` tokenises texts, in bounded memory and whatever a text holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.data.render import ChatRenderer

Encoding = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the characters [start, end) that each token covers."""
_FEWEST_CHARACTERS = 1 << 16
_CHARACTERS_A_TOKEN = 16
"""A text has fewer characters per token than this, or more of it must be read."""
_MARGIN = 64
"""The last tokens of a text that was cut may differ from those of the whole text."""
PIECE = 1 << 17
"""A text that continues from row to row is tokenised in pieces of at most so many characters."""


class TextTokens:
    """Tokenises texts with `tokenizer`, as far as a document of `max_seq_len` tokens needs them.

    A tokenizer takes some 200 bytes of memory for each character. So of a text that is much longer
    than a row, only as much is tokenised as fills the row.
    """

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, max_seq_len: int):
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._enough = max_seq_len + _MARGIN
        self._most = max(_FEWEST_CHARACTERS, _CHARACTERS_A_TOKEN * max_seq_len)

    def plain(self, texts: list[str], to_the_end: list[bool]) -> list[Encoding | None]:
        """Returns the tokens of each text, or None where the tokenizer fails: of all of the text
        where `to_the_end` says so, otherwise of as much as fills a row. A single call for many
        texts lets the library use several threads.
        """
        found: list[Encoding | None] = [None] * len(texts)
        is_long = [len(text) > self._most and not whole for text, whole in zip(texts, to_the_end)]
        at_once = [place for place, long in enumerate(is_long) if not long]
        for place, encoding in zip(at_once, self._call([texts[place] for place in at_once])):
            found[place] = encoding
        for place, text in enumerate(texts):
            if is_long[place]:
                found[place] = self._beginning(text, self._plainly)
        return found

    def typed(self, text: str) -> Encoding | None:
        """Returns the tokens of as much of a text with stand-ins (`special.py`) as fills a row, or
        None where the tokenizer fails.
        """
        return self._beginning(text, self._with_stand_ins)

    def _beginning(self, text: str, read: Any) -> Encoding | None:
        """Returns the tokens of as much of a text as fills a row."""
        characters = self._most
        while True:
            encoding = read(text[:characters])
            if encoding is None or characters >= len(text) or len(encoding[0]) >= self._enough:
                return encoding
            characters *= 2

    def _plainly(self, text: str) -> Encoding | None:
        return self._call([text])[0]

    def _with_stand_ins(self, text: str) -> Encoding | None:
        try:
            return self._renderer.control.encode(text)
        except BaseException as error:
            if not _is_panic(error):
                raise
            return None

    def _call(self, texts: list[str]) -> list[Encoding | None]:
        if not texts:
            return []
        try:
            batch = self._tokenizer(
                texts, add_special_tokens=False, split_special_tokens=False, verbose=False
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            if len(texts) == 1:
                return [None]
            return [self._call([text])[0] for text in texts]
        return [(encoding.ids, encoding.offsets) for encoding in batch.encodings]


def _is_panic(error: BaseException) -> bool:
    """Returns whether the tokenizers library failed in Rust. Its error is no `Exception`, and its
    class can only be known by name.
    """
    return type(error).__name__ == "PanicException"


def pieces(text: str) -> Iterator[str]:
    """Divides a text into pieces of at most `PIECE` characters, at line ends or spaces where there
    are some. No token reaches from one piece into the next.
    """
    begin = 0
    while len(text) - begin > PIECE:
        least, most = begin + PIECE // 2, begin + PIECE
        # `rfind` returns -1 where there is none, so the sum is then 0.
        end = 1 + text.rfind("\n", least, most) or 1 + text.rfind(" ", least, most) or most
        yield text[begin:end]
        begin = end
    yield text[begin:]
