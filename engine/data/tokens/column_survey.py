"""The columns of a source, as all of its rows have them.

A run surveys all rows of a source (`engine.data.formats.survey`) before it reads them as examples.
The survey of a large file is kept in the cache, under what identifies the content of the file, so
that a preview, a count of rows and a run read it once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import paths, safe_files
from engine.config.data_settings import DataColumns, DataConfig
from engine.data.formats.formats import ColumnMap, map_columns
from engine.data.formats.survey import Survey, survey_of
from engine.data.formats.values import legible
from engine.data.sources.folders import files_of
from engine.data.sources.json_files import Row
from engine.data.sources.kinds import suffixes_of, without_rows
from engine.data.sources.open_source import Source, open_source
from engine.data.sources.registry import registered
from engine.data.tokens.cache_key import PROGRAM, Identity, identity_of
from engine.errors import DataError, RamstreamError
from engine.paths import resolve_source
from engine.progress import Progress, no_progress

LARGEST_COUNTED = 4 << 30
"""Bytes of files above which rows are not counted before a run: reading them takes minutes."""
ROWS_READ_FIRST = 200
"""Number of rows that a preview reads."""
_QUICK = 64 << 20
"""Bytes of text of files that a preview surveys, which takes a second."""
_QUICK_SECONDS = 3.0
"""Seconds after which a survey for a preview ends: a compressed file may hold a thousand times its
size.
"""
_COUNT_SECONDS = 60.0
"""Seconds for which rows are counted: those of 4 GiB, and not all of a compressed file without
end.
"""
_BYTES_OF_TEXT = {".xlsx": 32, ".parquet": 4, ".gz": 5, ".zst": 5, ".bz2": 7, ".xz": 7}
"""Bytes of text that take about as long to read as a byte of such a file."""
_OURS = re.compile(r"[0-9a-f]{40}|\..*\.partial")
"""Names of files in the folder of surveys."""
_KEPT = 256
"""Number of sources whose surveys the cache keeps."""
_LEAST_KEPT = 1 << 20
"""Bytes of files below which reading them again is faster than looking them up."""
_ROWS_A_REPORT = 20_000


def whole_survey(
    config: DataConfig,
    source: Source,
    progress: Progress = no_progress,
    most_seconds: float = math.inf,
) -> Survey:
    """Returns what the columns of the one source of `config`, opened as `source`, hold in all of
    its rows, from the cache if they are surveyed there. Where a row cannot be read, and after
    `most_seconds`, the survey ends and is not whole. Raises DataError for a source without a row.
    """
    key = _key(config, source)
    survey = _find(key)
    if survey is None:
        survey = _surveyed(source, progress, time.monotonic() + most_seconds)
        # What was read belongs to no key if a file was changed meanwhile.
        if key is not None and survey.is_whole and _key(config, source) == key:
            _keep(key, survey)
    if not survey.rows:
        raise DataError(without_rows(source.name))
    return survey


def first_survey(config: DataConfig, source: Source, first: list[Row]) -> Survey:
    """Returns what the columns of a source hold: in all of its rows where that is known, or quick
    to know, or where the rows `first` alone could not be read; and else in these first rows. Raises
    DataError as `whole_survey` does.
    """
    if _is_quick(config):
        return whole_survey(config, source, most_seconds=_QUICK_SECONDS)
    survey = _find(_key(config, source))
    if survey is not None:
        return survey
    survey = dataclasses.replace(survey_of(first), is_whole=False)
    try:
        columns_of(config, source, survey)
    except DataError:
        if _bytes_of_text(config) < float("inf"):
            return whole_survey(config, source, most_seconds=_QUICK_SECONDS)
    return survey


def columns_of(
    config: DataConfig,
    source: Source,
    survey: Survey,
    wanted: str | None = None,
    named: DataColumns | None = None,
) -> ColumnMap:
    """Returns the columns of a source with these settings, or with another format and other named
    columns. Raises DataError as `map_columns` does.
    """
    return map_columns(
        config.format if wanted is None else wanted,
        survey,
        source,
        config.columns if named is None else named,
        config.reads,
        roles=config.roles,
        unused_flags=config.unused_flags,
    )


def map_first(config: DataConfig, source: Source, first: list[Row]) -> ColumnMap:
    """Returns the columns of a source as `first_survey` finds them. Raises DataError as
    `map_columns` does.
    """
    return columns_of(config, source, first_survey(config, source, first))


def note_on(source: Source, survey: Survey) -> str:
    """Returns a sentence where rows that were not read may have other columns, or an empty text."""
    if survey.is_whole or source.has_header:
        return ""
    return (
        f"The columns are those of the first {survey.rows:,} rows of {source.name}; a run looks at "
        "all rows first, and says what else it finds."
    )


def map_all(config: DataConfig, source: Source, survey: Survey) -> ColumnMap:
    """Returns the columns that a run reads. What a preview of the first rows cannot have shown is
    in a note. Raises DataError as `map_columns` does, and UnknownFlags for keys of any row that may
    be flags.
    """
    # As in a preview, a row that cannot be read is reported before what its columns lack.
    first = list(itertools.islice(source.read(), ROWS_READ_FIRST))
    columns = columns_of(config, source, survey)
    columns.refuse_possible_flags(((row, source.where(n)) for n, row in first), source.name)
    if _is_quick(config):  # so the preview has seen all rows too
        return columns
    try:
        shown = columns_of(config, source, survey_of(row for _, row in first))
    except DataError:
        return columns
    notes = tuple(_differences(shown, columns, source.name))
    return dataclasses.replace(columns, notes=columns.notes + notes)


def count_rows(config: DataConfig) -> float | None:
    """Returns how many rows one pass over the data visits: of a mix, the rows of each source times
    its weight. Reading takes about a second for 100 MB, and surveys the columns of the rows.

    Returns None if that is not known before a run: for data sets of the hub, for more than 4 GiB
    or a minute, and for rows that cannot be read.
    """
    total = 0.0
    for part, weight in config.parts():
        path = resolve_source(part.only_source)
        if path is None:
            return None
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        try:
            if sum(each.stat().st_size for each in files) > LARGEST_COUNTED:
                return None
            source = open_source(part, counted=False)
            survey = whole_survey(part, source, most_seconds=_COUNT_SECONDS)
        except (OSError, RamstreamError):
            return None
        if not survey.is_whole:
            return None
        total += survey.rows * weight
    return total


# ---------------------------------------------------------------------- reading


def _surveyed(source: Source, progress: Progress, until: float) -> Survey:
    """Reads the rows of a source, each file of a folder in its own way. It ends at the time
    `until`.
    """
    if source.members and source.skim is None:
        survey = Survey()
        for member in source.members:
            try:
                survey.join(_surveyed(member, progress, until))
            except DataError:
                if not survey.rows:
                    raise
                return dataclasses.replace(survey, is_whole=False)
            if not survey.is_whole:
                break
        return survey
    survey = Survey()
    rows = source.read() if source.skim is None else source.skim()
    message = f"Looking at the columns of {source.name}"
    try:
        for _, row in rows:
            survey.add(row)
            if time.monotonic() > until:
                return dataclasses.replace(survey, is_whole=False)
            if survey.rows % _ROWS_A_REPORT == 0:
                progress(survey.rows, source.total or 0, message)
    except DataError:
        if not survey.rows:
            raise
        # Reading the rows in order finds what is wrong with an earlier one.
        return dataclasses.replace(survey, is_whole=False)
    # A text is not read to its end.
    return survey if source.total is None else dataclasses.replace(survey, rows=source.total)


def _differences(shown: ColumnMap, found: ColumnMap, name: str) -> Iterator[str]:
    """Yields sentences on how all rows of a source are read otherwise than its first rows alone."""
    first = f"the first {ROWS_READ_FIRST:,} rows of {name}"
    if shown.format != found.format:
        yield (
            f"All rows are read as {found.format}, although {first} alone would be read as "
            f"{shown.format}."
        )
        return
    for part, column in found.columns.items():
        if shown.columns.get(part) != column:
            meaning = found.meaning()[column]
            yield f"The column {legible(column)} ({meaning}) is used, although {first} lack it."


def _is_quick(config: DataConfig) -> bool:
    """Returns whether all rows of a source are read within about a second."""
    try:
        return _bytes_of_text(config) <= _QUICK
    except OSError:
        return False


def _bytes_of_text(config: DataConfig) -> float:
    """Returns how many bytes of text take as long to read as the files of a source, infinitely many
    for a data set of the hub.
    """
    entry = registered(config)
    if entry is not None:
        return _bytes_of_text(entry.config)
    path = resolve_source(config.only_source)
    if path is None:
        return float("inf")
    total = 0
    for file in files_of(path, config):
        size = file.stat().st_size
        for suffix in suffixes_of(file):
            size *= _BYTES_OF_TEXT.get(suffix, 1)
        total += size
    return total


# ---------------------------------------------------------------------- kept


def _folder() -> Path:
    return paths.cache_folder() / "columns"


def _key(config: DataConfig, source: Source) -> str | None:
    """Returns the name under which the survey of a source is kept, or None if it is not kept."""
    try:
        identity, is_complete = identity_of(config)
        if not is_complete and source.fingerprint is None:
            return None
        if is_complete and _bytes_of_text(config) < _LEAST_KEPT:
            return None
    except (OSError, RamstreamError):
        return None
    content: Identity = [identity, source.fingerprint, PROGRAM]
    plain = json.dumps(content, default=str).encode(errors="replace")
    return hashlib.blake2b(plain, digest_size=20).hexdigest()


def _find(key: str | None) -> Survey | None:
    if key is None:
        return None
    try:
        folder = _folder()
        kept: Any = safe_files.read_json(folder / key, folder, dict[str, Any], safe_files.MEDIUM)
        return Survey.from_plain(kept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _keep(key: str, survey: Survey) -> None:
    """Writes a survey into the cache, which loses the oldest ones beyond `_KEPT`. Nothing is kept
    where it cannot be written.
    """
    folder = _folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = json.dumps(survey.to_plain())
        safe_files.write_whole(folder / key, content, folder, durable=False)
        safe_files.remove_oldest(folder, _OURS, _KEPT)
