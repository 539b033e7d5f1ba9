"""Checks, copies and names of the values of a row, whatever a file holds."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from typing import Any

from engine.errors import DataError

_DEEPEST = 64
"""Levels of nesting that a value may have. Chat templates walk it recursively."""
_LONGEST_NUMBER = 1024
"""Largest number of bits of a whole number. Python writes none of more than 4,300 digits."""
_MOST_NAMES = 20
_MOST_QUOTED = 60
_TYPE_NAMES = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    bytes: "binary data",
    dt.datetime: "a date",
    dt.date: "a date",
    dt.time: "a time",
}


class BrokenText(Exception):
    """Raised for a text with half of a surrogate pair, as scraped JSON sometimes has. No tokenizer
    accepts it.
    """


def valid_text(text: str) -> str:
    """Checks `text` and returns it. Raises BrokenText if it is not valid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BrokenText from None
    return text


def valid_tree(value: Any, place: str, depth: int = 0) -> Any:
    """Returns a copy of a nested value, of nothing but what JSON has: dates become text. Raises
    BrokenText if a text in it is not valid Unicode, and DataError, with `place`, for what no chat
    template can write.
    """
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, int):
        if value.bit_length() > _LONGEST_NUMBER:
            raise DataError(f"A number in {place} is too long to be written; write it as text.")
        return value
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if not isinstance(value, dict | list | tuple):
        raise DataError(f"There is {type_text(value)} in {place}; write it as text.")
    if depth == _DEEPEST:
        raise DataError(
            f"There are more than {_DEEPEST} lists or objects within each other in {place}; write "
            "the value as text."
        )
    if not isinstance(value, dict):
        return [valid_tree(item, place, depth + 1) for item in value]
    found = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise DataError(f"An object in {place} has a key that is {type_text(key)}, not text.")
        found[valid_text(key)] = valid_tree(item, place, depth + 1)
    return found


def without_nulls(value: Any, depth: int = 0) -> Any:
    """Returns a value without the members of its objects that are null, as `datasets` fills them in
    where the objects of a column have different keys. Nulls in lists, in JSON text and below the
    levels that `valid_tree` accepts stay.
    """
    if depth > _DEEPEST:
        return value
    if isinstance(value, dict):
        return {
            key: without_nulls(item, depth + 1) for key, item in value.items() if item is not None
        }
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [without_nulls(item, depth + 1) for item in value]
    return value


def parsed_json(text: str) -> Any:
    """Returns the value of a JSON text, or None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parsed_list(value: Any) -> Any:
    """Returns the list or object that a text holds as JSON, as tables do; other values are returned
    unchanged.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = parsed_json(value)
        return value if parsed is None else parsed
    return value


def is_blank(value: Any) -> bool:
    """Returns whether a value is nothing, white space, or an empty list or object."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | dict | bytes) and not value)


def type_text(value: Any) -> str:
    """Returns the type of a value, as an error names it."""
    if value is None:
        return "nothing"
    return _TYPE_NAMES.get(type(value), f"a value of the type {type(value).__name__}")


def shown(value: Any) -> str:
    """Returns a value as a few characters of an error."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        return "a very large number"
    if value is None or isinstance(value, bool | int | float | str):
        text = json.dumps(value) if not isinstance(value, str) else repr(value)
        return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."
    return type_text(value)


def legible(name: str) -> str:
    """Returns the name of a column on one short line, without broken characters."""
    line = " ".join(name[: 4 * _MOST_QUOTED].encode(errors="replace").decode().split())
    return line[:_MOST_QUOTED]


def listed(names: Iterable[str]) -> str:
    """Returns the names of columns for an error, at most 20."""
    known = [legible(name) for name in names]
    if not known:
        return "none"
    more = len(known) - _MOST_NAMES
    return ", ".join(known[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
