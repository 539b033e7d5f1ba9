"""Lines of a file, read with a limit, so that a damaged file cannot fill the memory."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.data.sources.open_text import open_text
from engine.data.sources.reading import errors_with_place
from engine.errors import DataError

LONGEST_LINE = 64 << 20
"""Largest number of bytes of a line."""
MOST_BLANK = 1 << 22
"""Largest number of blank lines that may follow each other."""
_CHUNK = 1 << 20
_LINE_FEED = 10


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, line in UTF-8 with its end) of a text file. Raises DataError for a
    line with zero bytes, for one that is longer than `LONGEST_LINE`, and where nothing but blank
    lines follow.
    """
    held: list[bytes] = []
    length = 0
    number = 0
    blank = 0
    for number, chunk in _chunks(path):
        if not held and (chunk.endswith(b"\n") or len(chunk) < _CHUNK):
            blank = blank + 1 if len(chunk) < 3 and chunk.isspace() else 0
            if blank > MOST_BLANK:
                raise DataError(
                    f"{path.name} has {MOST_BLANK:,} blank lines up to line {number:,}; remove "
                    "them, or check whether the file is damaged."
                )
            yield number, chunk
            continue
        held.append(chunk)
        length += len(chunk)
        if length > LONGEST_LINE:
            raise DataError(
                f"Line {number} of {path.name} is longer than {LONGEST_LINE / 2**20:g} MiB; divide "
                "it, or check whether the file is damaged."
            )
        if chunk.endswith(b"\n"):
            line = b"".join(held)
            held.clear()
            length = 0
            yield number, line
    if held:
        yield number, b"".join(held)


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not blank."""
    return sum(1 for _, line in lines(path) if not line.isspace())


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line with its end) of a text file as `lines` does, but lines may also
    end with carriage returns alone. Raises DataError for a line that is not UTF-8.
    """
    for number, line in lines(path):
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise not_utf8(number, path.name) from None
        if "\r" in text[:-2]:
            for part in io.StringIO(text, newline=""):
                yield number, part
        else:
            yield number, text


def text_blocks(path: Path) -> Iterator[str]:
    """Yields a plain text in blocks of any length, each of whole characters, with line feeds alone
    as line ends. Raises DataError as `text_lines` does.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    last = 1
    try:
        for number, block in _blocks(path):
            last = number
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        behind = error.object.count(b"\n", error.start)
        raise not_utf8(last - behind, path.name) from None


def not_utf8(number: int, name: str) -> DataError:
    """Returns the error for a line that is not UTF-8."""
    return DataError(f"Line {number} of {name} is not UTF-8 text; save the file as UTF-8.")


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the line, chunk): lines with their ends, divided after `_CHUNK` bytes."""
    number = 1
    with errors_with_place(path.name, lambda: f"line {number - 1}"), open_text(path) as file:
        while chunk := file.readline(_CHUNK):
            if b"\0" in chunk:
                raise _zeros(chunk, number, path.name)
            yield number, chunk
            number += chunk.endswith(b"\n")


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the line in which the block ends, block of bytes) of a plain text."""
    number = 1
    with errors_with_place(path.name, lambda: f"line {number - 1}"), open_text(path) as file:
        while block := file.read(_CHUNK):
            if b"\0" in block:
                first = block.index(b"\0")
                begin = block.rfind(b"\n", 0, first) + 1
                line, _, _ = block[begin:].partition(b"\n")
                raise _zeros(line, number + block.count(b"\n", 0, first), path.name)
            # A third of the time of `block.count`, where lines are short.
            number += int(np.count_nonzero(np.frombuffer(block, np.uint8) == _LINE_FEED))
            yield number, block


def _zeros(line: bytes, number: int, name: str) -> DataError:
    if line[line.index(b"\0") :].strip(b"\0\r\n"):
        return DataError(
            f"Line {number} of {name} holds zero bytes, which no text has; remove them, or write "
            "the file again."
        )
    if number == 1:
        return DataError(f"{name} begins with zero bytes, as after a crash; write it again.")
    return DataError(
        f"{name} is damaged after line {number - 1}: it goes on with zero bytes, as after a "
        "crash; remove what follows that line, or write the file again."
    )
