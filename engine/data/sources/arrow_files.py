"""Parquet, Arrow and Feather files, read batch by batch with pyarrow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.sources.arrow_sizes import CheckedFile, checked_stream
from engine.data.sources.json_files import Row
from engine.data.sources.open_text import open_bytes
from engine.data.sources.parquet_sizes import rows_at_once
from engine.errors import DataError, first_line

_ROWS_A_READ = 1024
_BYTES_A_READ = 64 << 20
"""Bytes of rows above which fewer of them become objects at once."""
_ITEMS_SKIMMED = 8
_WHOLE_FILE = b"ARROW1"


def parquet_total(path: Path) -> int:
    """Returns the number of rows of a Parquet file. Raises DataError if it cannot be read."""
    from pyarrow import parquet

    open_bytes(path, ".parquet").close()
    with _opening(path, "Parquet"):
        return int(parquet.read_metadata(path).num_rows)


def parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields (row from 1, row) of a Parquet file. Raises DataError for one that is damaged."""
    return _rows(path, _parquet_batches(path))


def skimmed_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields the rows of a Parquet file as `skimmed` does."""
    return _rows(path, _parquet_batches(path), skimmed)


def arrow_total(path: Path, streaming: bool) -> int | None:
    """Returns the number of rows of an Arrow or Feather file, or None with `streaming`, since it
    takes a pass over the file. Raises DataError if the file cannot be read.
    """
    with _opening(path, "Arrow"):
        batches = _arrow_batches(path)
        first = next(batches, None)
        if streaming or first is None:
            return None if first is not None else 0
        return int(first.num_rows + sum(batch.num_rows for batch in batches))


def arrow_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields (row from 1, row) of an Arrow or Feather file. Raises DataError for one that is
    damaged.
    """
    return _rows(path, _arrow_batches(path))


def skimmed_arrow(path: Path) -> Iterator[tuple[int, Row]]:
    """Yields the rows of an Arrow or Feather file as `skimmed` does."""
    return _rows(path, _arrow_batches(path), skimmed)


def skimmed(batch: Any) -> list[Row]:
    """Returns the rows of a batch or table with no more than the first items of lists that hold
    numbers, or nothing but text: they show of what kind all are. Bytes are shortened too.
    """
    names = batch.schema.names
    columns = [_skimmed_values(column) for column in batch.columns]
    return [dict(zip(names, values)) for values in zip(*columns)]


def _skimmed_values(column: Any) -> list[Any]:
    import pyarrow as pa
    from pyarrow import compute

    kind = column.type
    if _is_list(kind):
        if pa.types.is_struct(kind.value_type) and _is_text(kind):
            return _first_objects(column)
        if pa.types.is_primitive(kind.value_type) or _is_text(kind):
            column = compute.list_slice(column, 0, _ITEMS_SKIMMED)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        column = compute.binary_slice(column, 0, 1)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _first_objects(column: Any) -> list[Any]:
    """Returns each list of a column of objects with its first object alone. Objects that have the
    same keys are one object here, which is ten times as fast.
    """
    from pyarrow import compute

    if hasattr(column, "combine_chunks"):  # of a table
        column = column.combine_chunks()
    lengths = compute.list_value_length(column).to_pylist()
    objects = compute.list_slice(column, 0, 1).flatten()
    keys = np.zeros((len(objects), objects.type.num_fields), bool)
    for place, values in enumerate(objects.flatten()):
        keys[:, place] = values.is_valid()
    _, places, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    alike = [[item] for item in objects.take(places).to_pylist()]
    found = iter(which.reshape(-1).tolist())
    # A length is None where there is no list.
    none_or_empty: dict[int | None, Any] = {None: None, 0: []}

    def of_length(length: int | None) -> Any:
        return alike[next(found)] if length else none_or_empty[length]

    return [of_length(length) for length in lengths]


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: Any) -> bool:
    """Returns whether nothing but text is in values of a type. A map may have any keys."""
    import pyarrow as pa

    if _is_list(kind):
        return _is_text(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_text(kind.field(place).type) for place in range(kind.num_fields))
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def without_filled(row: Row) -> Row:
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


def _arrow_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with open_bytes(path, ".arrow") as file:
        head = file.read(len(_WHOLE_FILE))
    with pa.OSFile(str(path)) as source, path.open("rb") as raw:
        if head == _WHOLE_FILE:
            checked = CheckedFile(raw, path.name)
            with pa.ipc.open_file(source) as whole:
                for number in range(whole.num_record_batches):
                    checked.check(number)
                    yield whole.get_batch(number)
        else:
            before = checked_stream(raw, path.name)
            next(before, None)
            with pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    yield batch
                    next(before, None)


def _parquet_batches(path: Path) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file, path.open("rb") as raw:
        for number in range(file.metadata.num_row_groups):
            rows = rows_at_once(file.metadata.row_group(number), raw, path.name)
            yield from file.iter_batches(batch_size=rows, row_groups=[number])


def _pylist(batch: Any) -> list[Row]:
    """Returns the rows of a batch. A map becomes an object, as other files have it."""
    rows: list[Row] = batch.to_pylist(maps_as_pydicts="strict")
    return rows


def _rows(
    path: Path, batches: Iterator[Any], rows_of: Callable[[Any], list[Row]] = _pylist
) -> Iterator[tuple[int, Row]]:
    number = 0
    with _as_data_error(
        lambda: f"{path.name} cannot be read after row {number}", "write the file again"
    ):
        for batch in batches:
            batch.validate(full=True)  # wrong offsets of a damaged file would end the process
            rows = max(1, min(_ROWS_A_READ, _BYTES_A_READ // _largest_row(batch)))
            for start in range(0, batch.num_rows, rows):
                for row in rows_of(batch.slice(start, rows)):
                    number += 1
                    yield number, without_filled(row)


def _largest_row(batch: Any) -> int:
    """Returns about how many bytes a row of a batch becomes; a text of a dictionary may be in every
    row.
    """
    import pyarrow as pa
    from pyarrow import compute

    size = batch.nbytes // max(1, batch.num_rows) + 1
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            kind = column.type.value_type
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            longest = compute.max(compute.binary_length(column.dictionary)) if is_text else None
            size += longest.as_py() or 0 if longest is not None else column.dictionary.nbytes
    return int(size)


def _opening(path: Path, kind: str) -> contextlib.AbstractContextManager[None]:
    return _as_data_error(
        lambda: f"{path.name} cannot be read as {kind}", f"give a whole {kind} file"
    )


@contextlib.contextmanager
def _as_data_error(problem: Callable[[], str], remedy: str) -> Iterator[None]:
    """Turns the errors of pyarrow into a DataError."""
    import pyarrow as pa

    try:
        yield
    except (OSError, MemoryError, ValueError, ArithmeticError, pa.ArrowException) as error:
        raise DataError(f"{problem()} ({first_line(error)}); {remedy}.") from None
