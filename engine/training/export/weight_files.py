"""The weight files of an export: safetensors of a size that is easy to move, with an index where
there are several.

transformers writes a model chunk by chunk, where there is no memory for a copy of all of it.
`WeightFiles` takes the files of these chunks as they come, and joins their tensors to as few files
as a folder needs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine import safe_files
from engine.model.hub.hub_cache import INDEX, WEIGHTS
from engine.model.hub.safetensors_header import SafetensorsEntry, read_safetensors_header

SMALLEST = 1 / 20
"""Size of a file at least, as a fraction of the most that one holds; the file before it holds a few
more bytes for that.
"""
_HEADER_ALIGNMENT = 8
_COPIED_BYTES = 8 << 20


@dataclass(frozen=True)
class _TakenTensor:
    """One tensor in a file that was taken."""

    name: str
    entry: SafetensorsEntry
    """Its entry in a header: `dtype`, `shape` and `data_offsets`."""
    file: Path
    start: int
    """Byte of `file` at which its values begin."""
    bytes: int

    @property
    def value_bits(self) -> float:
        return self.bytes * 8 / max(1, math.prod(self.entry.shape))


class WeightFiles:
    """The weight files of one folder while they are written.

    Each has at most `most_bytes` of weights, but for one tensor that alone has more, and for
    `SMALLEST`.
    """

    def __init__(self, folder: Path, most_bytes: int):
        self._folder = folder
        self._most = most_bytes
        self._full: list[_TakenTensor] = []
        """Tensors that fill a file. It is written once the ones behind it are enough for another.
        """
        self._pending: list[_TakenTensor] = []
        self._files: list[tuple[Path, list[_TakenTensor]]] = []
        self._taken: dict[Path, int] = {}
        """Number of tensors of each file that was taken."""
        self._copied: Counter[Path] = Counter()

    @property
    def names(self) -> list[str]:
        """Names of all tensors that were taken."""
        groups = [*(tensors for _, tensors in self._files), self._full, self._pending]
        return [tensor.name for tensors in groups for tensor in tensors]

    def take(self, file: Path, undivided: bool = False) -> None:
        """Moves the tensors of a safetensors file of this folder into the files that are written.
        undivided: all of them go into the same one. Raises OSError.
        """
        tensors = _tensors(file)
        self._taken[file] = len(tensors)
        if not tensors:
            file.unlink()
        for group in [tensors] if undivided else [[tensor] for tensor in tensors]:
            there = _bytes(self._pending)
            if there + _bytes(group) > self._most and there >= self._most * SMALLEST:
                self._close()
            self._pending += group

    def _close(self) -> None:
        """Writes the file before, and keeps what is pending as the next one."""
        if self._full:
            self._write(self._full)
        self._full, self._pending = self._pending, []

    def finish(self) -> None:
        """Writes what is left, renames the files as transformers expects them, and writes their
        index where there are several. Raises OSError.
        """
        if _bytes(self._pending) < self._most * SMALLEST:
            self._pending, self._full = [*self._full, *self._pending], []
        for group in (self._full, self._pending):
            if group:
                self._write(group)
        (self._folder / INDEX).unlink(missing_ok=True)
        if len(self._files) == 1:
            self._files[0][0].replace(self._folder / WEIGHTS)
            return
        stem, _, suffix = WEIGHTS.rpartition(".")
        places: dict[str, str] = {}
        for number, (file, tensors) in enumerate(self._files, 1):
            name = f"{stem}-{number:05d}-of-{len(self._files):05d}.{suffix}"
            places |= {tensor.name: name for tensor in tensors}
            file.replace(self._folder / name)
        size = sum(_bytes(tensors) for _, tensors in self._files)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        text = json.dumps(index, indent=2) + "\n"
        safe_files.write_whole(self._folder / INDEX, text, self._folder, durable=False)

    def _write(self, tensors: list[_TakenTensor]) -> None:
        """Writes one file. Files that were taken are removed once nothing more is in them."""
        made = self._folder / f".weights-{len(self._files)}"
        self._files.append((made, tensors))
        first = tensors[0].file
        if {tensor.file for tensor in tensors} == {first} and len(tensors) == self._taken[first]:
            first.replace(made)
            return
        # As safetensors orders them: values of wide types first, so that all are aligned.
        ordered = sorted(tensors, key=lambda tensor: (-tensor.value_bits, tensor.name))
        with made.open("wb") as written:
            written.write(_header(ordered))
            for tensor in ordered:
                _copy(tensor, written)
                self._copied[tensor.file] += 1
                if self._copied[tensor.file] == self._taken[tensor.file]:
                    tensor.file.unlink()


def _tensors(file: Path) -> list[_TakenTensor]:
    """Returns the tensors of a safetensors file, in the order in which it has them."""
    begin, entries = read_safetensors_header(file)
    found = [
        _TakenTensor(name, entry, file, begin + entry.data_offsets[0], entry.bytes)
        for name, entry in entries.items()
    ]
    return sorted(found, key=lambda tensor: tensor.start)


def _bytes(tensors: list[_TakenTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _header(tensors: list[_TakenTensor]) -> bytes:
    """Returns the beginning of a safetensors file with these tensors, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.entry.dtype,
            "shape": tensor.entry.shape,
            "data_offsets": [place, place + tensor.bytes],
        }
        place += tensor.bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _copy(tensor: _TakenTensor, target: BinaryIO) -> None:
    """Appends the values of a tensor to an open file."""
    with tensor.file.open("rb") as source:
        source.seek(tensor.start)
        left = tensor.bytes
        while left:
            content = source.read(min(left, _COPIED_BYTES))
            if not content:
                raise OSError(f"{tensor.file} ends too early")
            target.write(content)
            left -= len(content)
