"""JSON files, read chunk by chunk: one object per line, objects over many lines, a list of objects,
a list inside an object, or an object of columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from engine.data.sources.bounded_lines import lines, not_utf8
from engine.data.sources.json_text import JsonText
from engine.data.sources.open_text import open_text
from engine.data.sources.text_files import TURN_COLUMNS
from engine.errors import DataError

_PARTS_OF_A_TURN = (
    {"role", "content"},
    {"role", "parts"},
    {"from", "value"},
)
"""Sets of keys. An object with all keys of one of them is a turn of a conversation, and no row."""
_NO_ROWS = (*TURN_COLUMNS, "segments")
"""Names of columns whose cells are lists of objects."""
Row = dict[str, Any]
Read = Callable[[], Iterator[tuple[int, Row]]]

_LONGEST_OBJECT = 256 << 20
"""Approximate largest number of characters of a file that is one object, of columns or as the only
row, because it is in memory as a whole.
"""
_MOST_CELLS = 3_000_000
"""Largest number of items in the lists of such a file: a compressed one may have a thousand times
as many as it has bytes.
"""
_MOST_OBJECTS = 1_000_000
"""Number of objects above which a list has the rows of its file, and is no column of it."""
_MOST_MEMBERS = 100_000
"""Largest number of members of an object whose members are not all rows."""
_EXCERPT = 60
"""Largest number of characters of a broken line in a sentence about it."""
_LONGEST_FIRST_LINE = 1 << 20
"""Length of the first line above which a file has one object per line, if it has the suffix of
lines.
"""


# ---------------------------------------------------------------------- one object a line


def line_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Reads a file with one object per line and yields (line from 1, object). Blank lines are not
    rows. Raises DataError for a line that is not an object.
    """
    for number, raw in lines(path):
        if not raw.isspace():
            yield number, _parse_line(raw, number, path.name)


def goes_over_lines(path: Path) -> bool:
    """Returns whether the first value of a file, an object or a list, continues after its first
    line. It also returns true for a list of objects in the only line.
    """
    filled = ((number, line) for number, line in lines(path) if not line.isspace())
    _, first = next(filled, (0, b""))
    if first.lstrip()[:1] not in (b"{", b"[") or len(first) > _LONGEST_FIRST_LINE:
        return False
    try:
        value = json.loads(first)
    except json.JSONDecodeError as error:
        return _is_cut_off(error) and next(filled, None) is not None
    except (ValueError, RecursionError):
        return False
    is_list = isinstance(value, list) and value and isinstance(value[0], dict)
    return bool(is_list) and next(filled, None) is None


def _parse_line(raw: bytes, number: int, name: str) -> Row:
    try:
        row = msgspec.json.decode(raw)
    except (ValueError, RecursionError):  # it is stricter than `json`, which decides
        row = _parse_slowly(raw, number, name)
    if not isinstance(row, dict):
        raise DataError(
            f"Line {number} of {name} is {_kind(row)}, not an object with named columns; write one "
            "JSON object a line."
        )
    return row


def _parse_slowly(raw: bytes, number: int, name: str) -> Any:
    """Returns the value of a line that may have NaN or half of a surrogate pair. Raises DataError,
    which names what is wrong.
    """
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError:
        raise not_utf8(number, name) from None
    except json.JSONDecodeError as error:
        if not raw.endswith(b"\n") and _is_cut_off(error):
            raise DataError(
                f"{name} is cut off in line {number}, its last; remove that line, or write or "
                "fetch the file again."
            ) from None
        raise DataError(
            f"Line {number} of {name} is not valid JSON: `{_around(error)}`. Fix or remove that "
            "line."
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


def _around(error: json.JSONDecodeError) -> str:
    """Returns the line or, of a long one, the text around the place where it is no JSON."""
    line = error.doc.rstrip()
    begin = max(0, min(error.pos - _EXCERPT // 2, len(line) - _EXCERPT))
    part = line[begin : begin + _EXCERPT]
    shown = "".join(map(_printable, part))
    before, after = "…" if begin else "", "…" if begin + _EXCERPT < len(line) else ""
    return f"{before}{shown}{after}"


def _printable(sign: str) -> str:
    return sign if sign.isprintable() else "\ufffd"


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Whether the text may have been valid JSON that continues."""
    if error.doc.lstrip()[:1] not in ("{", "["):
        return False
    is_open_text = error.msg.startswith("Unterminated string")
    return is_open_text or error.pos >= len(error.doc.rstrip())


# ---------------------------------------------------------------------- objects and lists


def value_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Reads a file of objects over many lines and yields (object from 1, object). Raises DataError
    for a value that is not an object.
    """
    with open_text(path) as file:
        text = JsonText(file, path.name)
        number = 0
        while text.peek():
            number += 1
            yield number, _object(text.value(), number, path.name)


def item_rows(path: Path) -> Read | None:
    """Returns a function that reads a .json file from its start and yields (item from 1, object).

    The rows are the items of the file's list, or of the only list of objects inside its object, or
    the rows of an object of columns, or else that object as the only row. Returns None when several
    values follow each other, as with one object per line. Raises DataError for anything else. Only
    one item at a time is in memory, but an object of columns is as a whole.
    """
    with open_text(path) as file:
        text = JsonText(file, path.name)
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


def _refuse_empty_list(text: JsonText, name: str) -> None:
    text.step()
    if text.peek() != "]":
        return
    text.step()
    if not text.peek():
        raise DataError(f"{name} is an empty list; give a file with at least one row.")


def _rows_of_object(text: JsonText, path: Path) -> Read | None:
    """Returns a function that reads the rows of a file that begins with an object, or None when
    more values follow the object.
    """
    members, is_whole = _members(text)
    if is_whole and text.peek():
        return None
    lists = [member.place for member in members if member.is_of_rows]
    are_columns = is_whole and _are_columns(members)
    if len(lists) == 1 and not are_columns and not any(member.is_of_turns for member in members):
        lengths = {member.items or 0 for member in members if member.place < lists[0]}
        return partial(_list_items, path, lists[0], None if is_whole else lengths)
    if not is_whole or text.consumed > _LONGEST_OBJECT:
        raise DataError(
            f"{path.name} is one object that is too large for a row; write a list of objects, one "
            "for each row."
        )
    return partial(_whole, path, are_columns)


class _Member(NamedTuple):
    """What is known of a member of an object without keeping its value."""

    place: int  # index in the object, from 0
    items: int | None  # None if the value is not a list
    is_of_rows: bool = False  # a list of objects, except turns and segments
    is_of_turns: bool = False


def _members(text: JsonText) -> tuple[list[_Member], bool]:
    """Reads the object at `text`. Returns what is known of its members, and whether it was read to
    its end: it is not where it is too large to be in memory as a whole.
    """
    found: dict[str, _Member] = {}  # if a name occurs twice, the last member counts
    left = _MOST_CELLS
    for place, name in enumerate(text.members()):
        if place > _MOST_MEMBERS or text.consumed > _LONGEST_OBJECT:
            return list(found.values()), False
        if text.peek() != "[":
            text.value()
            found[name] = _Member(place, None)
            continue
        items = text.items()
        first = next(items, None)
        found[name] = _member_of(place, name, first)
        count = int(first is not None)
        most = min(left, _MOST_OBJECTS) if found[name].is_of_rows else left
        for _ in items:
            count += 1
            if count > most or text.consumed > _LONGEST_OBJECT:
                return list(found.values()), False
        found[name] = _member_of(place, name, first, count)
        left -= count
    return list(found.values()), True


def _member_of(place: int, name: str, first: Any, items: int | None = None) -> _Member:
    """Returns what the first item of a list shows of it. items: how many it has, where known."""
    is_of_turns = _is_turn(first)
    is_of_rows = isinstance(first, dict) and not is_of_turns and name not in _NO_ROWS
    return _Member(place, items, is_of_rows, is_of_turns)


def _is_turn(item: Any) -> bool:
    return isinstance(item, dict) and any(keys <= item.keys() for keys in _PARTS_OF_A_TURN)


def _are_columns(members: list[_Member]) -> bool:
    """Whether the members are columns: lists of one length above 1. A list of objects beside other
    lists is such a column, as with trees of messages and their names.
    """
    lengths = {member.items for member in members}
    is_plain = not any(member.is_of_turns for member in members)
    return is_plain and len(members) > 1 and len(lengths) == 1 and not lengths & {None, 0, 1}


def _list_items(
    path: Path, member: int | None = None, lengths: set[int] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yields the items of the file's list or, if the file is an object, of its member at index
    `member`. lengths: those of the lists before it, where what follows was not read yet.
    """
    with open_text(path) as file:
        text = JsonText(file, path.name)
        text.peek()
        if member is None:
            yield from _objects(text, path.name)
            if text.peek():
                raise text.continues()
            return
        number = 0
        for place, name in enumerate(text.members()):
            if place != member:
                count = _skipped(text, place, name, path.name, place > member)
                if place > member and count == number:
                    raise _two_lists(path.name, name)
                continue
            for number, row in _objects(text, path.name):
                yield number, row
            if lengths is None:
                return
            if number in lengths:
                raise _two_lists(path.name, name)
        if text.peek():
            raise text.continues()


def _objects(text: JsonText, name: str) -> Iterator[tuple[int, Row]]:
    for number, row in enumerate(text.items(), 1):
        yield number, _object(row, number, name)


def _skipped(text: JsonText, place: int, name: str, file: str, is_behind: bool) -> int:
    """Skips the value of a member beside the list of rows. Returns how many items it has, or 0.
    Raises DataError where it has rows too and is behind the others.
    """
    if text.peek() != "[":
        text.value()
        return 0
    items = text.items()
    first = next(items, None)
    member = _member_of(place, name, first)
    if is_behind and (member.is_of_rows or member.is_of_turns):
        raise _two_lists(file, name)
    return sum((1 for _ in items), start=int(first is not None))


def _two_lists(file: str, name: str) -> DataError:
    """Returns the error for a large object in which another list may have the rows, or a column of
    them.
    """
    return DataError(
        f"{file} has several lists of as many items or of objects, such as {name[:80]!r}, and is "
        "too large to hold columns; write one list of objects, one for each row."
    )


def _object(value: Any, number: int, name: str) -> Row:
    if isinstance(value, dict):
        return value
    raise DataError(
        f"Item {number} of {name} is {_kind(value)}, not an object with named columns; write one "
        "object for each row."
    )


def _whole(path: Path, are_columns: bool) -> Iterator[tuple[int, Row]]:
    """Yields the rows of the file's object if it holds columns, or else the object itself. If
    `are_columns`, every member is a list of one length, also of objects.
    """
    with open_text(path) as file:
        text = JsonText(file, path.name)
        row = {name: text.whole_value() for name in text.members()}
    columns = row if are_columns else {name: _cells(value) for name, value in row.items()}
    lengths = {len(cells) for cells in columns.values() if cells is not None}
    if None in columns.values() or lengths in ({0}, set()):
        yield 1, row
        return
    if len(lengths) > 1:
        raise DataError(
            f"{path.name} is an object of columns that have {min(lengths):,} to {max(lengths):,} "
            "cells; write as many for each column, or a list of objects, one for each row."
        )
    for number, cells in enumerate(zip(*columns.values()), 1):
        yield number, dict(zip(columns, cells))


def _cells(value: Any) -> list[Any] | None:
    """Returns the cells of a column, which is a list or, as pandas writes it, an object whose names
    are the numbers of rows. Returns None if the value is something else, such as a conversation.
    """
    if isinstance(value, dict) and value and all(name.isdecimal() for name in value):
        return list(value.values())
    if isinstance(value, list) and not (value and isinstance(value[0], dict)):
        return value
    return None


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
