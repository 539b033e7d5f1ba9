"""Plain text (.txt, .md) is read in passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.sources.bounded_lines import text_pieces

TURN_COLUMNS = ("messages", "conversations", "conversation")
"""Columns with these names hold the turns of a conversation."""
CHARACTERS_A_TOKEN = 3
"""A passage from a text file has about this many characters per token of a row."""
_LONGEST_PARAGRAPH = 1 << 20


def passages(path: Path, max_seq_len: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Divides a plain text into passages and yields (first line, {text}) for each. A passage
    consists of whole paragraphs, as many as fill about one row of `max_seq_len` tokens. Blank lines
    separate paragraphs. A paragraph longer than that is a separate passage.
    """
    most = max_seq_len * CHARACTERS_A_TOKEN
    passage = ""
    begin = 1
    for paragraph_begin, paragraph in _paragraphs(path):
        if passage and len(passage) + len(paragraph) > most:
            yield begin, {"text": passage.rstrip("\n")}
            passage = ""
        if not passage:
            begin = paragraph_begin
        passage += paragraph + "\n"
    if passage.strip():
        yield begin, {"text": passage.rstrip("\n")}


def _paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (first line, text) of each paragraph. A paragraph is cut at `_LONGEST_PARAGRAPH`
    characters, to limit memory for a file without blank lines.
    """
    paragraph = ""
    begin = 0
    for number, line in text_pieces(path):
        is_blank = not line.strip()
        if not is_blank:
            if not paragraph:
                begin = number
            paragraph += line
        if paragraph and (is_blank or len(paragraph) >= _LONGEST_PARAGRAPH):
            yield begin, paragraph
            paragraph = ""
    if paragraph:
        yield begin, paragraph
