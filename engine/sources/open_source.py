"""A source yields the rows of a data set, one after another, each with a number by which an error
can name it.

No reader holds a whole file in memory:

- `json_files.py` reads JSON, so that a broken line or item is named;
- `text_files.py` reads tables and plain text;
- pyarrow reads Parquet batch by batch;
- `datasets` reads hub ids and the folders that it saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.data_settings import DataConfig
from engine.errors import DataError, first_line
from engine.paths import registry_entry, resolve_source
from engine.sources.folders import DATA_SUFFIXES, files_of, is_saved_by_datasets, left_out
from engine.sources.json_files import Read, Row, count_lines, item_rows, line_rows, readable
from engine.sources.registry import Registered, registered
from engine.sources.text_files import passages, table_rows

_TABLE_SUFFIXES = (".csv", ".tsv")
_TEXT_SUFFIXES = (".txt", ".md")
_OTHER_SUFFIXES = (".gz", ".zip", ".zst", ".xlsx", ".arrow")
"""A name with one of these endings means a file, but of a type that cannot be read."""
_ROWS_A_READ = 1024
_MEMBER = 1 << 48
"""In a folder, a row's number is its file's number times this value, plus its number within the
file.
"""


@dataclass(frozen=True)
class Source:
    """A source is a data set that can be read from the start any number of times."""

    name: str
    unit: str
    """This is the word for a row in an error: line, item or row."""
    total: int | None
    """The source has this many rows. It is None if the number is known only after reading to the
    end.
    """
    read: Read
    """This function starts again at the first row and yields (number from 1, row)."""
    members: tuple[Source, ...] = ()
    """These are the files of a folder. A row's number also encodes its file (`_MEMBER`)."""
    fingerprint: str | None = None
    """`datasets` identifies the content of a data set by this value. It is None for other
    sources.
    """

    def where(self, number: int) -> str:
        """Returns the place of a row, in the words of an error."""
        if not self.members:
            return f"{self.unit} {number} of {self.name}"
        member, within = divmod(number, _MEMBER)
        return self.members[member].where(within)


def open_source(config: DataConfig, streaming: bool = False) -> Source:
    """Opens the data set that `config.source` names. With `streaming`, only the requested rows are
    read, which is enough for a preview; `total` may then be unknown. Raises DataError when the data
    set does not exist or cannot be read.
    """
    entry = registered(config)
    if entry is not None:
        if entry.hub:
            return _of_registry(entry, _hub(entry.config, streaming, entry.hub))
        return _of_registry(entry, open_source(entry.config, streaming))
    path = resolve_source(config.only_source)
    if path is None:
        refuse_missing_file(config.only_source)
        return _hub(config, streaming)
    if not path.is_dir():
        return _file(path, path.name, config, streaming)
    if is_saved_by_datasets(path):
        return _saved_by_datasets(path, config)
    return _folder_of_files(path, config, streaming)


def _of_registry(entry: Registered, inner: Source) -> Source:
    """Applies a registry entry to the source `inner`: only the first rows, with our column
    names.
    """
    total = inner.total
    if total is not None and entry.most is not None:
        total = min(total, entry.most)

    def read() -> Iterator[tuple[int, Row]]:
        for number, row in itertools.islice(inner.read(), entry.most):
            yield number, entry.row(row, inner.where(number))

    return dataclasses.replace(inner, total=total, read=read)


def refuse_missing_file(source: str) -> None:
    """Raises DataError when `source` can only mean a local file and that file does not exist."""
    if registry_entry(source) is not None or resolve_source(source) is not None:
        return
    file, colon, _ = source.partition(".json:")
    suffix = ".json" if colon else Path(file).suffix.lower()
    is_file_name = suffix in DATA_SUFFIXES + _OTHER_SUFFIXES
    if is_file_name or source.startswith((".", "/", "~")):
        raise DataError(f"There is no file {source}; check data.source.")


def notes_on(config: DataConfig) -> list[str]:
    """Returns sentences for the user about what is read from the source of `config`. The source
    must have been opened before.
    """
    entry = registered(config)
    if entry is not None:
        notes = notes_on(entry.config)
        if entry.most is not None:
            few = (
                f"No more than the first {entry.most:,} rows of {entry.config.source} are read, as "
                "num_samples says."
            )
            notes = [few, *notes]
        return notes
    path = resolve_source(config.only_source)
    if path is None:
        return []
    if path.is_dir():
        note = left_out(path, config)
        return [note] if note else []
    if config.split != DataConfig.split:
        return [f"data.split {config.split} is not used: a file has no splits."]
    return []


# ---------------------------------------------------------------------- files


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
    if suffix == ".json":
        return _json(path, streaming)
    if suffix not in _TABLE_SUFFIXES + _TEXT_SUFFIXES:
        return _json_lines(path, streaming)

    readable(path).close()
    if suffix in _TABLE_SUFFIXES:
        return _counted(Source(name, "row", None, lambda: table_rows(path)), streaming)
    unit = "the passage from line"
    source = Source(name, unit, None, lambda: passages(path, config.max_seq_len))
    return _counted(source, streaming)


def _counted(source: Source, streaming: bool) -> Source:
    """Returns the source with its rows counted, which takes a pass over it. With `streaming`,
    nothing is counted.
    """
    if streaming:
        return source
    return dataclasses.replace(source, total=sum(1 for _ in source.read()))


def _json_lines(path: Path, streaming: bool) -> Source:
    readable(path).close()
    total = None if streaming else count_lines(path)
    return Source(path.name, "line", total, lambda: line_rows(path))


def _json(path: Path, streaming: bool) -> Source:
    read = item_rows(path)
    if read is None:  # one object per line, in a file named .json
        return _json_lines(path, streaming)
    return _counted(Source(path.name, "item", None, read), streaming)


def _parquet(path: Path) -> Source:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        total = parquet.read_metadata(path).num_rows
    except (OSError, pa.ArrowException) as error:
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
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path.name} cannot be read after row {number} ({first_line(error)}); write the "
                "file again."
            ) from None

    return Source(path.name, "row", total, read)


def _folder_of_files(path: Path, config: DataConfig, streaming: bool) -> Source:
    """Opens the data files under `path`, sorted by name, as one data set."""
    members = tuple(
        _file(file, str(file.relative_to(path)), config, streaming)
        for file in files_of(path, config)
    )

    def read() -> Iterator[tuple[int, Row]]:
        for place, member in enumerate(members):
            for number, row in member.read():
                yield place * _MEMBER + number, row

    totals = [member.total for member in members if member.total is not None]
    total = sum(totals) if len(totals) == len(members) else None
    return Source(path.name, "row", total, read, members)


# ---------------------------------------------------------------------- through `datasets`


def _saved_by_datasets(path: Path, config: DataConfig) -> Source:
    import datasets

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        return loaded[config.split] if isinstance(loaded, dict) else loaded

    remedy = "give a folder that save_to_disk wrote, and a data.split that it has"
    return _from_datasets(load, path.name, f"The folder {path}", remedy)


def _hub(config: DataConfig, streaming: bool, more: dict[str, str] | None = None) -> Source:
    """Opens a data set of the hub. `more` is what else `load_dataset` is given."""
    import datasets

    source = config.only_source
    name, _, subset = source.partition(":")

    def load() -> Any:
        return datasets.load_dataset(
            name, subset or None, split=config.split, streaming=streaming, **(more or {})
        )

    remedy = (
        "check the id (a subset is written as owner/name:subset), data.split and the connection to "
        "the Hugging Face hub"
    )
    return _from_datasets(load, source, f"The data set {source}", remedy)


def _from_datasets(load: Callable[[], Any], name: str, subject: str, remedy: str) -> Source:
    """Opens what `load` returns. An error names the `subject` and ends with the `remedy`."""
    try:
        data = load()
    except Exception as error:  # noqa: BLE001  datasets raises errors of many libraries
        raise DataError(f"{subject} cannot be loaded ({first_line(error)}); {remedy}.") from None

    def read() -> Iterator[tuple[int, Row]]:
        number = 0
        rows = iter(data)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001  datasets raises errors of many libraries
                raise DataError(
                    f"{subject} cannot be read after row {number} ({first_line(error)}); {remedy}."
                ) from None
            number += 1
            yield number, _without_filled(row)

    total = len(data) if hasattr(data, "__len__") else None
    # `datasets` has no public attribute for its digest of the content.
    fingerprint = getattr(data, "_fingerprint", None)
    return Source(name, "row", total, read, fingerprint=fingerprint)


def _without_filled(row: Row) -> Row:
    """Returns the row without the nulls that Arrow fills in when the objects in a column have
    different keys.
    """
    found = {}
    for name, value in row.items():
        found[name] = _pruned(value) if isinstance(value, list) else value
    return found


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
