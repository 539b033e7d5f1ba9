"""The XML of an Excel file (.xlsx) is parsed while it is unpacked, within limits.

Some kilobytes unpack to a gigabyte of XML, name a row that no table has, or hold nothing but blank
cells. openpyxl reads all of that, and makes every cell up to the last one. So it reads the small
parts of a file here, and the cells of one row at a time.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from typing import IO
from xml.etree.ElementTree import Element, iterparse

from engine.errors import DataError

MOST_ROWS = 1 << 20
"""Rows of a sheet, as in Excel."""
MOST_BLANK = 128 << 20
"""Bytes of XML in which no cell has text, between two rows with text."""
LONGEST_ROW = 64 << 20
"""Bytes of XML of one row, or of one text that cells share."""
_MOST_TAGS = 1 << 20
"""Tags in the XML of one row: a cell has some 4, and Excel has 16,384 columns."""
_LARGEST_SHEET = 1 << 30
_LARGEST_PART = 256 << 20
"""Bytes of a part that is no sheet, such as the texts that cells share."""
_MOST_TEXTS = 4 << 20
_MOST_TAGS_OF_PART = 1 << 19
"""Tags of a part that openpyxl reads as a whole, such as the styles, of which Excel has 65,490."""
_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_ROW, _ALL_ROWS, _TEXT = f"{_MAIN}row", f"{_MAIN}sheetData", f"{_MAIN}si"
_PLAIN, _RUN = f"{_MAIN}t", f"{_MAIN}r"
_MORE = f"has more than {LONGEST_ROW >> 20} MiB or {_MOST_TAGS:,} tags of XML"


class Parts(zipfile.ZipFile):
    """The parts of an Excel file. Raises DataError for one that unpacks to too much."""

    def __init__(self, file: IO[bytes], name: str):
        super().__init__(file)
        self._name = name
        for part in self.infolist():
            is_sheet = part.filename.startswith("xl/worksheets/")
            if part.file_size > (_LARGEST_SHEET if is_sheet else _LARGEST_PART):
                raise self._too_large(f"{part.filename} unpacks to {part.file_size >> 20:,} MiB")

    def read(self, name: str | zipfile.ZipInfo, pwd: bytes | None = None) -> bytes:
        """Returns a part as a whole, for openpyxl."""
        content = super().read(name, pwd)
        if content.count(b"<") > _MOST_TAGS_OF_PART:
            raise self._too_large(f"{name} has more than {_MOST_TAGS_OF_PART:,} tags")
        return content

    def texts(self, part: str) -> list[str]:
        """Returns the texts that cells share."""
        found: list[str] = []
        with self.open(part) as source:
            bounded = _Bounded(source, lambda: self._too_large(f"{part}: a text {_MORE}"))
            for _, node in iterparse(bounded):
                if node.tag == _TEXT:
                    # openpyxl leaves these characters out, too.
                    found.append(_plain(node).replace("x005F_", ""))
                    node.clear()
                    bounded.begin_again()
                    if len(found) > _MOST_TEXTS:
                        raise self._too_large(f"it has more than {_MOST_TEXTS:,} texts")
        return found

    def row_nodes(self, part: str) -> Iterator[tuple[int, Element]]:
        """Yields (bytes of XML since the row before, XML) of each row of a sheet. The XML is valid
        until the next row.
        """
        count = 0
        with self.open(part) as source:
            bounded = _Bounded(source, lambda: self._too_large(f"row {count + 1} {_MORE}"))
            for _, node in iterparse(bounded):
                if node.tag == _ALL_ROWS:
                    return
                if node.tag == _ROW:
                    count += 1
                    if count > MOST_ROWS:
                        raise self._too_large(f"a sheet has more than {MOST_ROWS:,} rows")
                    yield bounded.begin_again(), node
                    node.clear()

    def _too_large(self, why: str) -> DataError:
        return DataError(f"{self._name} is too large for a file of Excel ({why}); save it as .csv.")


class _Bounded:
    """A part that raises an error where more is read at once than one row or one text has."""

    def __init__(self, source: IO[bytes], refusal: Callable[[], DataError]):
        self._source = source
        self._refusal = refusal
        self._bytes = 0
        self._tags = 0

    def read(self, size: int = -1, /) -> bytes:
        """Returns the next bytes."""
        chunk = self._source.read(size)
        self._bytes += len(chunk)
        self._tags += chunk.count(b"<")
        if self._bytes > LONGEST_ROW or self._tags > _MOST_TAGS:
            raise self._refusal()
        return chunk

    def begin_again(self) -> int:
        """Begins with the next row or text, and returns the bytes since the last one."""
        count, self._bytes, self._tags = self._bytes, 0, 0
        return count


def _plain(node: Element) -> str:
    """Returns the text of a shared text or of an inline one, without its format."""
    if not len(node):
        return ""
    if len(node) == 1 and node[0].tag == _PLAIN:  # most are
        return node[0].text or ""
    texts = [node.find(_PLAIN), *(run.find(_PLAIN) for run in node.iterfind(_RUN))]
    return "".join(text.text or "" for text in texts if text is not None)
