"""`WordTokens` looks up the tokens of a text word by word."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Collection
from typing import Any

import numpy as np

from engine.dividing.automaton import Automaton, automaton_of
from engine.dividing.pattern import UnknownPattern
from engine.dividing.piece import Piece
from engine.dividing.word_kernels import OTHER, STOPPED, UNTRIED, kernel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""This pattern divides texts for a byte-level tokenizer that names no other."""
_TRIAL = "a?a? ?1?1 ?.?. \n?\n ?  ?'?s'?r'r?'?e'v?'?l'l? ??\t? \r?"
"""Each character is tried in the places of `?`."""
_MOST_WORDS = 1 << 18
_MOST_VALUES = 1 << 23
"""So many words, and characters and tokens of them, are kept at most."""
_FEWEST_SLOTS = 1 << 12


class WordTokens:
    """A `WordTokens` looks up the tokens of a text word by word, in a small part of the time that
    the tokenizer takes.

    A byte-level tokenizer divides a text into words by a pattern, and makes tokens of each word by
    itself. Here the text is divided by a table made of the pattern, and the tokenizer is asked once
    for each different word. The table is tried with each character that comes up, among characters
    of other kinds. A text with a character at which it divides otherwise is left to the tokenizer,
    and so is a text with special tokens.
    """

    def __init__(self, backend: Any, automaton: Automaton, tree: dict[str, Any]):
        self._backend = backend
        self._automaton = automaton
        self._normalized = tree["normalizer"] is not None
        added = [token["content"] for token in tree["added_tokens"]]
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self._first_of_added = sorted({text[:1] for text in added})
        self._classes = np.full(len(automaton.class_of), UNTRIED, np.uint8)
        """The class of each character, as far as it has been tried."""
        self._known = KnownWords(backend.model)
        self._ids = np.empty(0, np.int32)
        self._unknown = np.empty((0, 3), np.int64)

    @classmethod
    def of(cls, backend: Any) -> WordTokens | None:
        """Returns it for a tokenizer of the tokenizers library, or None for one that does not work
        like this.
        """
        tree = json.loads(backend.to_str())
        pattern = _pattern_of(tree)
        if pattern is None:
            return None
        try:
            return cls(backend, automaton_of(pattern), tree)
        except UnknownPattern:
            return None

    def of_piece(self, piece: Piece) -> np.ndarray | None:
        """Returns the tokens of the piece itself, int32[T], or None where the tokenizer must be
        asked.
        """
        text = piece.with_context
        is_normalized = not self._normalized or unicodedata.is_normalized("NFC", text)
        if not is_normalized or self._has_added(text):
            return None
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        own = (len(piece.before), len(text) - len(piece.after))
        if len(self._unknown) < len(text):
            self._unknown = np.empty((len(text), 3), np.int64)
        return self._tokens(codes, text, own)

    def _tokens(self, codes: np.ndarray, text: str, own: tuple[int, int]) -> np.ndarray | None:
        """Returns the tokens of the words of `text` (its `codes` are uint32[characters]) between
        two places, int32[T], or None.
        """
        most = len(codes) * 4  # a character has at most four bytes, and a token at least one
        if len(self._ids) < most:
            self._ids = np.empty(most, np.int32)
        automaton = (self._classes, self._automaton.table)
        while True:
            out = (self._ids, self._unknown)
            state, count, unknown = kernel("divided")(codes, own, automaton, self._known.all, out)
            if state == STOPPED and self._is_alike(text[count]):
                continue
            if state:
                return None
            return self._with_unknown(text, count, self._unknown[:unknown].tolist())

    def _with_unknown(self, text: str, count: int, places: list[list[int]]) -> np.ndarray:
        """Returns the tokens that the kernel has found, and those of the unknown words of `text`
        between them, int32[T]. The words become known.
        """
        if not places:
            return self._ids[:count].copy()
        ids_of = self._known.add(dict.fromkeys(text[begin:end] for begin, end, _ in places))
        found, last = [], 0
        for begin, end, before in places:
            found += [self._ids[last:before], ids_of[text[begin:end]]]
            last = before
        return np.concatenate([*found, self._ids[last:count]])

    def _has_added(self, text: str) -> bool:
        if not any(first in text for first in self._first_of_added):
            return False
        return self._added.search(text) is not None

    def _is_alike(self, character: str) -> bool:
        """Returns whether the table divides a text with a character as the tokenizer does, tries it
        if nobody has, and keeps what came of it.
        """
        code = ord(character)
        if self._classes[code] == UNTRIED:
            trial = _TRIAL.replace("?", character)
            there = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(trial)]
            is_alike = list(map(as_letters, self._automaton.words(trial))) == there
            self._classes[code] = self._automaton.class_of[code] if is_alike else OTHER
        return bool(self._classes[code] < OTHER)


class KnownWords:
    """A `KnownWords` keeps the words that have come up, with the tokens that `model` makes."""

    def __init__(self, model: Any):
        self._model = model
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._used = 1  # a slot with 0 is free
        self._slots = np.zeros(_FEWEST_SLOTS, np.int32)
        self._records = np.zeros(1 << 16, np.uint32)

    def __len__(self) -> int:
        return self._count

    @property
    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots, int32[slots], and the records, uint32[values], of all words."""
        return self._slots, self._records

    def add(self, words: Collection[str]) -> dict[str, np.ndarray]:
        """Adds words that are not known and differ from each other, and returns the tokens of each,
        int32[T].
        """
        values: list[int] = []
        ids_of: dict[str, np.ndarray] = {}
        for word in words:
            ids = [token.id for token in self._model.tokenize(as_letters(word))]
            values += (len(word), len(ids), *map(ord, word), *ids)
            ids_of[word] = np.array(ids, np.int32)
        if self._count + len(words) > _MOST_WORDS or self._used + len(values) > _MOST_VALUES:
            self._clear()
        first, self._used = self._used, self._used + len(values)
        if self._used > len(self._records):
            self._records = np.resize(self._records, 2 * self._used)
        self._records[first : self._used] = values
        self._count += len(words)
        if 4 * self._count > len(self._slots):
            self._slots = np.zeros(4 << self._count.bit_length(), np.int32)
            first = 1
        kernel("placed")(self.all, first, self._used)
        return ids_of


def as_letters(word: str) -> str:
    """Returns the bytes of a word in the letters of byte-level tokenizers."""
    return word.encode().decode("latin-1").translate(_letters_of_bytes())


@functools.cache
def _letters_of_bytes() -> dict[int, int]:
    """Returns the letters for the bytes that are not written as the characters of their number."""
    others = [*range(33), *range(127, 161), 173]
    return {byte: 256 + place for place, byte in enumerate(others)}


def _pattern_of(tree: dict[str, Any]) -> str | None:
    """Returns the pattern of a byte-level tokenizer, or None for any other. `tree` is what its file
    holds.
    """
    model, steps = tree["model"], tree["pre_tokenizer"] or {}
    changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model.get(name) for name in changes):
        return None
    *before, last = steps.get("pretokenizers", [steps])
    is_byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if not is_byte_level or tree["normalizer"] not in (None, {"type": "NFC"}):
        return None
    if not before:
        return _GPT2 if last["use_regex"] else None
    split = before[0]
    is_isolated = split.get("behavior") == "Isolated" and not split.get("invert")
    if len(before) > 1 or last["use_regex"] or not is_isolated:
        return None
    return split["pattern"].get("Regex")
