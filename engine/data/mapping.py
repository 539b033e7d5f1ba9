"""Where the names of its columns do not tell, a person says which column of a data set is what.
This file offers the columns to choose from, and the best guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig, DataSource
from engine.config.settings import AUTO
from engine.data.formats import (
    ROWS_TO_DETECT,
    ColumnMap,
    first_values,
    fitting_formats,
    looks_like,
    map_columns,
    rivals,
)
from engine.data.preview import Opened, read_parts, shown_rows
from engine.data.sources import Row, Source
from engine.errors import DataError

KINDS = {
    "pair": ("prompt", "completion", "input", "system"),
    "conversation": ("messages", "system", "tools"),
    "text": ("text",),
}
"""A row can be of these kinds, and has these parts, as `data.columns` calls them."""

_EXAMPLE_CHARACTERS = 90
_MOST_COLUMNS = 200
_MOST_VALUES = 4
"""An example shows this many values of a list."""
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
"""A column with one of these words in its name says something about an example, but is no part of
it.
"""
_WORDS = {
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
"""A column with one of these words in its name is likely this part, the likeliest word first."""


def preview(config: DataConfig, tokenizer: Any, rows: int = 5) -> dict[str, Any]:
    """Reads the first 200 rows (of a mix, shared by its sources). Returns what `shown_rows` says of
    them, and `mapping`, what a person can choose.

    `mapping` is that of `columns_to_choose`. Of several sources it is that of the first source that
    would be refused, or else of the first that names columns; None where there is neither. It then
    has `mix`: `sources` (as `data.source`), the `place` of this one among them, its `name`, and
    `format`, that of the others.

    Where rows cannot be read as they are mapped, the answer is `error`, a sentence, and `mapping`.
    Raises DataError where there are no rows to choose from.
    """
    opened: list[Opened] = []
    looked_at: list[tuple[str, dict[str, Any]]] = []
    try:
        for part, source, read in read_parts(config, rows):
            first = [row for _, row, _ in read[:ROWS_TO_DETECT]]
            mapping = columns_to_choose(part, first)
            looked_at.append((source.name, mapping))
            opened.append(Opened(source, _mapped(part, source, first, mapping), read))
        shown = shown_rows(config, tokenizer, rows, opened)
        return shown | {"mapping": _to_choose(config, looked_at)}
    except DataError as error:
        all_were_read = len(looked_at) == len(config.parts())
        one_is_refused = any(mapping["refused"] for _, mapping in looked_at)
        if not all_were_read and not one_is_refused:
            raise  # a source cannot be opened, or has no rows
        return {"error": str(error), "mapping": _to_choose(config, looked_at)}


def _mapped(
    part: DataConfig, source: Source, first: list[Row], mapping: dict[str, Any]
) -> ColumnMap:
    """Returns how the rows of a source are read: as a run would, or by the guess. Completes
    `mapping`. Raises DataError.
    """
    try:
        columns = map_columns(part.format, first, source, part.columns)
    except DataError as error:
        mapping["refused"] = True
        if mapping["state"] != "guess":
            raise
        if part.columns.named() or part.format != AUTO:
            mapping["why"] = str(error)
        columns = map_columns(AUTO, first, source, DataColumns(**mapping["chosen"]))
    mapping |= {"kind": kind_of(columns), "chosen": columns.columns}
    return columns


def _to_choose(
    config: DataConfig, looked_at: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Returns the mapping that a person is shown, of those of the sources. Each has its source's
    name.
    """
    if isinstance(config.source, str):
        return looked_at[0][1]
    refused = [place for place, (_, mapping) in enumerate(looked_at) if mapping["refused"]]
    naming = [
        place for place, part in enumerate(config.source[: len(looked_at)]) if part.columns.named()
    ]
    if not refused and not naming:
        return None
    place = (refused + naming)[0]
    name, mapping = looked_at[place]
    mix = {
        "sources": [_plain(part) for part in config.source],
        "place": place,
        "name": name,
        "format": config.format,
    }
    return mapping | {"mix": mix}


def _plain(part: DataSource) -> dict[str, Any]:
    """Returns a source of a mix as it stands in `data.source`, without what is usual."""
    plain: dict[str, Any] = {"source": part.source}
    if part.weight != 1:
        plain["weight"] = part.weight
    if part.split is not None:
        plain["split"] = part.split
    if part.format is not None:
        plain["format"] = part.format
    columns = part.columns.named()
    if columns:
        plain["columns"] = columns
    return plain


def kind_of(columns: ColumnMap) -> str:
    """Finds the kind of a row with these columns, one of KINDS."""
    return next(kind for kind, parts in KINDS.items() if parts[0] in columns.columns)


def columns_to_choose(config: DataConfig, rows: list[Row]) -> dict[str, Any]:
    """Finds the columns of a source with these first rows, for a person to choose from.

    - `state` is "found" (the names tell), "several" (they tell more than one thing), "named" (the
      settings say so), "guess" (nothing tells, and the rows are shown as the guess reads them) or
      "none" (there is nothing to guess from).
    - `refused` says whether a run would refuse the columns as they are.
    - `why` is the sentence that says so, where the settings ask for something that is not there.
    - `kind` is one of `kinds`, which has the parts of each.
    - `chosen` has the column of each part.
    - `columns` has each column as `{name, example}`.
    """
    names = first_values(rows)
    state, chosen = _choice(config, rows, names)
    columns = [
        {"name": name, "example": _example(value)}
        for name, value in list(names.items())[:_MOST_COLUMNS]
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
    config: DataConfig, rows: list[Row], names: dict[str, Any]
) -> tuple[str, dict[str, str]]:
    """Returns `state` and `chosen` of `columns_to_choose`."""
    named = config.columns.named()
    fitting = fitting_formats(config.format, names, named)
    if fitting:
        chosen = fitting[0][1]
        if named:
            return "named", chosen
        if config.format == AUTO and _is_ambiguous(fitting, names):
            return "several", chosen
        return "found", chosen
    # What was named and is there stays chosen: a guess is only made where nothing is.
    chosen = {part: column for part, column in named.items() if column in names}
    if chosen:
        return "named", chosen
    fitting = fitting_formats(AUTO, names, {})
    chosen = fitting[0][1] if fitting else guessed(rows)
    return "guess" if chosen else "none", chosen


def _is_ambiguous(fitting: list[tuple[str, dict[str, str]]], names: dict[str, Any]) -> bool:
    """Whether the columns could as well be read in another way than as the first fitting format."""
    chosen = fitting[0][1]
    for name, columns in fitting:
        takes_others = set(columns.values()) != set(chosen.values())
        if takes_others and looks_like(name, columns, names):
            return True
    return rivals(chosen, names)


def _kind_chosen(chosen: dict[str, str]) -> str:
    """Returns the kind that one of its first two parts shows, or a pair where none does."""
    for kind, parts in KINDS.items():
        second = parts[:2][-1]
        if parts[0] in chosen or second in chosen:
            return kind
    return "pair"


# ---------------------------------------------------------------------- the guess


def guessed(rows: list[Row]) -> dict[str, str]:
    """Returns the likeliest column for each part of an example, by names and values. It is empty
    where no column holds a text or turns.
    """
    names = first_values(rows)
    for name, value in names.items():
        if _has_turns(value):
            return {"messages": name}
    lengths = _text_lengths(rows, names)
    texts = [name for name in lengths if not _words(name) & _SIDE_COLUMNS] or list(lengths)
    if not texts:
        return {}
    if len(texts) == 1:
        return {"text": texts[0]}
    found: dict[str, str] = {}
    for part, words in _WORDS.items():
        free = [name for name in texts if name not in found.values()]
        column = _likeliest(words, free)
        if column is not None:
            found[part] = column
    # The longest texts take the parts that no word tells, in the order of the file: questions stand
    # before their answers.
    free = [name for name in texts if name not in found.values()]
    missing = [part for part in ("prompt", "completion") if part not in found]
    longest = sorted(free, key=lambda name: -lengths[name])[: len(missing)]
    found |= dict(zip(missing, [name for name in free if name in longest]))
    return found if {"prompt", "completion"} <= set(found) else {"text": texts[0]}


def _has_turns(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return "role" in value[0] or "from" in value[0]


def _text_lengths(rows: list[Row], names: dict[str, Any]) -> dict[str, int]:
    """Returns how many characters each column of texts has in these rows."""
    lengths = {}
    for name, value in names.items():
        if isinstance(value, str) and value.strip():
            texts = [row[name] for row in rows if isinstance(row.get(name), str)]
            lengths[name] = sum(map(len, texts))
    return lengths


def _likeliest(words: Collection[str], names: list[str]) -> str | None:
    """Returns the first name that has the first of `words` that any name has."""
    for word in words:
        for name in names:
            if word in _words(name):
                return name
    return None


def _words(name: str) -> set[str]:
    """Returns the words of a column's name. user_prompt, userPrompt and "User prompt" have the
    same.
    """
    return set(re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))


def _example(value: Any) -> str:
    """Returns a value in one short line."""
    if isinstance(value, list):
        value = value[:_MOST_VALUES]
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join(text[: 4 * _EXAMPLE_CHARACTERS].split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else f"{line[:_EXAMPLE_CHARACTERS]} …"
