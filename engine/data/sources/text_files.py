"""A plain text (.txt, .md) of any length is read passage by passage, and no character is lost."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.data.sources.bounded_lines import text_blocks

TURN_COLUMNS = ("messages", "conversations", "conversation")
"""Names of columns that hold the turns of a conversation."""
CONTEXT = 64
"""Number of characters before and behind a passage that come with it: the tokens at its ends are
those of the whole text where no word is longer.
"""
_CHARACTERS_A_TOKEN = 3
"""Approximate number of characters of a passage per token of a row."""
_PLACES_TRIED = 64


class Passage(dict[str, Any]):
    """The row {text} of a text that continues in the rows around it."""

    def __init__(self, text: str, before: str, after: str):
        super().__init__(text=text)
        self.before = before
        """The characters before it, at most `CONTEXT`. The first passage has none."""
        self.after = after
        """The characters behind it, at most `CONTEXT`. The last passage has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Passage, (self["text"], self.before, self.after)


def passages(
    path: Path, max_seq_len: int, lengths: Iterable[int] = ()
) -> Iterator[tuple[int, Passage]]:
    """Divides a plain text into passages and yields (first line, passage) for each. All together
    are the text, character by character. Each fills about one row of `max_seq_len` tokens. A text
    of white space alone has no passages. If `lengths_of_passages` is known, it saves time.
    """
    number, before = 1, ""
    for text, after in _cut(path, max_seq_len, lengths):
        yield number, Passage(text, before, after)
        number += text.count("\n")
        before = (text if len(text) >= CONTEXT else before + text)[-CONTEXT:]


def lengths_of_passages(path: Path, max_seq_len: int) -> array[int]:
    """Returns how many characters each passage of a plain text has."""
    return array("l", (len(text) for text, _ in _cut(path, max_seq_len, ())))


def _cut(path: Path, max_seq_len: int, lengths: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Yields the text of each passage, and the characters behind it. The first passages have the
    lengths that are given.
    """
    most = max_seq_len * _CHARACTERS_A_TOKEN
    known = iter(lengths)

    def end_of(text: str, begin: int) -> int:
        length = next(known, None)
        return cut_place(text, begin, begin + most) if length is None else begin + length

    rest, count = "", 0
    for block in text_blocks(path):
        rest, begin = rest + block, 0
        while len(rest) - begin >= most + CONTEXT:
            end = end_of(rest, begin)
            yield rest[begin:end], rest[end : end + CONTEXT]
            count += 1
            begin = end
        rest = rest[begin:]
    while len(rest) > most:
        end = end_of(rest, 0)
        yield rest[:end], rest[end : end + CONTEXT]
        count += 1
        rest = rest[end:]
    if count or rest.strip():
        yield rest, ""


def cut_place(text: str, begin: int, most: int) -> int:
    """Returns where a chunk of `text` that begins at `begin` ends, at `most` or in the half before
    it; the text continues behind `most`. Two words with one space between them are the best place,
    because nearly every tokenizer begins a token with such a space. Then come the end of a line,
    any space, and any place at all.
    """
    least = max(begin + 1, (begin + most) // 2)
    place = most
    for _ in range(_PLACES_TRIED):
        place = text.rfind(" ", least, place)
        if place < 0:
            break
        if text[place - 1].isalnum() and text[place + 1].isalpha():
            return place
    place = text.rfind("\n", least, most)
    if place >= 0:
        return place + 1
    place = text.rfind(" ", least, most)
    return place if place >= 0 else most
