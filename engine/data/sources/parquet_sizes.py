"""How many rows of a Parquet file are read at once, so that none of its columns fills the memory.

A column stores each different value once, in its dictionary, and runs of the same value as a count;
pages are compressed: a kilobyte may stand for a hundred gigabytes. The sizes of pages are read from
the pages' own headers, since the footer's may be false.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from engine.data.sources.memory_bound import refuse_too_large
from engine.data.sources.thrift import Thrift
from engine.errors import DataError

MOST_ROWS = 1024
"""Rows that are read at once."""
_MOST_BYTES = 512 << 20
"""Bytes that these rows may become."""
_BYTES_A_VALUE = 16
_DICTIONARY = 2
"""The kind of a page, in the format's own words."""
_DELTA_BYTE_ARRAY = 7
"""An encoding in which each text may repeat all of the one before it."""
_FIRST_READ, _LONGEST_HEADER = 1 << 10, 16 << 20
"""Bytes of a page's header: those that are read first, and those that pyarrow reads at most."""


@dataclass(frozen=True)
class _Page:
    kind: int
    nbytes: int
    """Bytes when it is decompressed; those of its values, if they are more."""
    stored: int
    """Bytes in the file."""
    values: int
    repeats: bool
    """Each of its texts may be as long as the page."""

    @classmethod
    def of(cls, header: dict[int, Any]) -> _Page:
        """Returns the page with this ``PageHeader``, by the numbers of its fields."""
        first, second = header.get(5, {}), header.get(8, {})  # of both versions of data pages
        values = max(0, first.get(1, 0), second.get(1, 0))
        nbytes = max(0, header.get(2, 0), values * _BYTES_A_VALUE)
        repeats = _DELTA_BYTE_ARRAY in (first.get(2), second.get(4))
        return cls(header.get(1, 0), nbytes, max(0, header.get(3, 0)), values, repeats)


def rows_at_once(group: Any, file: BinaryIO, name: str) -> int:
    """Returns how many rows of a row group, as pyarrow describes it, are read at once.

    Raises DataError where one row would be too much, or one page of each column.
    """
    rows = max(1, group.num_rows)
    largest, most = group.total_byte_size // rows, MOST_ROWS
    needed = stored = 0
    for place in range(group.num_columns):
        column = group.column(place)
        pages = list(_pages(file, column))
        peak = max(pages, key=lambda page: page.nbytes, default=None)
        if peak is not None:
            needed, stored = needed + peak.nbytes, stored + peak.stored
        largest = max(
            largest,
            column.num_values // rows * _BYTES_A_VALUE,
            sum(page.nbytes for page in pages) // rows,
            *(page.nbytes for page in pages if page.kind == _DICTIONARY or page.repeats),
        )
        of_values = [page for page in pages if page.kind != _DICTIONARY]
        most = _in_pages(of_values, most, max(1, column.num_values // rows))
    if largest > _MOST_BYTES:
        raise DataError(
            f"{name} has rows that may take {largest >> 20:,} MiB each, and a row has at most "
            f"{_MOST_BYTES >> 20} MiB; divide their texts, and write the file again."
        )
    remedy = "write the file again with smaller pages (data page size)"
    refuse_too_large(f"{name} has a page for each column", needed, stored, remedy)
    return max(1, min(most, _MOST_BYTES // max(1, largest)))


def _in_pages(pages: list[_Page], rows: int, values_a_row: int) -> int:
    """Returns how many rows, at most `rows`, are wherever they begin in pages that together have no
    more bytes than rows that are read at once.
    """
    while rows > 1:
        first = values = nbytes = 0
        for page in pages:
            nbytes, values = nbytes + page.nbytes, values + page.values
            # Rows that end in this page cannot begin so far before it.
            while values - pages[first].values - page.values > rows * values_a_row - 2:
                nbytes, values = nbytes - pages[first].nbytes, values - pages[first].values
                first += 1
            if nbytes > _MOST_BYTES:
                break
        else:
            break
        rows //= 2
    return rows


# ---------------------------------------------------------------------- headers of pages


def _pages(file: BinaryIO, column: Any) -> Iterator[_Page]:
    """Yields the pages of a column. It ends where there is no header: pyarrow reports what is wrong
    with such a file.
    """
    places = (column.dictionary_page_offset, column.data_page_offset)
    at = min(place for place in places if place is not None)
    end = at + column.total_compressed_size
    while 0 <= at < end:
        try:
            header, size = _header(file, at)
        except (IndexError, ValueError):
            return
        page = _Page.of(header)
        yield page
        at += size + page.stored


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """Returns the header at a place of a file, and its size in bytes. Raises IndexError or
    ValueError if there is none.
    """
    size = _FIRST_READ
    while True:
        content = os.pread(file.fileno(), size, at)
        try:
            reader = Thrift(content)
            return reader.struct(), reader.at
        except IndexError:
            if len(content) < size or size >= _LONGEST_HEADER:
                raise
            size *= 16
