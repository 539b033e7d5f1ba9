"""Which column of a data set is what, where a person has to say it: what there is to choose from,
and the best guess.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig, DataSource
from engine.config.settings import AUTO
from engine.data.encoded import Numbered
from engine.data.formats import (
    ROWS_TO_DETECT,
    ColumnMap,
    first_values,
    fitting_formats,
    looks_like,
    map_columns,
    rivals,
)
from engine.data.preview import read_parts, shown_rows
from engine.data.sources import Row, Source
from engine.errors import DataError

KINDS = {
    "pair": ("prompt", "completion", "input", "system"),
    "conversation": ("messages", "system", "tools"),
    "text": ("text",),
}
"""What a row can be, and its parts, as `data.columns` calls them."""

_EXAMPLE_CHARACTERS = 90
_MOST_COLUMNS = 200
_MOST_VALUES = 4
"""Of a list, that an example shows."""
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
"""Names of columns that say something about an example and are none of it."""
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
"""Words in the names of columns, the likeliest first."""


def preview(config: DataConfig, tokenizer: Any, rows: int = 5) -> dict[str, Any]:
    """Read the first 200 rows (of a mix, shared by its sources): what `shown_rows` gives of them,
    and `mapping`, what a person can choose.

    `mapping` has `state` (found: the names tell; several: they tell more than one thing; named: the
    settings say so; guess: nothing tells, and the rows are shown as they would be read; none: there
    is nothing to guess from), `refused` (whether a run would refuse the columns as they are), `why`
    (where the settings ask for something that is not there, the sentence that says so), `kind` (one
    of `kinds`, which has the parts of each), `chosen` (part to column) and `columns` (each `{name,
    example}`). Of several sources it is that of the first that would be refused, then of the first
    that names columns (None where there is neither), and has `mix`: `sources` (as `data.source`),
    the `place` of this one among them, its `name`, and `format`, that of the others. Where rows
    cannot be read as they are mapped the answer is `error`, a sentence, and `mapping`. Raises
    DataError where there are no rows to choose from.
    """
    opened: list[tuple[Source, ColumnMap, list[Numbered]]] = []
    looked_at: list[tuple[str, dict[str, Any]]] = []
    try:
        for part, source, read in read_parts(config, rows):
            first = [row for _, row, _ in read[:ROWS_TO_DETECT]]
            mapping = columns_to_choose(part, first)
            looked_at.append((source.name, mapping))
            opened.append((source, _mapped(part, source, first, mapping), read))
        return shown_rows(config, tokenizer, rows, opened) | {
            "mapping": _to_choose(config, looked_at)
        }
    except DataError as error:
        if len(looked_at) < len(config.parts()) and not any(
            mapping["refused"] for _, mapping in looked_at
        ):
            raise  # a source that cannot be opened, or has no rows
        return {"error": str(error), "mapping": _to_choose(config, looked_at)}


def _mapped(
    part: DataConfig, source: Source, first: list[Row], mapping: dict[str, Any]
) -> ColumnMap:
    """How the rows of a source are read: as a run would, or by the guess. Completes `mapping`.
    Raises DataError.
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
    """The mapping that a person is shown, of those of the sources, each with its source's name."""
    if isinstance(config.source, str):
        return looked_at[0][1]
    refused = [place for place, (_, mapping) in enumerate(looked_at) if mapping["refused"]]
    told = [
        place for place, part in enumerate(config.source[: len(looked_at)]) if part.columns.named()
    ]
    for place in (refused + told)[:1]:
        name, mapping = looked_at[place]
        return mapping | {
            "mix": {
                "sources": [_plain(part) for part in config.source],
                "place": place,
                "name": name,
                "format": config.format,
            }
        }
    return None


def _plain(part: DataSource) -> dict[str, Any]:
    """A source of a mix as it stands in `data.source`, without what is usual."""
    named = part.columns.named()
    return (
        {"source": part.source}
        | ({"weight": part.weight} if part.weight != 1 else {})
        | {
            name: value
            for name in ("split", "format")
            if (value := getattr(part, name)) is not None
        }
        | ({"columns": named} if named else {})
    )


def kind_of(columns: ColumnMap) -> str:
    """Which of KINDS a row is that has these columns."""
    return next(kind for kind, parts in KINDS.items() if parts[0] in columns.columns)


def columns_to_choose(config: DataConfig, rows: list[Row]) -> dict[str, Any]:
    """`mapping` of `preview` for the first rows of a source."""
    names, named = first_values(rows), config.columns.named()
    fitting = fitting_formats(config.format, names, named)
    if fitting:
        chosen = fitting[0][1]
        good = [columns for name, columns in fitting if looks_like(name, columns, names)]
        several = any(set(columns.values()) != set(chosen.values()) for columns in good) or rivals(
            chosen, names
        )
        state = "named" if named else "several" if config.format == AUTO and several else "found"
    else:
        # What was named and is there stays chosen: a guess is only made where nothing is.
        chosen = {part: column for part, column in named.items() if column in names}
        state = "named"
        if not chosen:
            fitting = fitting_formats(AUTO, names, {})
            chosen = fitting[0][1] if fitting else guessed(rows)
            state = "guess" if chosen else "none"
    kind = next(
        (kind for kind, parts in KINDS.items() if parts[0] in chosen or parts[:2][-1] in chosen),
        "pair",
    )
    columns = [
        {"name": name, "example": _example(value)}
        for name, value in list(names.items())[:_MOST_COLUMNS]
    ]
    kinds = {name: list(parts) for name, parts in KINDS.items()}
    return {
        "state": state,
        "refused": False,
        "why": "",
        "kind": kind,
        "kinds": kinds,
        "chosen": chosen,
        "columns": columns,
    }


def guessed(rows: list[Row]) -> dict[str, str]:
    """The likeliest column for each part of an example, by names and values; empty where no column
    holds a text or turns.
    """
    names = first_values(rows)
    turns = next(
        (
            name
            for name, value in names.items()
            if isinstance(value, list)
            and value
            and isinstance(value[0], dict)
            and {"role", "from"} & {*value[0]}
        ),
        None,
    )
    if turns is not None:
        return {"messages": turns}
    lengths = {
        name: sum(len(row[name]) for row in rows if isinstance(row.get(name), str))
        for name, value in names.items()
        if isinstance(value, str) and value.strip()
    }
    texts = [name for name in lengths if not _words(name) & _SIDE_COLUMNS] or list(lengths)
    if len(texts) < 2:
        return {"text": texts[0]} if texts else {}
    found: dict[str, str] = {}
    for part, words in _WORDS.items():
        column = next(
            (
                name
                for word in words
                for name in texts
                if word in _words(name) and name not in found.values()
            ),
            None,
        )
        if column is not None:
            found[part] = column
    # Without a word that tells, the longest texts, in the order of the file: questions stand before
    # their answers.
    rest = [name for name in texts if name not in found.values()]
    missing = [part for part in ("prompt", "completion") if part not in found]
    longest = sorted(rest, key=lambda name: -lengths[name])[: len(missing)]
    found |= dict(zip(missing, [name for name in rest if name in longest]))
    return found if {"prompt", "completion"} <= {*found} else {"text": texts[0]}


def _words(name: str) -> set[str]:
    """The words of a column's name: user_prompt, userPrompt and "User prompt" have the same."""
    return set(re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()))


def _example(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, list):
        value = value[:_MOST_VALUES]
    text = (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else json.dumps(value, ensure_ascii=False, default=str)
    )
    line = " ".join(text[: 4 * _EXAMPLE_CHARACTERS].split())
    return line if len(line) <= _EXAMPLE_CHARACTERS else f"{line[:_EXAMPLE_CHARACTERS]} …"
