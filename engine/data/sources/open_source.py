"""A source yields the rows of a data set, one after another, each with a number by which an error
can name it.

No reader holds a whole file in memory:

- `json_files.py`, `tables.py` and `text_files.py` read texts; `open_text.py` decompresses and
  decodes them, and `bounded_lines.py` divides them;
- `arrow_files.py` reads Parquet, Arrow and Feather batch by batch;
- `excel.py` reads a sheet row by row;
- `datasets` reads hub ids and the folders that it saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.sources.arrow_files import (
    arrow_rows,
    arrow_total,
    parquet_rows,
    parquet_total,
    skimmed,
    skimmed_arrow,
    skimmed_parquet,
    without_filled,
)
from engine.data.sources.bounded_lines import count_lines
from engine.data.sources.excel import sheet_note, sheet_rows
from engine.data.sources.folders import files_of, has_splits, is_saved_by_datasets, left_out
from engine.data.sources.hub_connection import from_hub_or_cache
from engine.data.sources.json_files import (
    Read,
    Row,
    goes_over_lines,
    item_rows,
    line_rows,
    value_rows,
)
from engine.data.sources.kinds import (
    ARROW_SUFFIXES,
    COMPRESSIONS,
    LINES_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    USABLE,
    is_data,
    suffixes_of,
)
from engine.data.sources.open_text import damage_of, encoding_of, open_bytes
from engine.data.sources.reading import errors_with_place
from engine.data.sources.registry import Registered, registered
from engine.data.sources.registry_rows import BETWEEN
from engine.data.sources.tables import DELIMITERS, delimiter_of, table_rows, usual_delimiter
from engine.data.sources.text_files import lengths_of_passages, passages
from engine.errors import DataError, first_line
from engine.machine.short_memory import refuse_short_memory
from engine.paths import is_path, registry_entry, resolve_source

_OTHER_SUFFIXES = (".zip", ".xls", ".pdf", ".docx", ".tar", ".tgz", *COMPRESSIONS)
"""Endings of names that mean a file, but of a type that cannot be read."""
_RUN_CODE = ("pandas", "generator", "spark", "sql")
"""`datasets` reads these names as readers of its own: of pickles, of programs, of queries."""
_MOST_NOTES = 5
_ROWS_A_READ = 1000
_MEMBER = 1 << 48
"""Factor of a file's number in a row's number in a folder; the row's number within the file is
added.
"""


@dataclass(frozen=True)
class Source:
    """A data set that can be read from the start any number of times."""

    name: str
    unit: str
    """The word for a row in an error: line, item or row."""
    total: int | None
    """Number of rows of the source. It is None if the number is known only after reading to the
    end.
    """
    read: Read
    """Starts again at the first row and yields (number from 1, row)."""
    members: tuple[Source, ...] = ()
    """The files of a folder. A row's number also encodes its file (`_MEMBER`)."""
    fingerprint: str | None = None
    """`datasets` identifies the content of a data set by this value. It is None for other
    sources.
    """
    text_bytes: int | None = None
    """Number of bytes of the plain texts. It is None for other sources, and where a text is
    compressed.
    """
    format: str | None = None
    """Format of the rows in a registry, or None."""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    """Column of each part of an example if a registry names it."""
    between: str | None = None
    """A registry's program puts this between an instruction and its input."""
    skim: Read | None = None
    """Yields what shows the columns and the kinds of values of all rows, and is faster than `read`:
    long lists are cut short, or rows left out that are like others. None where there is no such
    way.
    """
    has_header: bool = False
    """Every row has all columns."""

    def where(self, number: int) -> str:
        """Returns the place of a row, as an error names it."""
        if not self.members:
            return f"{self.unit} {number} of {self.name}"
        member, within = divmod(number, _MEMBER)
        return self.members[member].where(within)


def open_source(config: DataConfig, streaming: bool = False, counted: bool = True) -> Source:
    """Opens the data set that `config.source` names. With `streaming`, only the requested rows are
    read, which is enough for a preview; `total` may then be unknown. Without `counted`, rows are
    not counted where that takes a pass over the data. Raises DataError when the data set does not
    exist or cannot be read.
    """
    entry = registered(config)
    if entry is not None:
        if entry.hub:
            return _of_registry(entry, _hub(entry.config, streaming, entry.hub))
        return _of_registry(entry, open_source(entry.config, streaming, counted))
    path = resolve_source(config.only_source)
    if path is None:
        refuse_missing_file(config.only_source)
        return _hub(config, streaming)
    if not path.is_dir():
        return _file(path, path.name, _Way(config, streaming, counted and not streaming))
    if is_saved_by_datasets(path):
        return _saved_by_datasets(path, config)
    return _folder_of_files(path, _Way(config, streaming, counted and not streaming))


@dataclass(frozen=True)
class _Way:
    """How a data set is opened."""

    config: DataConfig
    streaming: bool
    """Only the first rows will be read."""
    counted: bool
    """Rows are counted, also where that takes a pass over a file."""


def _of_registry(entry: Registered, inner: Source) -> Source:
    """Applies a registry entry to the source `inner`: only the first rows, with the columns of the
    entry.
    """
    total = inner.total
    if total is not None and entry.most is not None:
        total = min(total, entry.most)

    def read() -> Iterator[tuple[int, Row]]:
        for number, row in itertools.islice(inner.read(), entry.most):
            yield number, entry.row(row, inner.where(number))

    found = dataclasses.replace(
        inner,
        total=total,
        read=read,
        format=entry.format,
        columns=entry.columns,
        between=BETWEEN,
    )
    # Names of speakers do not matter for columns that the entry names, but rows do that are not
    # read.
    return found if entry.most is None else dataclasses.replace(found, skim=read)


def refuse_missing_file(source: str) -> None:
    """Raises DataError when `source` can only mean a local file or folder, and there is none."""
    if registry_entry(source) is not None or resolve_source(source) is not None:
        return
    is_file_name = (
        ".json:" in source
        or is_data(Path(source))
        or Path(source).suffix.lower() in _OTHER_SUFFIXES
    )
    if is_file_name or is_path(source):
        what = "file" if is_file_name else "file or folder"
        raise DataError(f"There is no {what} {source}; check data.source.")


def notes_on(config: DataConfig) -> list[str]:
    """Returns sentences for the user about what is read from the source of `config`. The source
    must have been opened before.
    """
    entry = registered(config)
    if entry is not None:
        notes = [*filter(None, [entry.outside]), *notes_on(entry.config)]
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
        notes = [*left_out(path, config), *_notes_on_files(path, config)]
        if config.split != DataConfig.split and not has_splits(path):
            notes.append(f"data.split {config.split} is not used: the folder has no splits.")
        return notes
    notes = _notes_on_file(path)
    if config.split != DataConfig.split:
        notes.append(f"data.split {config.split} is not used: a file has no splits.")
    return notes


def _notes_on_files(path: Path, config: DataConfig) -> list[str]:
    """Returns what is to be reported on the files of a folder, of no more than the first few."""
    if is_saved_by_datasets(path):
        return []
    notes = [note for file in files_of(path, config) for note in _notes_on_file(file)]
    if len(notes) > _MOST_NOTES:
        others = len(notes) - _MOST_NOTES
        notes[_MOST_NOTES:] = [f"{others:,} more files of the folder have notes like these."]
    return notes


def _notes_on_file(path: Path) -> list[str]:
    """Returns how a file is read, where its name does not show it."""
    suffix, _ = suffixes_of(path)
    notes = []
    if suffix == ".xlsx":
        note = sheet_note(path)
        return [note] if note else []
    if suffix in TABLE_SUFFIXES:
        delimiter = delimiter_of(path)
        if delimiter != usual_delimiter(path):
            notes.append(f"{path.name} is read with {DELIMITERS[delimiter]} between the cells.")
    if suffix in TEXT_SUFFIXES:
        encoding = encoding_of(path)
        if encoding != "utf-8":
            notes.append(f"{path.name} is read as {encoding.upper()}.")
    return notes


# ---------------------------------------------------------------------- files


def _file(path: Path, name: str, way: _Way) -> Source:
    """Opens a file. In errors, it has the name `name`."""
    open_bytes(path, path.suffix.lower()).close()
    if not is_data(path):
        raise DataError(f"{path.name} is not a data file. {USABLE}")
    if path.stat().st_size == 0:
        raise DataError(f"{path.name} is empty; give a file with at least one row.")
    with errors_with_place(path.name, lambda: "its beginning"):
        source = _of_kind(path, name, way)
    return dataclasses.replace(source, read=partial(_sound_rows, source, path))


def _of_kind(path: Path, name: str, way: _Way) -> Source:
    """Opens a file, with the reader for its kind."""
    suffix, _ = suffixes_of(path)
    if suffix == ".parquet":
        read, skim = partial(parquet_rows, path), partial(skimmed_parquet, path)
        return Source(path.name, "row", parquet_total(path), read, skim=skim, has_header=True)
    if suffix in ARROW_SUFFIXES:
        read, skim = partial(arrow_rows, path), partial(skimmed_arrow, path)
        total = arrow_total(path, not way.counted)
        return Source(path.name, "row", total, read, skim=skim, has_header=True)
    if suffix in (".json", *LINES_SUFFIXES):
        return _json(path, way.counted)
    if suffix == ".xlsx":
        source = Source(name, "row", None, partial(sheet_rows, path), has_header=True)
        return _counted(source, path, way.counted)
    encoding_of(path)  # raises an error where the file cannot be read as text
    if suffix in TABLE_SUFFIXES:
        source = Source(name, "row", None, partial(table_rows, path), has_header=True)
        return _counted(source, path, way.counted)
    return _text(path, way.config.max_seq_len, way.streaming)


def _sound_rows(source: Source, path: Path) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a file. Behind a damaged place of a compressed file, its text may be
    anything; then the error is that of the compression.
    """
    number = 0
    try:
        with errors_with_place(path.name, lambda: f"{source.unit} {number}"):
            for number, row in source.read():
                yield number, row
    except DataError:
        damage = damage_of(path) if suffixes_of(path)[1] else None
        if damage is None:
            raise
        raise DataError(
            f"{path.name} {damage} after {source.unit} {number}; write or fetch it again."
        ) from None


def _counted(source: Source, path: Path, counted: bool = True) -> Source:
    """Returns the source with its rows counted, which takes a pass over its file. Without
    `counted`, nothing is counted.
    """
    if not counted:
        return source
    return dataclasses.replace(source, total=sum(1 for _ in _sound_rows(source, path)))


def _text(path: Path, max_seq_len: int, streaming: bool) -> Source:
    """Opens a plain text, which is read in passages."""
    size = None if suffixes_of(path)[1] else path.stat().st_size
    read = partial(passages, path, max_seq_len)
    source = Source(
        path.name,
        "the passage from line",
        None,
        read,
        text_bytes=size,
        has_header=True,
    )
    if streaming:
        return source
    try:
        lengths = lengths_of_passages(path, max_seq_len)
    except DataError:  # an earlier row may be wrong too, and is reported first
        return _counted(source, path)
    read = partial(read, lengths)
    skim = lambda: itertools.islice(read(), 1)  # noqa: E731  all passages are alike
    return dataclasses.replace(source, total=len(lengths), read=read, skim=skim)


def _json(path: Path, counted: bool) -> Source:
    """Opens a JSON file by its shape: rows in lines, or values that go over lines."""
    has_lines = suffixes_of(path)[0] in LINES_SUFFIXES
    if not has_lines or goes_over_lines(path):
        read = item_rows(path)
        if read is None and goes_over_lines(path):
            read = partial(value_rows, path)
        if read is not None:
            return _counted(Source(path.name, "item", None, read), path, counted)
    source = Source(path.name, "line", None, partial(line_rows, path))
    if not counted:
        return source
    try:
        return dataclasses.replace(source, total=count_lines(path))
    except DataError:  # an earlier row may be wrong too, and is reported first
        return _counted(source, path)


def _folder_of_files(path: Path, way: _Way) -> Source:
    """Opens the data files under `path`, sorted by name, as one data set."""
    members = tuple(
        _file(file, str(file.relative_to(path)), way) for file in files_of(path, way.config)
    )

    def read() -> Iterator[tuple[int, Row]]:
        for place, member in enumerate(members):
            for number, row in member.read():
                yield place * _MEMBER + number, row

    totals = [member.total for member in members if member.total is not None]
    total = sum(totals) if len(totals) == len(members) else None
    sizes = [member.text_bytes for member in members if member.text_bytes is not None]
    size = sum(sizes) if len(sizes) == len(members) else None
    return Source(path.name, "row", total, read, members, text_bytes=size)


# ---------------------------------------------------------------------- through `datasets`


def _saved_by_datasets(path: Path, config: DataConfig) -> Source:
    import datasets

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, dict):
            return loaded
        if config.split not in loaded:
            raise DataError(
                f"The folder {path} has no split {config.split}; it has {', '.join(loaded)}, set "
                "data.split to one of these."
            )
        return loaded[config.split]

    remedy = "give a folder that save_to_disk wrote, and a data.split that it has"
    return _from_datasets(load, path.name, f"The folder {path}", remedy)


def _hub(config: DataConfig, streaming: bool, more: dict[str, str] | None = None) -> Source:
    """Opens a data set of the hub. `more` is what else `load_dataset` is given."""
    import datasets

    source = config.only_source
    name, _, subset = source.partition(":")
    if name in _RUN_CODE:
        raise DataError(
            f"{name} is a part of datasets that runs what its files say, and no data set; give a "
            "file with rows."
        )

    def load() -> Any:
        return datasets.load_dataset(
            name, subset or None, split=config.split, streaming=streaming, **(more or {})
        )

    remedy = (
        "check the id (a subset is written as owner/name:subset), data.split and the connection to "
        "the Hugging Face hub"
    )
    return _from_datasets(
        lambda: from_hub_or_cache(source, load), source, f"The data set {source}", remedy
    )


def _from_datasets(load: Callable[[], Any], name: str, subject: str, remedy: str) -> Source:
    """Opens what `load` returns. An error names the `subject` and ends with the `remedy`."""
    try:
        data = load()
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001  datasets raises errors of many libraries
        refuse_short_memory(error, "while the data set was opened")
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
                refuse_short_memory(error, "while the data set was read")
                raise DataError(
                    f"{subject} cannot be read after row {number} ({first_line(error)}); {remedy}."
                ) from None
            number += 1
            yield number, without_filled(row)

    total = len(data) if hasattr(data, "__len__") else None
    # `datasets` has no public attribute for its digest of the content.
    fingerprint = getattr(data, "_fingerprint", None)
    has_header = getattr(data, "features", None) is not None  # a stream may have none
    skim = partial(_skimmed, data) if total is not None else None
    return Source(
        name, "row", total, read, fingerprint=fingerprint, skim=skim, has_header=has_header
    )


def _skimmed(data: Any) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a data set of `datasets` as `skimmed` does."""
    number = 0
    for table in data.with_format("arrow").iter(_ROWS_A_READ):
        for row in skimmed(table):
            number += 1
            yield number, without_filled(row)
