"""Rows of a data set, one after another, each with the number that an error can name.

Nothing here holds a whole file: JSON is read in json_files.py, so that a broken line or item is
named, tables and plain text in text_files.py, Parquet through pyarrow batch by batch, folders that
`datasets` saved and hub ids through `datasets`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.folders import DATA_SUFFIXES, files_of, is_saved_by_datasets, left_out
from engine.data.json_files import count_lines, item_rows, line_rows, readable
from engine.data.registry import registered
from engine.data.text_files import passages, table_rows
from engine.errors import DataError, first_line
from engine.paths import registry_entry, resolve_source

Row = dict[str, Any]
_TABLE_SUFFIXES, _TEXT_SUFFIXES = (".csv", ".tsv"), (".txt", ".md")
_OTHER_SUFFIXES = (".gz", ".zip", ".zst", ".xlsx", ".arrow")
_ROWS_A_READ = 1024
_MEMBER = 1 << 48
"""A row's number in a folder is its file's number times this, plus its number in the file."""


@dataclass(frozen=True)
class Source:
    """A data set that can be read from its start as often as wanted."""

    name: str
    unit: str
    """What a row is called in an error: line, item or row."""
    total: int | None
    """Rows, or None where only reading to the end would tell."""
    read: Callable[[], Iterator[tuple[int, Row]]]
    """Starts over and yields (number from 1, row)."""
    members: tuple[Source, ...] = ()
    """The files of a folder. Their rows are numbered on from file to file."""
    fingerprint: str | None = None
    """What `datasets` knows the content of a data set by, where it does."""

    def where(self, number: int) -> str:
        if not self.members:
            return f"{self.unit} {number} of {self.name}"
        member, within = divmod(number, _MEMBER)
        return self.members[member].where(within)


def open_source(config: DataConfig, streaming: bool = False) -> Source:
    """The data set that `config.source` names. `streaming` reads only what is asked for, as a
    preview needs, and then `total` may be unknown. Raises DataError when there is no such data set
    or it cannot be read.
    """
    entry = registered(config)
    if entry is not None:
        inner = open_source(entry.config, streaming)
        total = (
            inner.total
            if entry.most is None or inner.total is None
            else min(inner.total, entry.most)
        )
        return dataclasses.replace(
            inner,
            total=total,
            read=lambda: (
                (number, entry.row(row, inner.where(number)))
                for number, row in itertools.islice(inner.read(), entry.most)
            ),
        )
    path = resolve_source(config.source)
    if path is None:
        refuse_missing_file(config.source)
        return _hub(config, streaming)
    if path.is_dir():
        return _folder(path, config, streaming)
    return _file(path, path.name, config, streaming)


def _file(path: Path, name: str, config: DataConfig, streaming: bool) -> Source:
    suffix = path.suffix.lower()
    if suffix not in DATA_SUFFIXES:
        raise DataError(
            f"{path.name} is not a .json, .jsonl, .parquet, .csv, .tsv, .txt or .md file; convert "
            "it to one of these."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path.name} is empty; give a file with at least one row.")
    if suffix == ".parquet":
        return _parquet(path)
    if suffix in _TABLE_SUFFIXES:
        return _counted(name, "row", lambda: table_rows(path), path, streaming)
    if suffix in _TEXT_SUFFIXES:
        return _counted(
            name,
            "the passage from line",
            lambda: passages(path, config.max_seq_len),
            path,
            streaming,
        )
    return _json(path, streaming) if suffix == ".json" else _json_lines(path, streaming)


def _counted(
    name: str, unit: str, read: Callable[[], Iterator[tuple[int, Row]]], path: Path, streaming: bool
) -> Source:
    readable(path).close()
    return Source(name, unit, None if streaming else sum(1 for _ in read()), read)


def refuse_missing_file(source: str) -> None:
    """Raises DataError when `source` can only be meant as a local file and there is none."""
    if registry_entry(source) is not None:
        return
    suffix = Path(
        source.partition(".json:")[0] + ".json" if ".json:" in source else source
    ).suffix.lower()
    if resolve_source(source) is None and (
        suffix in DATA_SUFFIXES + _OTHER_SUFFIXES or source.startswith((".", "/", "~"))
    ):
        raise DataError(f"There is no file {source}; check data.source.")


# ---------------------------------------------------------------------- JSON


def _json_lines(path: Path, streaming: bool) -> Source:
    readable(path).close()
    return Source(
        path.name, "line", None if streaming else count_lines(path), lambda: line_rows(path)
    )


def _json(path: Path, streaming: bool) -> Source:
    read = item_rows(path)
    if read is None:  # one object a line, named .json
        return _json_lines(path, streaming)
    return Source(path.name, "item", None if streaming else sum(1 for _ in read()), read)


# ---------------------------------------------------------------------- Parquet, folders, hub


def _parquet(path: Path) -> Source:
    import pyarrow
    from pyarrow import parquet

    try:
        total = parquet.read_metadata(path).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path.name} cannot be read as Parquet ({first_line(error)}); give a whole Parquet "
            "file."
        ) from None

    def read() -> Iterator[tuple[int, Row]]:
        number = 0
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS_A_READ):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, _without_filled(row)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(
                f"{path.name} cannot be read after row {number} ({first_line(error)}); write the "
                "file again."
            ) from None

    return Source(path.name, "row", total, read)


def notes_on(config: DataConfig) -> list[str]:
    """What a person should know about how the source of `config`, which was read, is chosen.
    Sentences.
    """
    entry = registered(config)
    if entry is not None:
        few = (
            []
            if entry.most is None
            else [
                f"No more than the first {entry.most:,} rows of {entry.config.source} are "
                "read, as num_samples says."
            ]
        )
        return [*few, *notes_on(entry.config)]
    path = resolve_source(config.source)
    if path is None:
        return []
    if path.is_dir():
        return [note] if (note := left_out(path, config)) else []
    return (
        [f"data.split {config.split} is not used: a file has no splits."]
        if config.split != DataConfig.split
        else []
    )


def _folder(path: Path, config: DataConfig, streaming: bool) -> Source:
    if not is_saved_by_datasets(path):
        return _folder_of_files(path, config, streaming)
    import datasets

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        return loaded[config.split] if isinstance(loaded, dict) else loaded

    return _from_datasets(
        load,
        path.name,
        f"The folder {path}",
        "give a folder that save_to_disk wrote, and a data.split that it has",
    )


def _folder_of_files(path: Path, config: DataConfig, streaming: bool) -> Source:
    """Every data file under `path`, in the order of their names, as one data set."""
    members = tuple(
        _file(file, str(file.relative_to(path)), config, streaming)
        for file in files_of(path, config)
    )

    def read() -> Iterator[tuple[int, Row]]:
        for place, member in enumerate(members):
            for number, row in member.read():
                yield place * _MEMBER + number, row

    totals = [member.total for member in members]
    return Source(path.name, "row", None if None in totals else sum(totals), read, members)


def _hub(config: DataConfig, streaming: bool) -> Source:
    import datasets

    name, _, subset = config.source.partition(":")

    def load() -> Any:
        return datasets.load_dataset(name, subset or None, split=config.split, streaming=streaming)

    return _from_datasets(
        load,
        config.source,
        f"The data set {config.source}",
        "check the id (a subset is written as "
        "owner/name:subset), data.split and the connection to the Hugging Face hub",
    )


def _from_datasets(load: Callable[[], Any], name: str, subject: str, remedy: str) -> Source:
    try:
        data = load()
    except Exception as error:  # datasets raises errors of many libraries
        raise DataError(f"{subject} cannot be loaded ({first_line(error)}); {remedy}.") from None

    def read() -> Iterator[tuple[int, Row]]:
        number = 0
        rows = iter(data)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(
                    f"{subject} cannot be read after row {number} ({first_line(error)}); {remedy}."
                ) from None
            number += 1
            yield number, _without_filled(row)

    return Source(
        name,
        "row",
        len(data) if hasattr(data, "__len__") else None,
        read,
        fingerprint=getattr(data, "_fingerprint", None),
    )


def _without_filled(row: Row) -> Row:
    """The row without the nulls that Arrow writes where objects of a column have unlike keys."""
    return {
        name: _pruned(value) if isinstance(value, list) else value for name, value in row.items()
    }


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
