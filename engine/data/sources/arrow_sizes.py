"""The memory that the batches of an Arrow file take once they are decompressed, from the file's own
metadata: a megabyte may stand for a terabyte.

Each compressed buffer begins with its length when decompressed, for which pyarrow allocates memory
before it decompresses anything. The metadata of a message are a flatbuffer; the names of tables and
fields are those of the format's ``Message.fbs`` and ``File.fbs``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from engine.data.sources.memory_bound import refuse_too_large

_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Values of ``MessageHeader``."""
_OLD_COMPRESSION = b"ARROW:experimental_compression"
"""Files of Feather's first months name their compression among the metadata of a user."""


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer, which begins at a place of `content`."""

    content: bytes
    at: int

    @classmethod
    def root(cls, content: bytes) -> _Table:
        return cls(content, _number("<I", content, 0))

    def _field(self, slot: int) -> int:
        """Returns the place of a field; 0 where the table has its default."""
        fields = self.at - _number("<i", self.content, self.at)
        entry = 4 + 2 * slot
        if entry + 2 > _number("<H", self.content, fields):
            return 0
        offset = _number("<H", self.content, fields + entry)
        return self.at + offset if offset else 0

    def number(self, slot: int, form: str) -> int:
        place = self._field(slot)
        return _number(form, self.content, place) if place else 0

    def table(self, slot: int) -> _Table | None:
        place = self._field(slot)
        return _Table(self.content, self._pointed(place)) if place else None

    def structs(self, slot: int, form: str) -> list[tuple[int, ...]]:
        """Returns a vector of structs, each as its numbers."""
        place = self._field(slot)
        if not place:
            return []
        begin = self._pointed(place)
        size = _number("<I", self.content, begin) * struct.calcsize(form)
        content = self.content[begin + 4 : begin + 4 + size]
        if len(content) != size:
            raise ValueError("its metadata are damaged")
        return list(struct.iter_unpack(form, content))

    def _pointed(self, place: int) -> int:
        return place + _number("<I", self.content, place)


def _number(form: str, content: bytes, at: int) -> int:
    try:
        return int(struct.unpack_from(form, content, at)[0])
    except struct.error:
        raise ValueError("its metadata are damaged") from None


class _Sizes:
    """The sizes of the messages of one file, whose dictionaries stay in memory."""

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name = file.fileno(), name
        self._end = os.fstat(self._file).st_size
        self._dictionaries: dict[int, int] = {}
        """Bytes of each dictionary, by its id."""

    def _read(self, size: int, at: int) -> bytes:
        """Returns what the file has there, which may be less at its end."""
        return os.pread(self._file, max(0, min(size, self._end - at)), at) if at >= 0 else b""

    def message(self, at: int) -> tuple[int, int] | None:
        """Reads the message that begins at a place. Returns its ``MessageHeader``, and where the
        next one begins; None at the end of a stream and of a file that is cut short, which pyarrow
        reports. Raises DataError where it is too large.
        """
        head = self._read(8, at)
        begin = at + 4
        if head[:4] == _CONTINUES.to_bytes(4, "little"):
            head, begin = head[4:], at + 8
        size = int.from_bytes(head[:4], "little")
        metadata = self._read(size, begin)
        if not size or len(metadata) < size:
            return None
        table = _Table.root(metadata)
        kind, body = table.number(1, "<B"), begin + size
        stored = max(0, min(table.number(3, "<q"), self._end - body))
        header = table.table(2)
        is_old = _OLD_COMPRESSION in metadata
        if header is not None and kind == _RECORD_BATCH:
            self._refuse_large(self._decompressed(header, body, is_old), stored)
        elif header is not None and kind == _DICTIONARY_BATCH:
            values, number = header.table(1), header.number(0, "<q")
            adds = self._dictionaries.get(number, 0) if header.number(2, "<B") else 0
            size = self._decompressed(values, body, is_old) if values is not None else 0
            self._dictionaries[number] = adds + size
            self._refuse_large(0, stored)
        return kind, body + stored

    def _decompressed(self, batch: _Table, body: int, is_old: bool) -> int:
        """Returns the bytes of the buffers of a ``RecordBatch`` that are compressed."""
        if batch.table(3) is None and not is_old:
            return 0
        total = 0
        for offset, size in batch.structs(2, "<qq"):
            stated = self._read(8, body + offset) if size >= 8 else b""
            if len(stated) == 8:
                total += max(0, int.from_bytes(stated, "little", signed=True))
        return total

    def _refuse_large(self, batch: int, stored: int) -> None:
        """Raises DataError if a batch, with all dictionaries, takes more memory than is given to
        one of `stored` bytes in the file.
        """
        refuse_too_large(
            f"{self._name} has a batch of rows",
            batch + sum(self._dictionaries.values()),
            stored,
            "write the file again with fewer rows in each batch, or as Parquet",
        )


def checked_stream(file: BinaryIO, name: str) -> Iterator[None]:
    """Yields before each record batch of a stream, once what is read with it was checked. Raises
    DataError where a batch is too large.
    """
    sizes, place = _Sizes(file, name), 0
    while (found := sizes.message(place)) is not None:
        kind, place = found
        if kind == _RECORD_BATCH:
            yield


class CheckedFile:
    """The record batches of a file with a footer, whose dictionaries are checked at once. Raises
    DataError where a batch is too large.
    """

    def __init__(self, file: BinaryIO, name: str):
        self._sizes = _Sizes(file, name)
        self._batches: list[int] = []
        """Places of the record batches."""
        footer = _footer(file)
        if footer is None:
            return
        block = "<qi4xq"
        for place, *_ in footer.structs(2, block):
            self._sizes.message(place)
        self._batches = [place for place, *_ in footer.structs(3, block)]

    def check(self, number: int) -> None:
        """Checks the batch of this number, before it is read."""
        self._sizes.message(self._batches[number])


def _footer(file: BinaryIO) -> _Table | None:
    """Returns the ``Footer`` of a file; None where there is none, which pyarrow reports."""
    tail = len(_MAGIC) + 4
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - tail))
    end = file.read(tail)
    length = int.from_bytes(end[:4], "little", signed=True)
    if end[4:] != _MAGIC or not 0 < length <= size - tail:
        return None
    file.seek(size - tail - length)
    return _Table.root(file.read(length))
