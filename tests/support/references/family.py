"""A family of models: its chat template, its tokenizer's special tokens, and a slow writer.

A writer says in plain Python what the template writes, segment by segment: whose text it is, which
answer it belongs to, and whether it is a token or text. It shares nothing with `engine.data` and
runs no template engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Refused(Exception):
    """Nothing is trained of this conversation. Its text is a word of the reason."""

    def __init__(self, why: str = "refuses"):
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Segment:
    """A segment is a piece of a rendered conversation."""

    text: str
    answer: int | None = None
    """The place of the answer of which this is a part: what the model has to write."""
    says: int | None = None
    """The place of the message whose text this is."""
    written: bool = False
    """It is true for a token, as the template wrote it or as it is one in an answer."""


class Page:
    """A page collects the segments that a writer writes."""

    def __init__(self, family: Family):
        self.family = family
        self.parts: list[Segment] = []

    def wrote(self, text: str, answer: int | None = None) -> None:
        """Writes text of the template: control tokens in it are tokens."""
        self._add(text, (*self.family.special, *self.family.added), answer, None)

    def said(self, text: str, place: int | None, answer: bool = False) -> None:
        """Writes what somebody said. In an answer added tokens are tokens, elsewhere only those
        that the template does not mention.
        """
        kept = [
            token for token in self.family.added if answer or token not in self.family.mentioned
        ]
        self._add(text, tuple(kept), place if answer else None, place)

    def _add(
        self, text: str, tokens: tuple[str, ...], answer: int | None, says: int | None
    ) -> None:
        longest = sorted(tokens, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest)) or '(?!)'})", text)
        self.parts += [
            Segment(piece, answer, says, written=bool(place % 2))
            for place, piece in enumerate(pieces)
        ]


Writer = Callable[[Page, list[dict[str, Any]], "list[Any] | None", bool], None]
"""It writes messages and tools on a page, with the generation prompt if the last argument says so.
Raises Refused where the template does.
"""


@dataclass(frozen=True)
class Family:
    """A family has a chat template, a writer that says the same, and a tokenizer."""

    name: str
    template: str
    write: Writer
    special: tuple[str, ...]
    bos: str | None
    eos: str
    pad: str | None = None
    added: tuple[str, ...] = ()
    """These added tokens are not special."""
    mentioned: tuple[str, ...] = ()
    """The template writes or compares with these of `added`."""
    pieces: str = "bytes"
    """How text becomes pieces: `bytes`, or as sentencepiece: `spaces` (a space is a character),
    `prefixed` (and one stands before each run of text), `first` (before the text's begin alone).
    """
    composed: bool = False
    """Text is normalized to NFC."""
    swallows: bool = False
    """Tokens <|...|> take the white space behind them."""
    calls: bool = False
    """The template writes tool calls."""
    thinks: bool = False
    """The template writes the reasoning of answers."""

    def page(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False
    ) -> list[Segment]:
        """Returns what the template writes for `messages`, with the generation prompt if
        `prompt`.
        """
        page = Page(self)
        self.write(page, messages, tools, prompt)
        return page.parts


def as_json(value: Any, indent: int | None = None) -> str:
    """Writes a value as chat templates do."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def alternate(messages: list[dict[str, Any]]) -> None:
    """Refuses turns at even places that are not the user's, and the user's at odd places."""
    for place, message in enumerate(messages):
        if (message["role"] == "user") != (place % 2 == 0):
            raise Refused
