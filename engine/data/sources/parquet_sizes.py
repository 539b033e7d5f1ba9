"""How many rows of a Parquet file are read at once, so that none of its columns fills the memory.

A column stores each different value once, in its dictionary, and runs of the same value as a count:
a kilobyte may stand for a hundred gigabytes.
"""

from __future__ import annotations

from typing import Any, BinaryIO

from engine.errors import DataError

MOST_ROWS = 1024
"""Rows that are read at once."""
_MOST_BYTES = 512 << 20
"""Bytes that these rows may become."""
_BYTES_A_VALUE = 16
_DICTIONARY = 2
"""The kind of a page, in the format's own words."""
_LONGEST_HEADER = 64


def rows_at_once(group: Any, file: BinaryIO, name: str) -> int:
    """Returns how many rows of a row group, as pyarrow describes it, are read at once.

    Raises DataError where one row would be too much.
    """
    rows = max(1, group.num_rows)
    largest = group.total_byte_size // rows
    for place in range(group.num_columns):
        column = group.column(place)
        largest = max(
            largest,
            column.num_values // rows * _BYTES_A_VALUE,
            _dictionary_bytes(file, column),
        )
    if largest > _MOST_BYTES:
        raise DataError(
            f"{name} has rows that may take {largest >> 20:,} MiB each, and a row has at most "
            f"{_MOST_BYTES >> 20} MiB; divide their texts, and write the file again."
        )
    return max(1, min(MOST_ROWS, _MOST_BYTES // max(1, largest)))


def _dictionary_bytes(file: BinaryIO, column: Any) -> int:
    """Returns the bytes of the dictionary of a column, which no value of it exceeds, or 0."""
    places = (column.dictionary_page_offset, column.data_page_offset)
    file.seek(min(place for place in places if place is not None))
    header = file.read(_LONGEST_HEADER)
    try:
        kind, at = _number(header, 0)
        size, _ = _number(header, at)
    except (IndexError, ValueError):  # pyarrow tells what is wrong with such a file
        return 0
    return size if kind == _DICTIONARY else 0


def _number(header: bytes, at: int) -> tuple[int, int]:
    """Returns a number of a page's header, and where the next one begins. The header is written in
    Thrift's compact protocol; its first two fields are the kind and the bytes of the page.
    """
    if header[at] != 0x15:  # the next field, a number of 32 bits
        raise ValueError("no such field")
    value, shift = 0, 0
    while True:
        at += 1
        value |= (header[at] & 0x7F) << shift
        shift += 7
        if header[at] < 0x80:
            return (value >> 1) ^ -(value & 1), at + 1
