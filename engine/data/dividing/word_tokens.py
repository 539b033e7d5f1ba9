"""`WordTokens` looks up the tokens of a text word by word."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from engine.data.dividing.byte_level import ByteLevel
from engine.data.dividing.marked_spaces import MarkedSpaces
from engine.data.dividing.piece import Piece
from engine.data.dividing.sought_tokens import AddedTokens
from engine.data.dividing.word_kernels import STOPPED, kernel

_MOST_WORDS = 1 << 18
_MOST_VALUES = 1 << 23
"""So many words, and characters and tokens of them, are kept at most."""
_FEWEST_SLOTS = 1 << 12


class WordTokens:
    """A `WordTokens` looks up the tokens of a text word by word, in a small part of the time that
    the tokenizer takes.

    A tokenizer makes tokens of each word by itself, whatever it takes for a word. Here the text is
    divided by a table, and the tokenizer is asked once for each different word. Texts that the
    tokenizer may divide otherwise are left to it, and so are texts with special tokens.
    """

    def __init__(self, backend: Any, division: ByteLevel | MarkedSpaces, added: AddedTokens):
        self._backend = backend
        self._division = division
        self._added = added
        self._known = KnownWords(self._ids_of)
        self._ids = np.empty(0, np.int32)
        self._unknown = np.empty((0, 3), np.int64)

    @classmethod
    def of(cls, backend: Any) -> WordTokens | None:
        """Returns it for a tokenizer of the tokenizers library, or None for one that does not work
        like this.
        """
        tree = json.loads(backend.to_str())
        model = tree["model"]
        changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model["type"] != "BPE" or any(model.get(name) for name in changes):
            return None
        division = ByteLevel.of(backend, tree) or MarkedSpaces.of(tree)
        if division is None:
            return None
        return cls(backend, division, AddedTokens(tree["added_tokens"], division.alone))

    def _ids_of(self, word: str) -> list[int]:
        """Returns the tokens that the tokenizer makes of a word."""
        if word[0] in self._division.alone:
            ids: list[int] = self._backend.encode(word, add_special_tokens=False).ids
            return ids
        return [token.id for token in self._backend.model.tokenize(self._division.spelled(word))]

    def of_piece(self, piece: Piece) -> np.ndarray | None:
        """Returns the tokens of the piece itself, int32[T], or None where the tokenizer must be
        asked.
        """
        text = piece.with_context
        own = (len(piece.before), len(text) - len(piece.after))
        if not self._added.are_in(text):
            return self._between_added(text, own)
        return self._around_added(text, own) if self._division.cuts_at_added else None

    def _around_added(self, text: str, own: tuple[int, int]) -> np.ndarray | None:
        """Returns the tokens of a text, in which there are added tokens, between two places."""
        found: list[np.ndarray] = []
        begin = 0
        for match in [*self._added.pattern.finditer(text), None]:
            first, behind = match.span() if match else (len(text), len(text))
            if begin < min(first, own[1]) and first > own[0]:
                inside = (max(own[0] - begin, 0), min(own[1], first) - begin)
                ids = self._between_added(text[begin:first], inside)
                if ids is None:
                    return None
                found.append(ids)
            if match and own[0] < behind and first < own[1]:
                token = self._added.plain.get(match[0])
                if token is None or first < own[0] or own[1] < behind:
                    return None
                found.append(np.array([token], np.int32))
            begin = behind
        return np.concatenate([np.empty(0, np.int32), *found])

    def _between_added(self, text: str, own: tuple[int, int]) -> np.ndarray | None:
        """Returns the tokens of a text without added tokens between two places, int32[T], or None
        where the tokenizer must be asked.
        """
        written = self._division.written(text)
        if written is None:
            return None
        more = len(written) - len(text)  # a space may come before it, which belongs to its begin
        own = (own[0] + more if own[0] else 0, own[1] + more)
        codes = np.frombuffer(written.encode("utf-32-le", "surrogatepass"), np.uint32)
        if len(self._unknown) < len(codes):
            self._unknown = np.empty((len(codes), 3), np.int64)
        return self._tokens(codes, written, own)

    def _tokens(self, codes: np.ndarray, text: str, own: tuple[int, int]) -> np.ndarray | None:
        """Returns the tokens of the words of `text` (its `codes` are uint32[characters]) between
        two places, int32[T], or None.
        """
        most = len(codes) * 4  # a character has at most four bytes, and a token at least one
        if len(self._ids) < most:
            self._ids = np.empty(most, np.int32)
        automaton = (self._division.classes, self._division.table)
        while True:
            out = (self._ids, self._unknown)
            state, count, unknown = kernel("divided")(codes, own, automaton, self._known.all, out)
            if state == STOPPED and self._division.is_alike(text[count]):
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


class KnownWords:
    """A `KnownWords` keeps the words that have come up, with the tokens that `ids_of` tells."""

    def __init__(self, ids_of: Callable[[str], list[int]]):
        self._ids_of = ids_of
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
            ids = self._ids_of(word)
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
