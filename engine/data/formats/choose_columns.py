"""Columns for a person to choose from, with the best guess, where the column names of a data set do
not show what each column holds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig
from engine.config.settings import AUTO
from engine.data.formats.detect import are_ambiguous, as_registered, fitting_formats
from engine.data.formats.formats import ColumnMap
from engine.data.formats.survey import Survey, survey_of
from engine.data.formats.turns import has_turns
from engine.data.sources.json_files import Row
from engine.data.sources.open_source import Source

KINDS = {
    "pair": ("prompt", "completion", "input", "history", "system"),
    "conversation": ("messages", "system", "tools"),
    "preference": ("chosen", "rejected", "prompt", "system", "tools"),
    "text": ("text",),
    "fixed": (),
}
"""Kinds of rows. Each lists its parts, with the names from `data.columns`. The columns of a fixed
kind cannot be chosen: they always have the same names.
"""

_MOST_COLUMNS = 200
_SIDE_COLUMNS = {
    "id",
    "idx",
    "index",
    "uuid",
    "key",
    "url",
    "link",
    "date",
    "time",
    "timestamp",
    "lang",
    "language",
    "source",
    "split",
    "category",
    "author",
    "name",
    "tag",
    "tags",
    "license",
    "score",
    "rating",
    "note",
    "notes",
    "comment",
    "comments",
    "remark",
    "remarks",
    "meta",
    "metadata",
}
"""Words in the name of a column that describes an example, but is not part of it."""
_IDENTITY = {"id", "idx", "index", "uuid", "key", "url", "link", "timestamp", "split"}
"""Words in the name of a column that is never guessed to be a part."""
_PART_NAMES = {
    "system": ("system",),
    "completion": (
        "completion",
        "response",
        "answer",
        "output",
        "reply",
        "target",
        "assistant",
        "gpt",
        "bot",
        "label",
        "solution",
        "summary",
        "translation",
        "chosen",
        "antwort",
    ),
    "prompt": (
        "prompt",
        "question",
        "instruction",
        "query",
        "input",
        "user",
        "human",
        "ask",
        "request",
        "problem",
        "document",
        "article",
        "frage",
    ),
}
"""Words in the name of a column that probably holds this part. The likeliest word comes first."""


def kind_of(columns: ColumnMap) -> str:
    """Returns the kind, one of KINDS, of a row with these columns."""
    if columns.format == "preference":  # it has a prompt too, as a pair has
        return columns.format
    for kind, parts in KINDS.items():
        if parts and parts[0] in columns.columns:
            return kind
    return "fixed"


def columns_to_choose(
    config: DataConfig, rows: Survey | Iterable[Row], source: Source | None = None
) -> dict[str, Any]:
    """Returns the columns of a source with these rows, for a person to choose from.

    - `state` is "found" (the column names are clear), "several" (they fit more than one reading),
      "named" (the settings name columns), "guess" (nothing fits, and the rows are read according to
      a guess) or "none" (there is nothing to guess from).
    - `refused`: whether a run would refuse these columns.
    - `why` is the error sentence if the settings name something that does not exist, and empty
      otherwise.
    - `kind` is one of `kinds`, which lists the parts of each kind.
    - `chosen` maps each part to its column.
    - `columns` lists each column as `{name, example}`.
    """
    survey = survey_of(rows)
    state, chosen = _choice(config, survey, source)
    columns = [
        {"name": name.encode(errors="replace").decode(), "example": column.example}
        for name, column in list(survey.columns.items())[:_MOST_COLUMNS]
    ]
    return {
        "state": state,
        "refused": False,
        "why": "",
        "kind": _kind_chosen(chosen),
        "kinds": {name: list(parts) for name, parts in KINDS.items()},
        "chosen": chosen,
        "columns": columns,
    }


def _choice(
    config: DataConfig, survey: Survey, source: Source | None
) -> tuple[str, dict[str, str]]:
    """Returns `state` and `chosen` of `columns_to_choose`."""
    named = config.columns.named()
    names = survey.names
    wanted, columns = as_registered(config.format, source, names, named)
    fitting = fitting_formats(wanted, survey, columns)
    if fitting:
        chosen = fitting[0][1]
        if named:
            return "named", chosen
        if wanted == AUTO and are_ambiguous(fitting, names):
            return "several", chosen
        return "found", chosen
    # Named columns that exist stay chosen. A guess is made only if there are none.
    chosen = {part: column for part, column in named.items() if column in names}
    if chosen:
        return "named", chosen
    fitting = fitting_formats(AUTO, survey, {})
    if not fitting:
        chosen = guessed(survey)
        return "guess" if chosen else "none", chosen
    # The columns of a fixed format are found again by their names; nobody can name them.
    can_be_named = {part.name for part in dataclasses.fields(DataColumns)}
    found = {part: column for part, column in fitting[0][1].items() if part in can_be_named}
    return "guess", found


def _kind_chosen(chosen: dict[str, str]) -> str:
    """Returns the first kind of which one of the first two parts is chosen, or "pair" if there is
    no such kind. A preference comes first: it has a prompt too, as a pair has.
    """
    for kind, parts in sorted(KINDS.items(), key=lambda item: item[0] != "preference"):
        if any(part in chosen for part in parts[:2]):
            return kind
    return "pair"


# ---------------------------------------------------------------------- the guess


def guessed(rows: Survey | Iterable[Row]) -> dict[str, str]:
    """Returns the likeliest column for each part of an example, judged by names and values. The
    result is empty if no column holds text or turns.
    """
    survey = survey_of(rows)
    for name, value in survey.names.items():
        if has_turns(value):
            return {"messages": name}
    lengths = {
        name: column.characters
        for name, column in survey.columns.items()
        if isinstance(column.value, str)
    }
    texts = [name for name in lengths if not _words(name) & _SIDE_COLUMNS]
    texts = texts or [name for name in lengths if not _words(name) & _IDENTITY]
    texts = [name for name in texts if name] or texts  # settings cannot name a column without one
    if not texts:
        return {}
    if len(texts) == 1:
        return {"text": texts[0]}
    found: dict[str, str] = {}
    for part, words in _PART_NAMES.items():
        free = [name for name in texts if name not in found.values()]
        column = _likeliest(words, free)
        if column is not None:
            found[part] = column
    # The columns with the longest texts become the parts that no word has matched, in file order,
    # because questions usually precede their answers.
    free = [name for name in texts if name not in found.values()]
    missing = [part for part in ("prompt", "completion") if part not in found]
    longest = sorted(free, key=lambda name: -lengths[name])[: len(missing)]
    found |= dict(zip(missing, [name for name in free if name in longest]))
    return found if {"prompt", "completion"} <= set(found) else {"text": texts[0]}


def _likeliest(words: Collection[str], names: list[str]) -> str | None:
    """Goes through `words` in order and returns the first name that contains one."""
    for word in words:
        for name in names:
            if word in _words(name):
                return name
    return None


def _words(name: str) -> set[str]:
    """Returns the words in a column's name. user_prompt, userPrompt and "User prompt" have the same
    words.
    """
    return set(re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))
