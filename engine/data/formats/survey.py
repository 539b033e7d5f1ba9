"""What the columns of a data set hold, over all of its rows.

A format is found from the names of the columns and from the kinds of their values. Both are those
of every row, so that they do not depend on which rows come first: the kind of a column is the kind
of most of its values. Values are not kept, only how many of each kind there are.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import msgspec

from engine.data.formats.flags import ANSWER_FLAGS, marks_answers
from engine.data.formats.refused import LABEL, marks_desirable
from engine.data.formats.roles import plain_name
from engine.data.formats.turns import as_turns
from engine.data.formats.unknown_flags import KeySurvey
from engine.data.formats.values import is_blank, parsed_json, type_text
from engine.data.sources.json_files import Row
from engine.errors import DataError

MOST_COLUMNS = 20_000
"""Number of columns above which rows name their columns after what they hold."""

_KEYS = frozenset({"role", "from", "content", "value", "parts", "text", "label", "replies"})
"""Keys of objects by which formats are distinguished. Others do not matter."""
_OTHER_KEY = "other"
_TEXT = "text"
_TEXT_KIND = '"text"'
_FIRST = 8
"""Number of first items of a list by which its kind is found, at most."""
_EXAMPLE_CHARACTERS = 90
_EXAMPLE_ITEMS = 4


@dataclass
class ColumnSurvey:
    """What one column holds. A value that is blank counts for nothing."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Number of values of each kind. A kind is the JSON of a small value like those that it stands
    for: `[{"role": "text"}]` for turns with a role.
    """
    characters: int = 0
    """Characters of all values that are text."""
    marks: int = 0
    """In a column named label, values that mark an answer as good or bad."""
    example: str = ""
    """The first value as one short line."""
    is_label: bool = False
    """The column's name is label."""
    is_flag: bool = False
    """A value selects which answers of its row are trained."""

    def add(self, value: Any) -> None:
        """Counts a value."""
        kind = _kind(value)
        if kind is None:
            return
        self.kinds[kind] += 1
        if isinstance(value, str):
            self.characters += len(value)
        if not self.example:
            self.example = example_of_value(value)
        if self.is_label:
            self.marks += marks_desirable(value)

    def notice_flag(self, name: str, value: Any) -> None:
        """Notices whether a value of the column `name` selects which answers are trained."""
        self.is_flag = self.is_flag or marks_answers(name, value)

    def join(self, other: ColumnSurvey) -> None:
        """Counts the values of another column of this name."""
        self.kinds.update(other.kinds)
        self.characters += other.characters
        self.marks += other.marks
        self.example = self.example or other.example
        self.is_flag = self.is_flag or other.is_flag

    @property
    def values(self) -> list[Any]:
        """A small value of each kind, of the kind of most values first. Kinds of as many values
        come in the order of their JSON.
        """
        kinds = sorted(self.kinds.items(), key=lambda item: (-item[1], item[0]))
        return [json.loads(kind) for kind, _ in kinds]

    @property
    def value(self) -> Any:
        """A small value of the kind that most values are of, or None if all are blank."""
        return next(iter(self.values), None)


@dataclass
class Survey:
    """What the columns of some rows hold."""

    rows: int = 0
    columns: dict[str, ColumnSurvey] = field(default_factory=dict)
    """Columns in the order in which the rows have them."""
    keys: KeySurvey = field(default_factory=KeySurvey)
    """What the keys of rows and of their turns hold, of which some may be flags."""
    is_whole: bool = True
    """The rows are all rows of their source."""

    @property
    def names(self) -> dict[str, Any]:
        """Every column, with a value of the kind that most of its values are of."""
        return {name: column.value for name, column in self.columns.items()}

    def add(self, row: Row) -> None:
        """Adds a row. Raises DataError where rows have more than `MOST_COLUMNS` columns."""
        self.rows += 1
        self.keys.add(row)
        for name, value in row.items():
            column = self.columns.get(name)
            if column is None:
                if not isinstance(name, str):
                    continue
                column = self._column(name)
            if value is not None:
                column.add(value)
                if not column.is_flag and plain_name(name) in ANSWER_FLAGS:
                    column.notice_flag(name, value)

    def join(self, other: Survey) -> None:
        """Adds the rows of another survey."""
        self.rows += other.rows
        self.is_whole = self.is_whole and other.is_whole
        self.keys = self.keys.joined(other.keys)
        for name, column in other.columns.items():
            self._column(name).join(column)

    def flags(self) -> list[str]:
        """Returns the columns that select in some rows which answers are trained."""
        return [name for name, column in self.columns.items() if column.is_flag]

    def marks(self) -> dict[str, set[bool]]:
        """Returns the columns named label, each with whether its values are marks for good and bad
        answers: true, false or both.
        """
        found = {}
        for name, column in self.columns.items():
            if column.is_label and column.kinds:
                counts = {True: column.marks, False: column.kinds.total() - column.marks}
                found[name] = {is_mark for is_mark, count in counts.items() if count}
        return found

    def to_plain(self) -> dict[str, Any]:
        """Returns the survey as values of JSON."""
        columns = {name: vars(column) for name, column in self.columns.items()}
        return {"rows": self.rows, "columns": columns, "keys": self.keys.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Survey:
        """Returns the survey of which `to_plain` returned the values."""
        columns = {
            name: ColumnSurvey(**values | {"kinds": Counter(values["kinds"])})
            for name, values in plain["columns"].items()
        }
        return cls(plain["rows"], columns, KeySurvey.from_plain(plain["keys"]))

    def _column(self, name: str) -> ColumnSurvey:
        """Returns what a column holds, of which there may have been no row yet."""
        if name not in self.columns:
            if len(self.columns) >= MOST_COLUMNS:
                raise DataError(
                    f"The rows have more than {MOST_COLUMNS:,} different columns; give each row "
                    "the same few columns."
                )
            self.columns[name] = ColumnSurvey(is_label=name.lower() == LABEL)
        return self.columns[name]


def survey_of(rows: Survey | Iterable[Row]) -> Survey:
    """Returns the survey of some rows."""
    if isinstance(rows, Survey):
        return rows
    survey = Survey()
    for row in rows:
        survey.add(row)
    return survey


# ---------------------------------------------------------------------- the kind of a value


def _kind(value: Any) -> str | None:
    """Returns the kind of a value, or None if it is blank."""
    if type(value) is str and value and value[0] not in "[{" and not value[0].isspace():
        return _TEXT_KIND  # most values are such, so they are tested first
    if type(value) is list and value and type(value[0]) is dict:
        return _kind_of_objects(tuple((key, type(item)) for key, item in value[0].items()))
    small = _small(value)
    return None if small is None else json.dumps(small, sort_keys=True)


@functools.lru_cache(1 << 12)
def _kind_of_objects(items: tuple[tuple[Any, type], ...]) -> str:
    """Returns the kind of a list whose first item is an object with these keys, and values of
    these types.
    """
    keys = {key: _item(kind) for key, kind in items if key in _KEYS and kind is not NoneType}
    return json.dumps([keys or {_OTHER_KEY: 1}], sort_keys=True)


def _small(value: Any) -> Any:
    """Returns a small value of JSON that every format reads as it reads `value`, or None if it is
    blank.
    """
    if is_blank(value):
        return None
    if isinstance(value, str):
        parsed = _parsed(value)
        return _TEXT if parsed is None else json.dumps(_small_json(parsed), sort_keys=True)
    if isinstance(value, list | tuple | dict):
        return _small_json(value)
    return value if isinstance(value, bool) else 1


def _parsed(text: str) -> Any:
    """Returns the list or object that a text holds as JSON, or None."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return parsed_json(text)


def _small_json(value: Any) -> Any:
    """Returns a list or an object without what no format uses."""
    if isinstance(value, dict):
        keys = _KEYS.intersection(value)
        if value and as_turns(value) is None:
            keys -= {"role", "from"}  # lists of different lengths are no turns
        small = {key: _item(type(value[key])) for key in keys if value[key] is not None}
        return small or ({_OTHER_KEY: 1} if value else {})
    if not value:
        return []
    first = value[0]
    if isinstance(first, dict):
        return json.loads(_kind_of_objects(tuple((key, type(at)) for key, at in first.items())))
    items = value[:_FIRST]
    if all(isinstance(item, int) for item in items):
        return [1]
    return [_TEXT if isinstance(first, int) else _item(type(first))]


def _item(kind: type) -> Any:
    """Returns what a value within a list or an object is: text, a list, an object or a number."""
    if kind in (str, NoneType):
        return _TEXT
    if kind in (list, tuple):
        return [_TEXT]
    return {_OTHER_KEY: 1} if kind is dict else 1


# ---------------------------------------------------------------------- a value, shown


def example_of_value(value: Any) -> str:
    """Returns a value as one short line of text."""
    if isinstance(value, list):
        value = value[:_EXAMPLE_ITEMS]
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    else:
        text = _as_json(value)
    line = " ".join(text[: 4 * _EXAMPLE_CHARACTERS].encode(errors="replace").decode().split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else f"{line[:_EXAMPLE_CHARACTERS]} …"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    except (ValueError, RecursionError):  # too deep, or a number of thousands of digits
        return type_text(value)
