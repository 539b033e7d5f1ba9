"""JSON files are read piece by piece. They contain one object per line, a list of objects, or a
list inside an object.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from engine.errors import DataError
from engine.sources.text_files import TURN_COLUMNS

Row = dict[str, Any]
Read = Callable[[], Iterator[tuple[int, Row]]]

_CHUNK_BYTES = 1 << 20
_LONGEST_VALUE = 1 << 30
"""A row has at most this many characters; a longer value is not accepted as a row."""
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def readable(path: Path) -> BinaryIO:
    """Opens a file for reading bytes. Raises DataError if that fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check its permissions."
        ) from None


# ---------------------------------------------------------------------- one object a line


def line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Reads a file with one object per line and yields (line from 1, object). Blank lines are not
    rows. Raises DataError for a line that is not an object.
    """
    with readable(path) as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, _parse_line(raw, number, path.name)


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not blank."""
    with readable(path) as file:
        return sum(1 for raw in file if raw.strip())


def _parse_line(raw: bytes, number: int, name: str) -> Row:
    # Some editors begin a file with a byte order mark.
    encoding = "utf-8-sig" if number == 1 else "utf-8"
    try:
        row = json.loads(raw.decode(encoding))
    except UnicodeDecodeError:
        raise DataError(
            f"Line {number} of {name} is not UTF-8 text; save the file as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"Line {number} of {name} is not valid JSON ({error.msg.lower()} at column "
            f"{error.colno}); fix or remove that line."
        ) from None
    except ValueError:  # Python limits the digits of an integer
        raise DataError(
            f"Line {number} of {name} holds a number with too many digits; write it as text or "
            "remove that line."
        ) from None
    except RecursionError:
        raise DataError(
            f"Line {number} of {name} is nested too deeply; fix or remove that line."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"Line {number} of {name} is {_kind(row)}, not an object with named columns; write one "
            "JSON object a line."
        )
    return row


# ---------------------------------------------------------------------- a list


def item_rows(path: Path) -> Read | None:
    """Returns a function that reads a .json file from its start and yields (item from 1, object).

    The rows are the items of the file's list, or of the only list of objects inside its object, or
    else that object as the only row. Returns None when several values follow each other, as with
    one object per line. Raises DataError for anything else. Only one item at a time is in memory.
    """
    with readable(path) as file:
        text = _JsonText(file, path.name)
        first = text.peek()
        if first == "[":
            _refuse_empty_list(text, path.name)
            return partial(_list_items, path)
        if first == "{":
            return _rows_of_object(text, path)
        value = text.value()
        if text.peek():
            return None
        raise DataError(
            f"{path.name} holds {_kind(value)}; write a list of objects, one for each row."
        )


def _refuse_empty_list(text: _JsonText, name: str) -> None:
    text.step()
    if text.peek() != "]":
        return
    text.step()
    if not text.peek():
        raise DataError(f"{name} is an empty list; give a file with at least one row.")


def _rows_of_object(text: _JsonText, path: Path) -> Read | None:
    """Returns a function that reads the rows of a file that begins with an object, or None when
    more values follow the object.
    """
    lists = _lists_within(text)
    if text.peek():
        return None
    if len(lists) == 1:
        return partial(_list_items, path, lists[0])
    if path.stat().st_size > _LONGEST_VALUE:
        raise DataError(
            f"{path.name} is one object that is too large for a row; write a list of objects, one "
            "for each row."
        )
    return partial(_whole, path)


def _lists_within(text: _JsonText) -> list[int]:
    """Returns the indices (from 0) of those members of the object at `text` that are lists of
    objects, except conversations.
    """
    found: dict[str, int] = {}
    for place, name in enumerate(text.members()):
        found.pop(name, None)  # if a name occurs twice, the last member counts
        if text.peek() != "[":
            text.value()
            continue
        if _begins_with_object(text.items()) and name not in TURN_COLUMNS:
            found[name] = place
    return list(found.values())


def _begins_with_object(items: Iterator[Any]) -> bool:
    """Whether the first item is an object. All items are read, so that reading can continue after
    the list.
    """
    first = next(items, None)
    for _ in items:
        pass
    return isinstance(first, dict)


def _list_items(path: Path, member: int | None = None) -> Iterator[tuple[int, Row]]:
    """Yields the items of the file's list or, if the file is an object, of its member at index
    `member`.
    """
    with readable(path) as file:
        text = _JsonText(file, path.name)
        text.peek()
        if member is not None:
            text.go_to_member(member)
        for number, row in enumerate(text.items(), 1):
            if not isinstance(row, dict):
                raise DataError(
                    f"Item {number} of {path.name} is {_kind(row)}, not an object with named "
                    "columns; write one object for each row."
                )
            yield number, row
        if member is None and text.peek():
            raise DataError(
                f"{path.name} goes on after its list ({text.place(text.at)}); write one list of "
                "objects, or one object a line."
            )


def _whole(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields the file's object as the only row."""
    with readable(path) as file:
        yield 1, _JsonText(file, path.name).value()


class _JsonText:
    """Decodes and parses a JSON file a piece at a time.

    - `at` is the index in the piece where parsing continues.
    - Parsed text is discarded when the next piece is read.
    - A value cut off at the end of a piece is parsed again together with the next piece.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._file = file
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._piece = ""
        self.at = 0
        self._ended = False
        # For places in errors: the line ends before the piece, and the characters since the last of
        # them.
        self._lines = 0
        self._columns = 0

    def peek(self) -> str:
        """Moves to the next character that is not white space and returns it, or an empty text at
        the end of the file.
        """
        while True:
            space = _WHITE_SPACE.match(self._piece, self.at)
            if space is not None:  # always true: the pattern matches everywhere
                self.at = space.end()
            if self.at < len(self._piece) or self._ended:
                return self._piece[self.at : self.at + 1]
            self._read_on()

    def step(self) -> None:
        """Skips the character that `peek` found."""
        self.at += 1

    def value(self) -> Any:
        """Reads the value that begins here and moves past it."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._piece, self.at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut_off(error):
                    raise self._broken(error.msg, error.pos) from None
            except ValueError:
                # Python limits the digits of an integer. A number that continues in the next piece
                # may turn out to be a fraction.
                if self._ended or self._piece[-1] not in "0123456789.eE+-":
                    raise DataError(
                        f"{self._name} holds a number with too many digits, in the value that "
                        f"begins at {self.place(self.at)}; write it as text."
                    ) from None
            except RecursionError:
                raise DataError(
                    f"{self._name} is nested too deeply; write a list of rows."
                ) from None
            else:
                # A number may continue in the next piece: 1 may become 1.5 or 1e+5.
                may_go_on = isinstance(value, (int, float)) and end + 3 > len(self._piece)
                if self._ended or not may_go_on:
                    self.at = end
                    return value
            if len(self._piece) - self.at > _LONGEST_VALUE:
                raise self._broken("a value without an end", self.at)
            self._read_on()

    def skip(self) -> None:
        """Skips the value that begins here. A list is skipped item by item."""
        if self.peek() == "[":
            for _ in self.items():
                pass
        else:
            self.value()

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

    def go_to_member(self, wanted: int) -> None:
        """Skips to the value of the member at index `wanted` (from 0) in the object that begins
        here.
        """
        for place, _ in enumerate(self.members()):
            if place == wanted:
                break
            self.skip()
        self.peek()

    def place(self, at: int) -> str:
        """Returns in words where in the file index `at` of the piece is."""
        lines, columns = self._line_and_column(at)
        return f"line {lines + 1}, column {columns + 1}"

    def _may_be_cut_off(self, error: json.JSONDecodeError) -> bool:
        """Whether the next piece may resolve the error: the error is an unterminated string or is
        near the end.
        """
        is_open_text = error.msg.startswith("Unterminated string")
        return is_open_text or error.pos >= len(self._piece) - 16

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
        value is parsed again each time. Because the piece doubles, all these attempts take at most
        twice the time of the last one.
        """
        self._lines, self._columns = self._line_and_column(self.at)
        left = self._piece[self.at :]
        raw = self._file.read(max(_CHUNK_BYTES, len(left)))
        self._ended = not raw
        try:
            self._piece = left + self._decode(raw, self._ended)
        except UnicodeDecodeError:
            raise DataError(f"{self._name} is not UTF-8 text; save it as UTF-8.") from None
        self.at = 0

    def _line_and_column(self, at: int) -> tuple[int, int]:
        """Returns the number of line ends before `at`, and of the characters since the last of
        them.
        """
        ends = self._piece.count("\n", 0, at)
        if not ends:
            return self._lines, self._columns + at
        return self._lines + ends, at - self._piece.rfind("\n", 0, at) - 1

    def _broken(self, problem: str, at: int) -> DataError:
        return DataError(
            f"{self._name} is not valid JSON ({problem.lower()} at {self.place(at)}); fix the file."
        )


_KINDS = {
    list: "a list",
    dict: "an object",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    NoneType: "null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)
