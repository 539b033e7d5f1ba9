"""The preview shows the first rows of a data set before a run, and offers the choice of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig, DataSource
from engine.config.settings import AUTO
from engine.data.batches.preview_rows import Opened, plain_rows, shown_rows
from engine.data.formats.choose_columns import columns_to_choose, kind_of
from engine.data.formats.formats import ColumnMap
from engine.data.formats.survey import Survey
from engine.data.formats.unknown_flags import UnknownFlags
from engine.data.sources.kinds import without_rows
from engine.data.sources.open_source import Source, open_source, refuse_missing_file
from engine.data.tokens.column_survey import (
    ROWS_READ_FIRST,
    columns_of,
    first_survey,
    map_first,
    note_on,
)
from engine.data.tokens.encoded import Numbered, numbered_rows
from engine.errors import DataError
from engine.paths import resolve_source

_MOST_CHARACTERS = 4 << 20
"""Number of characters from which no further row is read for a preview."""


def preview(config: DataConfig, tokenizer: Any, rows: int = 5) -> dict[str, Any]:
    """Reads the first 200 rows, divided among the sources of a mix. Returns the result of
    `shown_rows` for them, or without a tokenizer (None) that of `plain_rows`, and `mapping`, the
    choices for a person.

    `mapping` is the result of `columns_to_choose`. For a mix, it belongs to the first source that
    would be refused, or else to the first one that names columns; it is None if there is no such
    source. It then has `mix`: `sources` (as in `data.source`), the `place` of this source among
    them, its `name`, and the `format` of the mix.

    If rows cannot be read with their mapping, the result is `error`, a sentence, and `mapping`;
    where keys may be flags, also `unused_flags`, what `data.unused_flags` is once a person has
    confirmed that they are none.
    Raises DataError if there are no rows to choose columns from.
    """
    opened: list[Opened] = []
    surveyed: list[tuple[str, dict[str, Any]]] = []
    try:
        for part in read_parts(config, rows):
            survey = first_survey(part.config, part.source, [row for _, row, _ in part.rows])
            mapping = columns_to_choose(part.config, survey, part.source)
            surveyed.append((part.source.name, mapping))
            columns = _mapped(part.config, part.source, survey, mapping)
            opened.append(Opened(part.source, columns, part.rows, part.has_more))
        if tokenizer is None:
            shown = plain_rows(rows, opened)
        else:
            shown = shown_rows(config, tokenizer, rows, opened)
        return shown | {"mapping": _to_choose(config, surveyed)}
    except DataError as error:
        all_were_read = len(surveyed) == len(config.parts())
        one_is_refused = any(mapping["refused"] for _, mapping in surveyed)
        if not all_were_read and not one_is_refused:
            raise  # a source cannot be opened, or has no rows
        found: dict[str, Any] = {"error": str(error), "mapping": _to_choose(config, surveyed)}
        # A name that is no valid Unicode cannot stand in a setting.
        if isinstance(error, UnknownFlags) and all(map(_is_unicode, error.names)):
            found["unused_flags"] = [*config.unused_flags, *error.names]
        return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mapped(part: DataConfig, source: Source, survey: Survey, mapping: dict[str, Any]) -> ColumnMap:
    """Returns the columns with which the rows of a source are read, as in a run or according to the
    guess. Fills in the rest of `mapping`. Raises DataError if the rows cannot be read.
    """
    try:
        columns = columns_of(part, source, survey)
    except DataError as error:
        mapping["refused"] = True
        if mapping["state"] != "guess":
            raise
        if part.columns.named() or part.format != AUTO:
            mapping["why"] = str(error)
        guessed = DataColumns(**mapping["chosen"])
        columns = columns_of(part, source, survey, AUTO, guessed)
    mapping |= {"kind": kind_of(columns), "chosen": columns.columns}
    note = note_on(source, survey)
    return replace(columns, notes=(*columns.notes, note)) if note else columns


def _to_choose(
    config: DataConfig, surveyed: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Chooses from the mappings of the sources, each with the source's name, the one to show to a
    person.
    """
    if isinstance(config.source, str):
        return surveyed[0][1]
    refused = [place for place, (_, mapping) in enumerate(surveyed) if mapping["refused"]]
    naming = [
        place for place, part in enumerate(config.source[: len(surveyed)]) if part.columns.named()
    ]
    if not refused and not naming:
        return None
    place = (refused + naming)[0]
    name, mapping = surveyed[place]
    mix = {
        "sources": [_plain(part) for part in config.source],
        "place": place,
        "name": name,
        "format": config.format,
    }
    return mapping | {"mix": mix}


def _plain(part: DataSource) -> dict[str, Any]:
    """Returns a source of a mix as written in `data.source`, without default values."""
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


@dataclass(frozen=True)
class Read:
    """A source, opened with its own settings, and its first rows."""

    config: DataConfig
    source: Source
    rows: list[Numbered]
    has_more: bool
    """Whether rows may follow that were not read."""


def read_parts(config: DataConfig, rows: int) -> Iterator[Read]:
    """Opens each source with its own settings, and yields it with the rows that a preview of `rows`
    rows needs. Raises DataError for a source without rows.
    """
    parts = config.parts()
    rows_of_each = -(-ROWS_READ_FIRST // len(parts))
    count = max(rows, rows_of_each)
    for part, _ in parts:
        yield _first(part, count)


def check_first_rows(config: DataConfig) -> None:
    """Reads the first rows of each source on this machine as a run would, and raises DataError if
    that fails. This takes a moment. Data sets of the hub are not checked until the run.
    """
    for part, _ in config.parts():
        refuse_missing_file(part.only_source)
        if resolve_source(part.only_source) is not None:
            read = _first(part, ROWS_READ_FIRST)
            columns = map_first(part, read.source, [row for _, row, _ in read.rows])
            places = ((row, where) for _, row, where in read.rows)
            columns.refuse_possible_flags(places, read.source.name)


def _first(part: DataConfig, count: int) -> Read:
    source = open_source(part, streaming=True)
    read: list[Numbered] = []
    characters = 0
    for numbered in itertools.islice(numbered_rows(source), count):
        read.append(numbered)
        characters += _cost_of(numbered[1])
        if characters > _MOST_CHARACTERS:
            break
    if not read:
        raise DataError(without_rows(source.name))
    return Read(part, source, read, len(read) >= count or characters > _MOST_CHARACTERS)


def _cost_of(row: Any) -> int:
    """Returns the characters of a row, and 64 for each of its lists and objects."""
    if isinstance(row, str):
        return len(row)
    if isinstance(row, dict):
        return 64 + sum(map(_cost_of, row.values()))
    if isinstance(row, list):
        return 64 + sum(map(_cost_of, row))
    return 1
