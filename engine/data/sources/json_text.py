"""The text of a JSON file, parsed a chunk at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from engine.data.sources.bounded_lines import not_utf8
from engine.data.sources.reading import errors_with_place
from engine.errors import DataError

_CHUNK_BYTES = 1 << 20
LONGEST_VALUE = 64 << 20
"""Largest number of characters of a value; a longer one is refused."""
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class JsonText:
    """Decodes and parses a JSON file a chunk at a time. - `at` is the index in the chunk where
    parsing continues. - Parsed text is discarded when the next chunk is read. - A value cut off at
    the end of a chunk is parsed again together with the next chunk.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file = file
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._chunk = ""
        self.at = 0
        self._ended = False
        # For places in errors: the line ends before the chunk, and the characters since the last of
        # them.
        self._lines = 0
        self._columns = 0
        self.consumed = 0
        """Number of characters in the chunks before this one."""

    def peek(self) -> str:
        """Moves to the next character that is not white space and returns it, or an empty text at
        the end of the file. Raises DataError for white space without end.
        """
        blank = 0
        while True:
            begin = self.at
            space = _WHITE_SPACE.match(self._chunk, begin)
            if space is not None:  # always true: the pattern matches everywhere
                self.at = space.end()
            if self.at < len(self._chunk) or self._ended:
                return self._chunk[self.at : self.at + 1]
            blank += self.at - begin
            if blank > LONGEST_VALUE:
                raise self._broken(f"more than {LONGEST_VALUE >> 20} MiB of white space", self.at)
            self._read_on()

    def step(self) -> None:
        """Skips the character that `peek` found."""
        self.at += 1

    def value(self) -> Any:
        """Reads the value that begins here and moves past it."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._chunk, self.at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut_off(error):
                    raise self._broken(error.msg, error.pos) from None
            except ValueError:
                # Python limits the digits of an integer. A number that continues in the next chunk
                # may turn out to be a fraction.
                if self._ended or self._chunk[-1] not in "0123456789.eE+-":
                    raise DataError(
                        f"{self._name} holds a number with too many digits, in the value that "
                        f"begins at {self.place(self.at)}; write it as text."
                    ) from None
            except RecursionError:
                raise DataError(
                    f"{self._name} is nested too deeply; write a list of rows."
                ) from None
            else:
                # A number may continue in the next chunk: 1 may become 1.5 or 1e+5.
                may_go_on = isinstance(value, (int, float)) and end + 3 > len(self._chunk)
                if self._ended or not may_go_on:
                    self.at = end
                    return value
            if len(self._chunk) - self.at > LONGEST_VALUE:
                raise self._broken(f"a value longer than {LONGEST_VALUE >> 20} MiB", self.at)
            self._read_on()

    def whole_value(self) -> Any:
        """Reads the value that begins here and moves past it. A list is read item by item."""
        return list(self.items()) if self.peek() == "[" else self.value()

    def items(self) -> Iterator[Any]:
        """Yields the items of the list that begins here."""
        self._expect("[")
        if self.peek() == "]":
            self.step()
            return
        while True:
            yield self.value()
            if self._comma_or("]"):
                return

    def members(self) -> Iterator[str]:
        """Yields the names in the object that begins here. The caller must read the value of a name
        before it takes the next name.
        """
        self._expect("{")
        if self.peek() == "}":
            self.step()
            return
        while True:
            if self.peek() != '"':
                raise self._broken("Expecting property name enclosed in double quotes", self.at)
            name = self.value()
            self._expect(":")
            yield name
            if self._comma_or("}"):
                return

    def place(self, at: int) -> str:
        """Returns a text on where in the file index `at` of the chunk is."""
        lines, columns = self._line_and_column(at)
        return f"line {lines + 1}, column {columns + 1}"

    def _may_be_cut_off(self, error: json.JSONDecodeError) -> bool:
        """Whether the next chunk may resolve the error: the error is an unterminated string or is
        near the end.
        """
        is_open_text = error.msg.startswith("Unterminated string")
        return is_open_text or error.pos >= len(self._chunk) - 16

    def _comma_or(self, end: str) -> bool:
        """Moves past a comma and returns False, or past `end` and returns True."""
        found = self.peek()
        if not found or found not in (",", end):
            raise self._broken("Expecting ',' delimiter", self.at)
        self.step()
        return found == end

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._broken(f"Expecting '{character}' delimiter", self.at)
        self.step()

    def _read_on(self) -> None:
        """Discards the parsed text and reads at least as many bytes as characters are left. A long
        value is parsed again each time. Because the chunk doubles, all these attempts take at most
        twice the time of the last one.
        """
        self._lines, self._columns = self._line_and_column(self.at)
        self.consumed += self.at
        left = self._chunk[self.at :]
        self._chunk = ""
        self.at = 0
        with errors_with_place(self._name, lambda: self.place(0)):
            raw = self._file.read(max(_CHUNK_BYTES, len(left)))
        self._ended = not raw
        try:
            self._chunk = left + self._decode(raw, self._ended)
        except UnicodeDecodeError as error:
            ends = left.count("\n") + raw[: error.start].count(b"\n")
            raise not_utf8(self._lines + ends + 1, self._name) from None

    def _line_and_column(self, at: int) -> tuple[int, int]:
        """Returns the number of line ends before `at`, and of the characters since the last of
        them.
        """
        ends = self._chunk.count("\n", 0, at)
        if not ends:
            return self._lines, self._columns + at
        return self._lines + ends, at - self._chunk.rfind("\n", 0, at) - 1

    def continues(self) -> DataError:
        """Returns the error for a file that continues here, after its list."""
        if self.peek() == "\0":
            return self._broken("", self.at)
        return DataError(
            f"{self._name} goes on after its list ({self.place(self.at)}); write one list of "
            "objects, or one object a line."
        )

    def _broken(self, problem: str, at: int) -> DataError:
        if self._chunk[at : at + 1] == "\0":
            return DataError(
                f"{self._name} is damaged at {self.place(at)}: it goes on with zero bytes, as "
                "after a crash; write or fetch it again."
            )
        problem = problem[:1].lower() + problem[1:]
        return DataError(
            f"{self._name} is not valid JSON ({problem} at {self.place(at)}); fix the file."
        )
