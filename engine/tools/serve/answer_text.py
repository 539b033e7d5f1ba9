"""The text of an answer as its tokens arrive: whole characters, up to the first stop text.

Text that may still become a stop text is held back until the next tokens decide. This module does
not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INCOMPLETE = "\ufffd"
MOST_PENDING = 8
"""Tokens after which text is taken as it is: a character has at most 4 bytes, so these are none of
one.
"""


class GrowingText:
    """Turns tokens into text, a few at a time. Reading all tokens again each time would take ever
    longer.
    """

    def __init__(self, tokenizer: Any):
        # The library around it takes ten times as long, and adds only this cleaning.
        is_cleaned = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._decode = (tokenizer if is_cleaned else tokenizer.backend_tokenizer).decode
        self._ids: list[int] = []
        # Tokenizers write a token by what stands before it, so each reading begins with the tokens
        # of the piece before.
        self._begin = self._read = 0

    def add(self, token: int) -> str:
        """Returns the text that is certain with this token; it may be empty."""
        self._ids.append(token)
        text = self._unread()
        is_pending = text.endswith(INCOMPLETE) and len(self._ids) - self._read < MOST_PENDING
        if not text or is_pending:
            return ""
        return self._taken(text)

    def rest(self) -> str:
        """Returns what is left at the end of the answer, without an incomplete last character."""
        return self._taken(self._unread().rstrip(INCOMPLETE))

    def _unread(self) -> str:
        before = self._decoded(self._ids[self._begin : self._read])
        return self._decoded(self._ids[self._begin :])[len(before) :]

    def _taken(self, text: str) -> str:
        self._begin, self._read = self._read, len(self._ids)
        if self._begin > 1024:
            self._ids = self._ids[self._begin :]
            self._begin, self._read = 0, self._read - self._begin
        return text

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._decode(ids, skip_special_tokens=True) if ids else ""
        return text


@dataclass
class Piece:
    """What an answer gains: text that can be shown, and how many of its tokens begin in the text
    that was shown so far.
    """

    text: str
    tokens: int
    finish: str | None = None
    """Why the answer is over: "stop" or "length". None while it goes on."""


class AnswerText:
    """One answer's text, which ends before the first of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._growing = GrowingText(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        """Text that is not shown yet: it may be the beginning of a stop text."""
        self._shown = 0
        self._starts: list[int] = []
        """Where each token begins in the text."""
        self._begun = 0
        """Number of tokens that begin in the text that was shown."""
        self._length = 0

    def add(self, token: int) -> Piece:
        """Takes a token of the answer."""
        self._starts.append(self._length)
        text = self._growing.add(token)
        self._length += len(text)
        self._held += text
        end = self._first_stop()
        if end is not None:
            return self._cut(end)
        return self._show(len(self._held) - self._may_be_stop())

    def end(self, finish: str) -> Piece:
        """Ends the answer after its last token."""
        self._held += self._growing.rest()
        stop = self._first_stop()
        if stop is not None:
            return self._cut(stop)
        piece = self._show(len(self._held))
        return Piece(piece.text, len(self._starts), finish)

    def starts(self, first: int, last: int) -> list[int]:
        """Returns where the tokens from number `first` to before `last` begin in the text."""
        return self._starts[first:last]

    def _first_stop(self) -> int | None:
        """Returns where the first stop text begins in the text that is held."""
        places = [self._held.find(stop) for stop in self._stops]
        found = [place for place in places if place >= 0]
        return min(found) if found else None

    def _may_be_stop(self) -> int:
        """Returns how many of the last characters are the beginning of a stop text."""
        most = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), most, -1):
                if self._held.endswith(stop[:size]):
                    most = size
                    break
        return most

    def _cut(self, end: int) -> Piece:
        piece = self._show(end)
        return Piece(piece.text, piece.tokens, "stop")

    def _show(self, size: int) -> Piece:
        text, self._held = self._held[:size], self._held[size:]
        self._shown += len(text)
        while self._begun < len(self._starts) and self._starts[self._begun] < self._shown:
            self._begun += 1
        return Piece(text, self._begun)
