"""Byte-level tokenizers (those of GPT-2, Qwen and Llama 3) divide a text by a pattern, and write
the bytes of each word as letters.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import Any

import numpy as np

from engine.data.dividing.automaton import Automaton, automaton_of
from engine.data.dividing.pattern import UnknownPattern
from engine.data.dividing.runs_first import Runs, in_pieces, read_runs
from engine.data.dividing.word_kernels import OTHER, UNTRIED

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""This pattern divides texts for a byte-level tokenizer that names no other."""
_NO_CHANGE = (None, {"type": "Sequence", "normalizers": []})
_TRIAL = "a?a? ?1?1 ?.?. \n?\n ?  ?'?s'?r'r?'?e'v?'?l'l? ??\t? \r?"
"""Each character is tried in the places of `?`."""


class ByteLevel:
    """A `ByteLevel` divides texts by a table made of the pattern. The table is tried with each
    character that comes up, among characters of other kinds.
    """

    cuts_at_added = False
    alone: frozenset[str] = frozenset()

    def __init__(self, pre_tokenizer: Any, automaton: Automaton, is_normalized: bool):
        """pre_tokenizer: that of the tokenizer, which is asked about characters. is_normalized: the
        tokenizer normalizes texts (NFC).
        """
        self._pre_tokenizer = pre_tokenizer
        self._automaton = automaton
        self._is_normalized = is_normalized
        self.table = automaton.table
        self.classes = np.full(len(automaton.class_of), UNTRIED, np.uint8)
        """The class of each character, as far as it has been tried."""

    @classmethod
    def of(cls, backend: Any, tree: dict[str, Any]) -> ByteLevel | None:
        """Returns it for a byte-level tokenizer whose pattern is understood, or None. `tree` is
        what the tokenizer's file holds.
        """
        try:
            automaton = _automaton_of(tree)
        except UnknownPattern:
            return None
        if automaton is None:
            return None
        return cls(backend.pre_tokenizer, automaton, tree["normalizer"] not in _NO_CHANGE)

    def written(self, text: str) -> str | None:
        """Returns what is divided in place of a text: here itself, or None where the tokenizer
        would change it.
        """
        if self._is_normalized and not unicodedata.is_normalized("NFC", text):
            return None
        return text

    def spelled(self, word: str) -> str:
        """Returns a word as the tokenizer's model takes it."""
        return as_letters(word)

    def is_alike(self, character: str) -> bool:
        """Returns whether the table divides a text with a character as the tokenizer does, tries it
        if nobody has, and keeps what came of it.
        """
        code = ord(character)
        if self.classes[code] == UNTRIED:
            trial = _TRIAL.replace("?", character)
            there = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(trial)]
            is_alike = list(map(as_letters, self._automaton.words(trial))) == there
            self.classes[code] = self._automaton.class_of[code] if is_alike else OTHER
        return bool(self.classes[code] < OTHER)


def as_letters(word: str) -> str:
    """Returns the bytes of a word in the letters of byte-level tokenizers."""
    return word.encode().decode("latin-1").translate(_letters_of_bytes())


@functools.cache
def _letters_of_bytes() -> dict[int, int]:
    """Returns the letters for the bytes that are not written as the characters of their number."""
    others = [*range(33), *range(127, 161), 173]
    return {byte: 256 + place for place, byte in enumerate(others)}


def _automaton_of(tree: dict[str, Any]) -> Automaton | None:
    """Returns the automaton of a byte-level tokenizer, or None for any other. Raises UnknownPattern
    if its patterns are not understood.
    """
    steps = tree["pre_tokenizer"] or {}
    *before, last = steps.get("pretokenizers", [steps])
    is_byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if not is_byte_level or tree["normalizer"] not in (*_NO_CHANGE, {"type": "NFC"}):
        return None
    pattern = _GPT2
    if not last["use_regex"]:
        if not before:
            return None
        pattern = _of_split(before.pop())
    return in_pieces(automaton_of(pattern), [_runs_of(step) for step in before])


def _runs_of(step: dict[str, Any]) -> Runs:
    if step["type"] == "Digits":
        return read_runs(r"\p{N}" if step["individual_digits"] else r"\p{N}+")
    return read_runs(_of_split(step))


def _of_split(step: dict[str, Any]) -> str:
    """Returns the pattern by which a step divides. Raises UnknownPattern if it does more."""
    is_isolated = step.get("behavior") == "Isolated" and not step.get("invert")
    if not is_isolated or "Regex" not in step["pattern"]:
        raise UnknownPattern(str(step))
    pattern: str = step["pattern"]["Regex"]
    return pattern
