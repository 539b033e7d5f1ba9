"""`TextTokens` tokenizes texts, in bounded memory and whatever a text holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.formats.example import Text
from engine.data.sources.text_files import CONTEXT, cut_place
from engine.data.tokens.render import ChatRenderer

Encoding = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the characters [start, end) that each token covers."""
_FEWEST_CHARACTERS = 1 << 16
_CHARACTERS_A_TOKEN = 16
"""Characters per token above which more of a text must be read."""
_MARGIN = 64
"""Number of last tokens of a text that was cut which may differ from those of the whole text."""
_LONGEST_PIECE = 1 << 14
"""Largest number of characters of a chunk in which a whole text is tokenized."""
_AT_ONCE = 1 << 18
"""Number of characters of whole texts that the tokenizer is given at a time."""


def no_pause() -> None:
    """Does nothing between two parts of a text, for work that nobody follows."""


@dataclass(frozen=True)
class Piece:
    """Piece of a text, with the characters around it, so that its tokens are those that it has in
    the text.
    """

    before: str
    text: str
    after: str

    @property
    def with_context(self) -> str:
        return self.before + self.text + self.after


class TextTokens:
    """Tokenizes texts with `tokenizer`, as far as a document of `max_seq_len` tokens needs them.

    A tokenizer takes some 200 bytes of memory for each character. So of a text that is much longer
    than a row, only what fills the row is tokenized.
    """

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, max_seq_len: int):
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._enough = max_seq_len + _MARGIN
        self._most = max(_FEWEST_CHARACTERS, _CHARACTERS_A_TOKEN * max_seq_len)

    def plain(self, texts: list[str]) -> list[Encoding | None]:
        """Returns the tokens of as much of each text as fills a row, or None where the tokenizer
        fails. A single call for many texts lets the library use several threads.
        """
        found: list[Encoding | None] = [None] * len(texts)
        is_long = [len(text) > self._most for text in texts]
        at_once = [place for place, long in enumerate(is_long) if not long]
        for place, encoding in zip(at_once, self._call([texts[place] for place in at_once])):
            found[place] = encoding
        for place, text in enumerate(texts):
            if is_long[place]:
                found[place] = self._beginning(text, self._plainly)
        return found

    def whole(
        self, texts: list[Text], pause: Callable[[], None] = no_pause
    ) -> list[np.ndarray | None]:
        """Returns all tokens of each text, int32[T], or None where the tokenizer fails. They are
        the tokens that the tokenizer gives for the text as one, as long as no word of it (what the
        tokenizer divides a text into) is longer than `CONTEXT` characters; at longer words a text
        may be divided, and nothing of it is lost.

        `pause` is called after every `_AT_ONCE` characters; if it raises an exception, the work
        ends.
        """
        found: list[list[np.ndarray] | None] = [[] for _ in texts]
        waiting: list[tuple[int, Piece]] = []
        characters = 0
        for place, text in enumerate(texts):
            for piece in pieces(text):
                waiting.append((place, piece))
                characters += len(piece.text)
                if characters >= _AT_ONCE:
                    self._read(waiting, found)
                    pause()
                    waiting, characters = [], 0
        self._read(waiting, found)
        return list(map(_joined, found))

    def _read(self, waiting: list[tuple[int, Piece]], found: list[list[np.ndarray] | None]) -> None:
        """Adds the tokens of each piece to those of its text. A single call for all pieces lets the
        library use several threads.
        """
        encodings = self._encodings([piece.with_context for _, piece in waiting])
        for (place, piece), encoding in zip(waiting, encodings):
            ids = self._own(piece, encoding)
            of_text = found[place]
            if ids is None:
                found[place] = None
            elif of_text is not None:
                of_text.append(ids)

    def _own(self, piece: Piece, encoding: Any) -> np.ndarray | None:
        """Returns the tokens of the piece itself, int32[T]: those that begin in it. Where a token
        reaches over one of its ends, it is tokenized without what is beyond, so that its tokens
        are all of its characters and no others.
        """
        while encoding is not None:
            first = len(piece.before)
            begin, clean_begin = _border(encoding, first, range(len(encoding)))
            last = first + len(piece.text)
            end, clean_end = _border(encoding, last, range(len(encoding) - 1, -1, -1))
            if piece.before and not clean_begin:
                piece = Piece("", piece.text, piece.after)
            elif piece.after and not clean_end:
                piece = Piece(piece.before, piece.text, "")
            else:
                own = slice(begin if piece.before else None, end if piece.after else None)
                return np.asarray(encoding.ids[own], dtype=np.int32)
            (encoding,) = self._encodings([piece.with_context])
        return None

    def typed(self, text: str) -> Encoding | None:
        """Returns the tokens of as much of a text with stand-ins (`special.py`) as fills a row, or
        None where the tokenizer fails.
        """
        return self._beginning(text, self._with_placeholders)

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

    def _with_placeholders(self, text: str) -> Encoding | None:
        try:
            return self._renderer.control.encode(text)
        except BaseException as error:
            if not _is_panic(error):
                raise
            return None

    def _call(self, texts: list[str]) -> list[Encoding | None]:
        return list(map(_with_offsets, self._encodings(texts)))

    def _encodings(self, texts: list[str]) -> list[Any | None]:
        """Returns what the tokenizers library gives for each text, or None where it fails."""
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
            return [self._encodings([text])[0] for text in texts]
        return list(batch.encodings)


def _with_offsets(encoding: Any | None) -> Encoding | None:
    return None if encoding is None else (encoding.ids, encoding.offsets)


def _joined(ids: list[np.ndarray] | None) -> np.ndarray | None:
    """Returns the tokens of all pieces of a text, int32[T], or None where the tokenizer failed."""
    if ids is not None and len(ids) == 1:
        return ids[0]
    return None if ids is None else np.concatenate([np.empty(0, np.int32), *ids])


def _border(encoding: Any, place: int, tokens: range) -> tuple[int, bool]:
    """Returns the first token that begins at the character `place` or behind it, and whether no
    token reaches over that place. `tokens` are all tokens, from the end that is nearer to it. Some
    tokenizers trim white space from the bounds, so a token begins where the one before it ends.
    """
    is_clean = True
    found = 0 if tokens.step < 0 else len(tokens)
    for token in tokens:
        begin, end = encoding.token_to_chars(token)
        if token:
            begin = min(begin, encoding.token_to_chars(token - 1)[1])
        is_clean &= not begin < place < end
        if tokens.step > 0 and begin >= place:
            return token, is_clean
        if tokens.step < 0 and begin < place:
            return token + 1, is_clean
    return found, is_clean


def _is_panic(error: BaseException) -> bool:
    """Returns whether the tokenizers library failed in Rust. Its error is no `Exception`, and its
    class can only be known by name.
    """
    return type(error).__name__ == "PanicException"


def pieces(text: Text) -> Iterator[Piece]:
    """Divides a text into pieces of at most `_LONGEST_PIECE` characters, between words if it can
    (`cut_place`).
    """
    whole, before = text.text, text.before
    begin = 0
    while len(whole) - begin > _LONGEST_PIECE:
        end = cut_place(whole, begin, begin + _LONGEST_PIECE)
        after = (whole[end : end + CONTEXT] + text.after)[:CONTEXT]
        yield Piece(before, whole[begin:end], after)
        before = whole[max(0, end - CONTEXT) : end]
        begin = end
    yield Piece(before, whole[begin:], text.after)
