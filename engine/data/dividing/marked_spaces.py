"""Tokenizers made by SentencePiece (those of Llama 2, Mistral 7B and Gemma) write a space as `▁`
and take a text as one word. They join its characters pair by pair.

Where no merge of the vocabulary joins a part that ends with one character to a part that begins
with another, no token ever reaches over a border between these two. So a text may be divided at
such borders, and its tokens are those of its parts, to the last one. With the vocabularies of
published models, that is nearly everywhere between letters and signs, and before each space.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.dividing.automaton import DEAD, ENDS, START
from engine.data.dividing.pattern import categories
from engine.data.dividing.sought_tokens import alone_in
from engine.data.dividing.word_kernels import OTHER

SPACE = "▁"
_ASCII = 128
_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_BEFORE_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
"""It finds no spaces, since all of them are replaced before."""
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""A character that the vocabulary lacks becomes the tokens of its bytes."""


@dataclass(frozen=True)
class _Prefix:
    """A space comes before each text."""

    always: bool
    """It comes also before a text that begins with one."""


class MarkedSpaces:
    """A `MarkedSpaces` divides texts between characters that no merge joins. Characters beyond
    ASCII are told apart by their category alone, which makes longer parts and never shorter ones.
    """

    def __init__(
        self, merges: list[list[str]], prefix: _Prefix | None, alone: frozenset[str] = frozenset()
    ):
        """merges: the pairs of parts that the tokenizer joins. alone: a run of one of these
        characters is a word, whatever merges join (`alone_in`).
        """
        self._prefix = prefix
        self.alone = alone
        self.cuts_at_added = prefix is None
        """Each part of a text between added tokens is a text by itself, without a space before."""
        class_of = _classes()
        self.classes = class_of.copy()
        self.classes[0xD800:0xE000] = OTHER  # halves of characters are no text
        joined = _joined(merges, class_of)
        for code in map(ord, alone):
            joined[code] = joined[:, code] = False
            joined[code, code] = True
        self.table = _table(joined)

    @classmethod
    def of(cls, tree: dict[str, Any]) -> MarkedSpaces | None:
        """Returns it for a tokenizer that works like this, or None. `tree` is what the tokenizer's
        file holds.
        """
        model = tree["model"]
        if not model.get("byte_fallback") or model.get("ignore_merges"):
            return None
        found, prefix = _prefix_of(tree["normalizer"], tree["pre_tokenizer"])
        if not found or not model["vocab"].keys() >= _BYTES:
            return None
        if not _BYTES.isdisjoint(itertools.chain.from_iterable(model["merges"])):
            return None
        # These would be looked for in the text with marks.
        written = [token["content"] for token in tree["added_tokens"] if token["normalized"]]
        if any(space in content for content in written for space in (" ", SPACE)):
            return None
        alone = alone_in(tree["added_tokens"]) if prefix is None else frozenset()
        return cls(model["merges"], prefix, alone)

    def written(self, text: str) -> str | None:
        """Returns a text with its spaces as the tokenizer writes them, and with the space before it
        if it gets one.
        """
        marked = text.replace(" ", SPACE)
        prefix = self._prefix
        if prefix is None or not marked or (marked.startswith(SPACE) and not prefix.always):
            return marked
        return SPACE + marked

    def spelled(self, word: str) -> str:
        """Returns a word as the tokenizer's model takes it."""
        return word

    def is_alike(self, character: str) -> bool:
        """Returns whether a text with this character may be divided."""
        return bool(self.classes[ord(character)] < OTHER)


def _prefix_of(normalizer: Any, pre_tokenizer: Any) -> tuple[bool, _Prefix | None]:
    """Returns whether all that both do is to mark spaces, and which space comes before a text."""
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    if steps:
        does_nothing = pre_tokenizer in (None, _BEFORE_SPACES)
        prefix = _Prefix(always=True) if steps[0] == _PREPEND else None
        return does_nothing and steps[bool(prefix) :] == [_TO_MARKS], prefix
    marks = pre_tokenizer or {}
    is_whole = marks.get("type") == "Metaspace" and not marks["split"]
    if not is_whole or marks["replacement"] != SPACE:
        return False, None
    return True, None if marks["prepend_scheme"] == "never" else _Prefix(always=False)


@functools.cache
def _classes() -> np.ndarray:
    """Returns a number for each character: its own in ASCII and for `▁`, one for its category
    elsewhere, uint8[CODES].
    """
    _, number = np.unique(categories(), return_inverse=True)
    found = (_ASCII + 1 + number.reshape(-1)).astype(np.uint8)
    found[:_ASCII] = np.arange(_ASCII)
    found[ord(SPACE)] = _ASCII
    return found


def _joined(merges: list[list[str]], class_of: np.ndarray) -> np.ndarray:
    """Returns whether any merge joins a part that ends with a character of one class to a part that
    begins with one of another, bool[classes, classes].
    """
    count = int(class_of.max()) + 1
    found = np.zeros((count, count), bool)
    borders = {(one[-1], other[0]) for one, other in merges}
    for last, first in borders:
        found[class_of[ord(last)], class_of[ord(first)]] = True
    return found


def _table(joined: np.ndarray) -> np.ndarray:
    """Returns the table of an automaton (`Automaton.table`) whose state is the class of the last
    character.
    """
    count = len(joined)
    first = START + 1
    following = np.arange(first, first + count, dtype=np.int16)
    table = np.full((first + count, count + 1), DEAD, np.int16)
    table[START, :count] = following
    table[first:, :count] = np.where(joined, following, DEAD | ENDS)
    table[first:, count] = DEAD | ENDS
    return table
