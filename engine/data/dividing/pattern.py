r"""A pattern by which a tokenizer divides texts is read into a tree.

What the patterns of tokenizers are made of is understood: characters, classes with those of Unicode
(`\p{L}`), groups, alternatives, repetitions, and the look at the next character (`(?!\S)`). Any
other pattern is refused with `UnknownPattern`, and its texts are left to the tokenizer.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass

import numpy as np

CODES = 0x110000
"""Unicode has so many characters, as far as their numbers go."""
_ESCAPES = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_CATEGORY = re.compile(r"p\{([LMNPSZ]\w?)\}")
_FOLDED = {"s": "ſ", "k": "\u212a"}
"""These further characters count as a letter where upper and lower case are the same."""
_ASSIGNED = ((0, 0x40000), (0xE0000, 0xE1000))
"""Other characters are of no category or for private use, which no pattern names."""
_SPACES = "\t\n\v\f\r\x85"
_MOST_REPEATED = 16


class UnknownPattern(ValueError):
    """The pattern has something in it that is not understood."""


@dataclass(frozen=True, eq=False)
class Characters:
    """A `Characters` is one character of a set."""

    members: np.ndarray
    """It marks the characters of the set by their numbers, bool[CODES]."""


@dataclass(frozen=True, eq=False)
class NotBefore:
    """A `NotBefore` is a place that no character of a set follows."""

    members: np.ndarray
    """It marks the characters of the set by their numbers, bool[CODES]."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """A `Sequence` is several parts, one after another."""

    parts: list[Part]


@dataclass(frozen=True, eq=False)
class Choice:
    """A `Choice` is the first of several parts with which the whole pattern matches."""

    parts: list[Part]


@dataclass(frozen=True, eq=False)
class Repeated:
    """A `Repeated` is a part as often as possible."""

    part: Part
    least: int
    most: int | None
    """There is no limit if it is None."""


Part = Characters | NotBefore | Sequence | Choice | Repeated


def read_pattern(pattern: str) -> Part:
    """Returns the tree of a pattern. Raises UnknownPattern."""
    reader = _Reader(pattern)
    found = reader.choice()
    if reader.rest:
        raise UnknownPattern(pattern)
    return found


class _Reader:
    def __init__(self, pattern: str):
        self._pattern = pattern
        self._place = 0
        self._folds = False
        """Upper and lower case are the same."""

    @property
    def rest(self) -> str:
        return self._pattern[self._place :]

    def choice(self) -> Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(parts)

    def _sequence(self) -> Part:
        parts: list[Part] = []
        while self.rest and self.rest[0] not in "|)":
            parts.append(self._repeated(self._one()))
        return Sequence(parts)

    def _repeated(self, part: Part) -> Part:
        least, most = self._counts()
        if (least, most) == (1, 1):
            return part
        # A lazy or a possessive repetition, and a repetition of one, are not understood.
        is_single = isinstance(part, Characters) or most == 1
        is_small = max(least, most or 0) <= _MOST_REPEATED
        if self.rest[:1] in tuple("?*+{") or not is_single or not is_small:
            raise UnknownPattern(self._pattern)
        return Repeated(part, least, most)

    def _counts(self) -> tuple[int, int | None]:
        for sign, least, most in (("?", 0, 1), ("*", 0, None), ("+", 1, None)):
            if self._take(sign):
                return least, most
        found = _COUNT.match(self._pattern, self._place)
        if found is None:
            return 1, 1
        self._place = found.end()
        least = int(found[1])
        if found[2] is None:
            return least, least
        return least, int(found[3]) if found[3] else None

    def _one(self) -> Part:
        if self._take("(?!"):
            part = self._closed(self._one())
            if not isinstance(part, Characters):
                raise UnknownPattern(self._pattern)
            return NotBefore(part.members)
        if self._take("(?:"):
            return self._closed(self.choice())
        if self._take("(?i:"):
            outside, self._folds = self._folds, True
            part = self._closed(self.choice())
            self._folds = outside
            return part
        if self._take("["):
            return Characters(self._class())
        if self.rest[0] in "().*+?{}]^$":
            raise UnknownPattern(self._pattern)
        return Characters(self._member())

    def _closed(self, part: Part) -> Part:
        if not self._take(")"):
            raise UnknownPattern(self._pattern)
        return part

    def _class(self) -> np.ndarray:
        """Returns the characters of a class, bool[CODES], of which the bracket is read."""
        is_other = self._take("^")
        members = np.zeros(CODES, bool)
        while not self._take("]"):
            # Nested classes and `&&` are not understood, nor is `-` where it is no range.
            if not self.rest or self.rest[0] in "[-" or self.rest.startswith("&&"):
                raise UnknownPattern(self._pattern)
            first = self._place
            members |= self._member()
            if self._take("-"):
                members |= self._range(self._pattern[first : self._place - 1])
        return ~members if is_other else members

    def _range(self, first: str) -> np.ndarray:
        """Returns the characters from `first` to the next one in the pattern, bool[CODES]."""
        last = self._next()
        if len(first) > 1 or last in "\\[]" or last < first or self._folds:
            raise UnknownPattern(self._pattern)
        members = np.zeros(CODES, bool)
        members[ord(first) : ord(last) + 1] = True
        return members

    def _member(self) -> np.ndarray:
        """Returns the characters that a character or an escape stands for, bool[CODES]."""
        letter = self._next()
        if letter != "\\":
            return self._character(letter)
        category = _CATEGORY.match(self._pattern, self._place)
        if category is not None:
            self._place = category.end()
            return _of_category(category[1])
        letter = self._next()
        if letter in "sS":
            return _spaces() if letter == "s" else ~_spaces()
        if letter.isalnum() and letter not in _ESCAPES:
            raise UnknownPattern(self._pattern)
        return self._character(_ESCAPES.get(letter, letter))

    def _character(self, letter: str) -> np.ndarray:
        """Returns the characters that count as one, bool[CODES]."""
        same = letter
        if self._folds and letter.isalpha():
            if not letter.isascii():
                raise UnknownPattern(self._pattern)
            low = letter.lower()
            same = low + low.upper() + _FOLDED.get(low, "")
        members = np.zeros(CODES, bool)
        members[list(map(ord, same))] = True
        return members

    def _next(self) -> str:
        if not self.rest:
            raise UnknownPattern(self._pattern)
        self._place += 1
        return self._pattern[self._place - 1]

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._place):
            return False
        self._place += len(text)
        return True


@functools.cache
def categories() -> np.ndarray:
    """Returns the category of each character, a text of two letters: shape [CODES]."""
    found = np.full(CODES, b"Cn")
    for first, behind in _ASSIGNED:
        each = "".join(map(unicodedata.category, map(chr, range(first, behind))))
        found[first:behind] = np.frombuffer(each.encode(), found.dtype)
    return found


@functools.cache
def _of_category(name: str) -> np.ndarray:
    """Returns the characters of a category such as `L` or `Lu`, bool[CODES]."""
    found = categories()
    members = found == name.encode() if len(name) > 1 else found.astype("S1") == name.encode()
    if not members.any():
        raise UnknownPattern(name)
    return members


@functools.cache
def _spaces() -> np.ndarray:
    """Returns the characters that are white space, bool[CODES]."""
    members = _of_category("Z").copy()
    members[list(map(ord, _SPACES))] = True
    return members
