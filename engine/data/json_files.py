"""Rows of JSON files, read piece by piece: one object a line, a list of objects, or a list inside
an object.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from engine.data.text_files import TURN_COLUMNS
from engine.errors import DataError

Row = dict[str, Any]
Read = Callable[[], Iterator[tuple[int, Row]]]

_CHUNK_BYTES = 1 << 20
_LONGEST_VALUE = 1 << 30
"""Characters of one row; a longer one is no row."""
_WHITE_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def readable(path: Path) -> Any:
    """The file, opened to be read as bytes. Raises DataError when it cannot be."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); check its permissions."
        ) from None


def line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(Line from 1, object) of a file with one object a line; blank lines are no rows. Raises
    DataError for a line that is none.
    """
    with readable(path) as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, _parse_line(raw, number, path.name)


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with readable(path) as file:
        return sum(1 for raw in file if raw.strip())


def _parse_line(raw: bytes, number: int, name: str) -> Row:
    try:
        row = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise DataError(
            f"Line {number} of {name} is not UTF-8 text; save the file as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"Line {number} of {name} is not valid JSON ({error.msg.lower()} at column "
            f"{error.colno}); fix or remove that line."
        ) from None
    except ValueError:  # Python refuses to read such a number
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


def item_rows(path: Path) -> Read | None:
    """What reads a .json file from its start as (item from 1, object): the items of its list, of
    the only list of objects inside its object, or that object as the only row. None when several
    values follow each other, as where there is one object a line. Raises DataError for what is
    neither; memory holds one item at a time.
    """
    with readable(path) as file:
        text = _JsonText(file, path.name)
        first = text.peek()
        if first == "[":
            text.step()
            if text.peek() == "]":
                text.step()
                if not text.peek():
                    raise DataError(
                        f"{path.name} is an empty list; give a file with at least one row."
                    )
            return partial(_list_items, path)
        if first == "{":
            lists = _lists_within(text)
            if text.peek():
                return None
            if len(lists) == 1:
                return partial(_list_items, path, *lists)
            if path.stat().st_size > _LONGEST_VALUE:
                raise DataError(
                    f"{path.name} is one object that is too large for a row; write a list of "
                    "objects, one for each row."
                )
            return partial(_whole, path)
        value = text.value()
        if text.peek():
            return None
        raise DataError(
            f"{path.name} holds {_kind(value)}; write a list of objects, one for each row."
        )


def _lists_within(text: _JsonText) -> list[int]:
    """Places (from 0) of the members of the object at `text` that are lists of objects and no
    conversation.
    """
    found: dict[str, int] = {}
    for place, name in enumerate(text.members()):
        found.pop(name, None)  # the last member of a name counts
        if text.peek() != "[":
            text.value()
            continue
        kinds = [isinstance(item, dict) for number, item in enumerate(text.items()) if number == 0]
        if kinds == [True] and name not in TURN_COLUMNS:
            found[name] = place
    return list(found.values())


def _list_items(path: Path, member: int | None = None) -> Iterator[tuple[int, Row]]:
    """The items of the list that the file is or, in an object, of the `member`-th member."""
    with readable(path) as file:
        text = _JsonText(file, path.name)
        text.peek()
        if member is not None:
            for place, _ in enumerate(text.members()):
                if place == member:
                    break
                text.skip()
            text.peek()
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
    with readable(path) as file:
        yield 1, _JsonText(file, path.name).value()


class _JsonText:
    """A JSON file, decoded and parsed a piece at a time. `at` is the place in the piece."""

    def __init__(self, file: Any, name: str):
        self._file, self._name = file, name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._piece, self.at = "", 0
        self._ended = False
        self._lines, self._columns = (
            0,
            0,
        )  # line ends before the piece, and characters since the last of them

    def peek(self) -> str:
        """The next character that is no white space, where `at` then stands; nothing at the end of
        the file.
        """
        while True:
            self.at = _WHITE_SPACE.match(self._piece, self.at).end()
            if self.at < len(self._piece) or self._ended:
                return self._piece[self.at : self.at + 1]
            self._read_on()

    def step(self) -> None:
        """Past the character that `peek` found."""
        self.at += 1

    def value(self) -> Any:
        """The value that begins here."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._piece, self.at)
                # A number may go on in the next piece: 1 as 1.5 or as 1e+5.
                if (
                    self._ended
                    or end + 3 <= len(self._piece)
                    or not isinstance(value, (int, float))
                ):
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                cut_off = (
                    error.msg.startswith("Unterminated string")
                    or error.pos >= len(self._piece) - 16
                )
                if self._ended or not cut_off:
                    raise self._broken(error.msg, error.pos) from None
            except (
                ValueError
            ):  # Python refuses to read such a number, unless what follows makes it a fraction
                if self._ended or self._piece[-1] not in "0123456789.eE+-":
                    raise DataError(
                        f"{self._name} holds a number with too many digits, in the value that "
                        f"begins at {self.place(self.at)}; write it as text."
                    ) from None
            except RecursionError:
                raise DataError(
                    f"{self._name} is nested too deeply; write a list of rows."
                ) from None
            if len(self._piece) - self.at > _LONGEST_VALUE:
                raise self._broken("a value without an end", self.at)
            self._read_on()

    def skip(self) -> None:
        """Read past the value that begins here, a list item by item."""
        if self.peek() == "[":
            for _ in self.items():
                pass
        else:
            self.value()

    def items(self) -> Iterator[Any]:
        """The items of the list that begins here."""
        self._expect("[")
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self._comma_or("]"):
                return

    def members(self) -> Iterator[str]:
        """The names in the object that begins here; whoever asks for the next one has read the
        value of this one.
        """
        self._expect("{")
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            if self.peek() != '"':
                raise self._broken("Expecting property name enclosed in double quotes", self.at)
            name = self.value()
            self._expect(":")
            yield name
            if self._comma_or("}"):
                return

    def _comma_or(self, end: str) -> bool:
        """Step over a comma (False) or `end` (True)."""
        found = self.peek()
        if found not in (",", end) or not found:
            raise self._broken("Expecting ',' delimiter", self.at)
        self.at += 1
        return found == end

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise self._broken(f"Expecting '{character}' delimiter", self.at)
        self.at += 1

    def _read_on(self) -> None:
        """Let go of what is parsed; double what is left, so that parsing a long value again costs
        at most twice.
        """
        self._lines, self._columns = self._line_and_column(self.at)
        left = self._piece[self.at :]
        raw = self._file.read(max(_CHUNK_BYTES, len(left)))
        self._ended = not raw
        try:
            self._piece, self.at = left + self._decode(raw, not raw), 0
        except UnicodeDecodeError:
            raise DataError(f"{self._name} is not UTF-8 text; save it as UTF-8.") from None

    def _line_and_column(self, at: int) -> tuple[int, int]:
        """Line ends before `at`, and characters since the last of them."""
        ends = self._piece.count("\n", 0, at)
        return self._lines + ends, at - self._piece.rfind(
            "\n", 0, at
        ) - 1 if ends else self._columns + at

    def place(self, at: int) -> str:
        lines, columns = self._line_and_column(at)
        return f"line {lines + 1}, column {columns + 1}"

    def _broken(self, problem: str, at: int) -> DataError:
        return DataError(
            f"{self._name} is not valid JSON ({problem.lower()} at {self.place(at)}); fix the file."
        )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        list: "a list",
        dict: "an object",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)
