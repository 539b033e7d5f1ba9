"""The formats that the columns of a source fit, by their names and by the kinds of their values
(`survey.py`).
"""

from __future__ import annotations

from typing import Any

from engine.config.settings import AUTO
from engine.data.formats.all_formats import FORMATS
from engine.data.formats.format import Format, Names, is_text, is_text_or_turns
from engine.data.formats.survey import Survey
from engine.data.formats.turns import has_turns
from engine.data.formats.values import is_blank, parsed_list
from engine.data.sources.open_source import Source

MAIN_PARTS = ("messages", "prompt", "completion", "text", "chosen", "rejected")
"""Parts that at least one format requires."""
Fit = tuple[str, dict[str, str]]
"""Name of a format and the column of each of its parts."""


def as_registered(
    wanted: str, source: Source | None, names: dict[str, Any], named: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """Returns the wanted format and the named columns, with those of a registry where the user
    names none. Columns that a row may go without are left out where no row has them.
    """
    if source is None or source.format is None or named or wanted not in (AUTO, source.format):
        return wanted, named
    required = FORMATS[source.format].required
    columns = {
        part: column
        for part, column in source.columns.items()
        if part in required or column in names
    }
    return source.format, columns


def fitting_formats(wanted: str, survey: Survey, named: dict[str, str]) -> list[Fit]:
    """Returns every format that the columns of `survey` can be read as, best first. `named` are the
    columns that the user named, by part.
    """
    names = survey.names
    formats = list(FORMATS.values()) if wanted == AUTO else [FORMATS[wanted]]
    if named and "input" not in named:
        # A user who names a prompt column wants it used unchanged, so alpaca comes last.
        formats.sort(key=lambda made: made.name == "alpaca")
    fitting = []
    for made in formats:
        columns = _columns_of(made, survey, named)
        if columns is None or (wanted == AUTO and _is_weak(made, columns, names, named)):
            continue
        fitting.append((made.name, columns))
    # A format of which only the names fit comes later. Its errors then name the row that has the
    # wrong type.
    return sorted(fitting, key=lambda fit: not looks_like(fit[0], fit[1], names))


def looks_like(name: str, columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Returns whether most values of a format's required parts are what it has."""
    made = FORMATS[name]
    return made.looks_like({part: names[columns[part]] for part in made.required})


def are_ambiguous(fitting: list[Fit], names: dict[str, Any]) -> bool:
    """Returns whether the columns could equally well be read in another way than as the first
    fitting format. A format that uses fewer of the same columns is no other way.
    """
    chosen = set(fitting[0][1].values())
    for name, columns in fitting[1:]:
        if not set(columns.values()) <= chosen and looks_like(name, columns, names):
            return True
    return _has_rivals(fitting[0][1], names)


def _has_rivals(columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Returns whether a main part could equally well be in another column, which has a usual name
    for that part, holds the same kind of value and is not used in `columns`.
    """
    for part in MAIN_PARTS:
        if part not in columns:
            continue
        usual = {name.lower() for made in FORMATS.values() for name in made.required.get(part, ())}
        for other, value in names.items():
            if other in columns.values() or other.lower() not in usual:
                continue
            if has_turns(value) == has_turns(names[columns[part]]):
                return True
    return False


def _columns_of(made: Format, survey: Survey, named: dict[str, str]) -> dict[str, str] | None:
    """Returns the column of each part if rows are read as this format, or None if a required part
    has no column.
    """
    names = survey.columns
    has_named_parts = set(named) <= made.parts
    has_named_columns = set(named.values()) <= set(names)
    if not has_named_parts or not has_named_columns:
        return None
    columns: dict[str, str] = {}
    for part, usual in made.required.items():
        free = [name for name in names if name not in {*named.values(), *columns.values()}]
        column = named[part] if part in named else _first_of(usual, free)
        if column is None:
            return None
        columns[part] = column
    if named:
        return columns | named
    for part, usual in made.optional.items():
        free = [name for name in names if name not in columns.values()]
        column = _first_of(usual, free)
        if column is None:
            continue
        # Where some values are what the part holds, reading the others refuses their rows.
        if any(_may_be(part, value) for value in survey.columns[column].values or [None]):
            columns[part] = column
    return columns


def _may_be(part: str, value: Any) -> bool:
    """Whether a value is what an optional part holds. A column of another kind happens to have its
    name.
    """
    value = parsed_list(value)
    if part == "history":
        return is_blank(value) or isinstance(value, list | tuple)
    if part == "tools":
        # Text is tools whose JSON is broken, perhaps in this row alone: reading them refuses it.
        return is_blank(value) or isinstance(value, str | list | tuple | dict)
    if part == "prompt":
        return is_text_or_turns(value) or is_blank(value)
    if part == "system":
        return is_text(value) or isinstance(value, list | tuple | dict)
    if part == "input":
        return is_text(value) or isinstance(value, dict)
    return True


def _is_weak(
    made: Format, columns: dict[str, str], names: dict[str, Any], named: dict[str, str]
) -> bool:
    """Whether a format fits by a name alone that is too common to mean it."""
    weak = [
        names[column]
        for part, column in columns.items()
        if part in made.required and part not in named and column.lower() in made.weak
    ]
    if not weak or made.is_fixed:
        return bool(weak) and not looks_like(made.name, columns, names)
    return not looks_like(made.name, columns, names) or not (
        made.name == "gemini" or all(map(is_text_or_turns, weak))
    )


def _first_of(usual: Names, there: list[str]) -> str | None:
    """Returns the first usual name that is there, with whatever capital letters."""
    in_any_case: dict[str, str] = {}
    for column in sorted(there):  # not as the rows happen to have them
        in_any_case.setdefault(column.lower(), column)
    for name in usual:
        found = name if name in there else in_any_case.get(name.lower())
        if found is not None:
            return found
    return None
