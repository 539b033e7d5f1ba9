"""Structs in Thrift's compact protocol, as the headers of Parquet's pages are written."""

from __future__ import annotations

from typing import Any

_DEEPEST = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _TEXT, _MAP, _STRUCT = 1, 2, 3, 7, 8, 11, 12
_WHOLE_NUMBERS = (4, 5, 6)
_LISTS = (9, 10)


class Thrift:
    """A reader of structs in `content`, from its first byte on."""

    def __init__(self, content: bytes):
        self._content = content
        self.at = 0
        """Place of the byte that is read next."""

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Returns the fields of a struct by their numbers: whole numbers and structs, and None for
        all others. Raises IndexError where the content ends within it, and ValueError if it is no
        struct.
        """
        found: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._whole()
            kind = head & 15
            # The value of a field that is true or false stands in its head.
            found[number] = None if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("it is too deep")
        if kind in _WHOLE_NUMBERS:
            return self._whole()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in _LISTS:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            self._pass_over((head & 15,), count, depth)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            self._pass_over((kinds >> 4, kinds & 15), count, depth)
        else:
            self._skip(self._length(kind))
        return None

    def _pass_over(self, kinds: tuple[int, ...], count: int, depth: int) -> None:
        for _ in range(count):
            for kind in kinds:
                self._value(kind, depth + 1)

    def _length(self, kind: int) -> int:
        if kind in (_TRUE, _FALSE, _BYTE):
            return 1
        if kind == _DOUBLE:
            return 8
        if kind == _TEXT:
            return self._varint()
        raise ValueError("there is no such kind")

    def _byte(self) -> int:
        value = self._content[self.at]
        self.at += 1
        return value

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._content):
            raise IndexError("it is not all here")

    def _whole(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise ValueError("no number is so long")
