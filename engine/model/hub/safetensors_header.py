"""The header of a file of safetensors. The file begins with the header's length, in 8 bytes, and
the header as JSON: of each tensor, its type, its shape and where its bytes are. No torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct

from engine import safe_files

MOST_BYTES = 100 << 20
"""Largest number of bytes of a header that safetensors allows."""
MOST_FILE = 1 << 50
"""Largest size of a file of weights, in bytes."""
_MOST_SIZES = 64
"""Largest number of dimensions of a tensor of torch."""
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Number of bits of a value of each type, by the names of safetensors."""
_Whole = Annotated[int, Meta(ge=0, le=1 << 62)]


class SafetensorsEntry(Struct, frozen=True, gc=False):
    """One tensor in the header. The defaults are those of no tensor: beside them, the header has an
    object of texts, `__metadata__`, and one type for all is decoded twice as fast.
    """

    dtype: str = ""
    shape: Annotated[list[_Whole], Meta(max_length=_MOST_SIZES)] = []
    data_offsets: tuple[_Whole, _Whole] = (0, -1)
    """Its first byte and the one after its last, from the end of the header."""

    @property
    def bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


_DECODER = msgspec.json.Decoder(dict[str, SafetensorsEntry])


class Contradiction(ValueError):
    """Raised for a header that contradicts itself."""


class CutOff(ValueError):
    """Raised for a file that ends before the bytes that its header reports."""


def read_safetensors_header(file: Path) -> tuple[int, dict[str, SafetensorsEntry]]:
    """Returns where the tensors of a file begin, and its tensors by name. Raises OSError, and
    ValueError for a file that is none of safetensors, or contradicts itself.
    """
    with safe_files.open_linked(file, MOST_FILE) as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        return safetensors_header_of(opened, size)


def safetensors_header_of(opened: BinaryIO, size: int) -> tuple[int, dict[str, SafetensorsEntry]]:
    """Returns the same of an open file of `size` bytes."""
    length = int.from_bytes(opened.read(8), "little")
    if length > MOST_BYTES and size >= 8:
        raise Contradiction("its header is longer than safetensors allows")
    if size < 8 + length:
        raise CutOff(f"it ends after {size:,} bytes")
    entries = _decoded(opened.read(length))
    _refuse_contradictions(entries, 8 + length, size)
    return 8 + length, entries


def _decoded(header: bytes) -> dict[str, SafetensorsEntry]:
    try:
        entries = _DECODER.decode(header)
    except (ValueError, RecursionError):
        raise Contradiction("its header is not that of safetensors") from None
    entries.pop("__metadata__", None)
    # JSON with the same name twice is decoded to the last of the two.
    if header.count(b'"data_offsets"') > len(entries):
        raise Contradiction("its header tells of a tensor twice")
    return entries


def _refuse_contradictions(entries: dict[str, SafetensorsEntry], start: int, size: int) -> None:
    """Raises ValueError unless the tensors fill a file of `size` bytes from `start` on, one after
    the other, each with as many bytes as its shape needs. safetensors demands the same.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        bits = _BITS.get(entry.dtype)
        if not entry.dtype or stop < begin:
            raise Contradiction(f"it does not say of what type {name[:80]!r} is, and where")
        if begin != end:
            raise Contradiction(f"{name[:80]!r} in it does not begin where the one before ends")
        if bits is not None and math.prod(entry.shape) * bits != 8 * entry.bytes:
            raise Contradiction(f"{name[:80]!r} in it has other bytes than its shape needs")
        end = stop
    if size < start + end:
        raise CutOff(f"it has {size:,} of {start + end:,} bytes")
    if entries and size > start + end:
        raise Contradiction("it has bytes that belong to no tensor")
