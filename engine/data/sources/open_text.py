"""Text files as bytes in UTF-8, whatever their compression and their encoding.

A compressed file is decompressed in a thread while its rows are parsed. It is never in memory as a
whole, and never unpacked to the disk.
"""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from isal import igzip, igzip_lib

from engine.data.sources.kinds import (
    LONGEST_MAGIC,
    refuse_no_compression,
    refuse_other_content,
    suffixes_of,
)
from engine.data.sources.reading import Damaged, errors_with_place, reason
from engine.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 1 << 17
_BLOCK = 8 << 20
"""Bytes that the thread decompresses at a time. A small block would wait for Python's lock longer
than it takes.
"""
_MOST_CHECKED = {".gz": 1 << 30, ".zst": 1 << 30, ".xz": 1 << 28, ".bz2": 1 << 26}
"""Number of bytes that are decompressed, in about a second, to find what is wrong with a
compression.
"""
_STEP = 1 << 12
"""Bytes in which what stands before a damaged place is read."""
_SAMPLE = 1 << 12
_MARKS = (  # UTF-32 comes first, because its mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_NO_FILES: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_text(path: Path) -> BinaryIO:
    """Opens a text file and returns its content in UTF-8, without a byte order mark. Raises
    DataError for a file that cannot be opened or that is no text.
    """
    file, encoding, mark = _opened(path)
    file.read(mark)
    if encoding == "utf-8":
        return file
    return io.BufferedReader(_Transcoded(file, encoding), _BUFFER)


def encoding_of(path: Path) -> str:
    """Returns the encoding of a text file, which is UTF-8 unless its first bytes mean another."""
    file, encoding, _ = _opened(path)
    file.close()
    return encoding


def open_bytes(path: Path, suffix: str) -> io.BufferedReader:
    """Opens a file. Raises DataError if that fails, or if the file does not fit the `suffix`: a
    pipe, or another kind of file.
    """
    try:
        mode = path.stat().st_mode
        for is_kind, kind in _NO_FILES:
            if is_kind(mode):  # opening a pipe would wait for ever
                raise DataError(f"{path} is {kind} and no file; give a file with rows.")
        file: io.BufferedReader = io.BufferedReader(path.open("rb", buffering=0), _BUFFER)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({reason(error)}); check its permissions."
        ) from None
    with errors_with_place(path.name, lambda: "its beginning"):
        refuse_other_content(file.peek(LONGEST_MAGIC)[:LONGEST_MAGIC], path.name, suffix)
    return file


def _opened(path: Path) -> tuple[io.BufferedReader, str, int]:
    """Returns the file, decompressed, with its encoding and the length of its byte order mark."""
    suffix, compression = suffixes_of(path)
    file = open_bytes(path, compression or suffix)
    with errors_with_place(path.name, lambda: "its beginning"):
        if compression:
            refuse_no_compression(file.peek(LONGEST_MAGIC), path.name, compression)
            file.close()
            file = io.BufferedReader(_Decompressed(path, compression), _BUFFER)
        head = file.peek(_SAMPLE)[:_SAMPLE]
    if compression:
        refuse_other_content(head, path.name, suffix)
    return file, *_encoding(head)


def damage_of(path: Path) -> str | None:
    """Reads a compressed file to its end, or at most `_MOST_CHECKED` bytes. Returns what is
    wrong with its compression, to continue after its name, or None.
    """
    _, compression = suffixes_of(path)
    try:
        with _Decompressed(path, compression) as stream:
            for _ in range(_MOST_CHECKED[compression] // _BLOCK):
                if not stream.read(_BLOCK):
                    break
    except Damaged as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- encodings


def _encoding(head: bytes) -> tuple[str, int]:
    """Returns the encoding of a text that begins with `head`, and the length of its mark."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    # In UTF-16, every other byte of Latin letters, digits and punctuation is zero.
    characters = len(head) // 2
    first, second = head[0::2].count(0), head[1::2].count(0)
    for encoding, zeros, others in (("utf-16-le", second, first), ("utf-16-be", first, second)):
        if characters > 1 and zeros * 4 >= characters and others * 10 <= zeros:
            return encoding, 0
    return "utf-8", 0


class _Blocks(io.RawIOBase):
    """A file whose content comes in blocks of any length, from `_block`."""

    def __init__(self) -> None:
        self._left = memoryview(b"")
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._left and not self._ended:
            self._left = memoryview(self._block())
        target = memoryview(buffer)
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _block(self) -> bytes:
        """Returns the next bytes. At the end of the file, it sets `_ended`."""
        raise NotImplementedError


class _Transcoded(_Blocks):
    """The text of `file` in UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str):
        super().__init__()
        self._file = file
        self._decode = codecs.getincrementaldecoder(encoding)().decode

    def _block(self) -> bytes:
        raw = self._file.read(_BUFFER)
        self._ended = not raw
        return self._decode(raw, self._ended).encode()

    def close(self) -> None:
        self._file.close()
        super().close()


# ---------------------------------------------------------------------- compression


class _Decompressed(_Blocks):
    """The content of a compressed file. While a block is used, a thread makes the next one."""

    def __init__(self, path: Path, compression: str):
        super().__init__()
        self._path = path
        self._compression = compression
        self._stream = _stream(path, compression)
        self._thread: ThreadPoolExecutor | None = None
        self._next: Future[bytes] | None = None
        self._read = 0
        self._damage: Damaged | None = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._stream.close()
        super().close()

    def _block(self) -> bytes:
        if self._damage is not None:
            raise self._damage
        try:
            block: bytes = self._stream.read(_BLOCK) if self._next is None else self._next.result()
        except _DAMAGES as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the content
            self._damage = Damaged(_problem(error))
            return self._before_damage()
        self._read += len(block)
        self._ended = len(block) < _BLOCK
        if not self._ended:  # a small file needs no thread
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "decompress")
            self._next = self._thread.submit(self._stream.read, _BLOCK)
        return block

    def _before_damage(self) -> bytes:
        """Reads again, in small chunks, the part of the block that stands before the damage."""
        found = bytearray()
        with _stream(self._path, self._compression) as stream:
            left = self._read
            while left:
                left -= len(stream.read(min(left, _BLOCK)))
            try:
                while chunk := stream.read(_STEP):
                    found += chunk
            except _DAMAGES:
                pass
        return bytes(found)


_DAMAGES: tuple[Any, ...] = (EOFError, OSError, igzip_lib.IsalError, lzma.LZMAError)


def _problem(error: BaseException) -> str:
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return "is cut off"
    return f"is damaged ({reason(error)})"


def _stream(path: Path, compression: str) -> Any:
    """Opens a compressed file for reading its content."""
    if compression == ".gz":
        return igzip.open(path, "rb")  # three times as fast as Python's own
    if compression == ".bz2":
        return bz2.open(path, "rb")
    if compression == ".xz":
        return lzma.open(path, "rb")
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
