"""Weights that are not trained are the same in every checkpoint of a run. They have files of their
own, which a checkpoint shares with those before it: the names differ, and the bytes are on the disk
once (hard links). Where the file system has no such links, they are written again.

Each checkpoint is whole by itself: when others are deleted, its files stay. What is damaged in one
is damaged in all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.checkpoints import copies
from engine.checkpoints.piece_files import PieceFile
from engine.checkpoints.threads import Meter, in_threads
from engine.checkpoints.unit_files import file_name, piece_checksum
from engine.errors import CheckpointError
from engine.planes.layout import UnitLayout

if TYPE_CHECKING:
    from engine.host.host_store import HostStore

FROZEN = "frozen"
"""The manifest has these files under this name."""
_PLANE = "weight_high"


@dataclass(frozen=True)
class Earlier:
    """An `Earlier` is a checkpoint of the same run whose files may be shared."""

    path: Path
    files: Sequence[dict[str, Any]]
    """It has these frozen files, as its manifest describes them."""


class FrozenFiles:
    """`FrozenFiles` are those of one checkpoint that is written."""

    def __init__(self, store: HostStore, earlier: Iterable[Earlier]):
        self._store = store
        self._earlier = list(earlier)
        self._layouts = [
            (index, layout)
            for index, layout in enumerate(store.layouts.values())
            if layout.high_numel > layout.numel
        ]

    @property
    def new_bytes(self) -> int:
        """Returns the bytes that are not on the disk yet."""
        return sum(self._size(layout) for _, layout in self._layouts if self._found(layout) is None)

    def write(self, folder: Path, meter: Meter) -> list[dict[str, Any]]:
        """Links or writes the files, which are on the disk then, and returns their entries in the
        manifest. Raises OSError, and what the callback of `meter` raises.
        """
        put = partial(self._put, folder, meter)
        tasks = [partial(put, index, layout) for index, layout in self._layouts]
        return in_threads(tasks, meter)

    def _size(self, layout: UnitLayout) -> int:
        begin, end = layout.frozen_range(self._store.dtype)
        return end - begin

    def _found(self, layout: UnitLayout) -> tuple[Path, dict[str, Any]] | None:
        """Returns an earlier file of a unit, with its entry."""
        for earlier in self._earlier:
            for entry in earlier.files:
                if entry["unit"] == layout.unit and entry["bytes"] == self._size(layout):
                    file = earlier.path / entry["file"]
                    with contextlib.suppress(OSError):
                        if file.stat().st_size == entry["bytes"]:
                            return file, entry
        return None

    def _put(self, folder: Path, meter: Meter, index: int, layout: UnitLayout) -> dict[str, Any]:
        name = file_name(index, layout.unit, FROZEN)
        found = self._found(layout)
        if found is not None:
            with contextlib.suppress(OSError):
                os.link(found[0], folder / name)
                return {**found[1], "file": name}
        begin, end = layout.frozen_range(self._store.dtype)
        checksums: list[str] = []
        file = PieceFile(folder / name)
        try:
            for start in range(begin, end, copies.PIECE_BYTES):
                stop = min(start + copies.PIECE_BYTES, end)
                content = self._store.content(layout.unit, _PLANE, start, stop).data
                checksums.append(piece_checksum(content))
                file.write(content, start - begin)
                meter.add(len(content))
            file.close()
        finally:
            file.abandon()
        return {"unit": layout.unit, "file": name, "bytes": end - begin, "checksums": checksums}


def read_frozen(
    path: Path, entries: Sequence[dict[str, Any]], store: HostStore, piece_bytes: int, meter: Meter
) -> None:
    """Reads frozen weights into the planes, and verifies them. Raises CheckpointError for what is
    damaged.
    """
    tasks: list[Callable[[], None]] = [
        partial(_read, path, entry, store, piece_bytes, meter) for entry in entries
    ]
    in_threads(tasks, meter)


def _read(
    path: Path, entry: dict[str, Any], store: HostStore, piece_bytes: int, meter: Meter
) -> None:
    unit, place = entry["unit"], store.layouts[entry["unit"]].frozen_range(store.dtype)[0]
    with (path / entry["file"]).open("rb", buffering=0) as file:
        for number, checksum in enumerate(entry["checksums"]):
            begin = number * piece_bytes
            end = min(begin + piece_bytes, entry["bytes"])
            is_there = store.is_in_ram(unit, _PLANE)
            piece = np.empty(end - begin, np.uint8)
            if is_there:
                piece = store.content(unit, _PLANE, place + begin, place + end)
            rest = piece.data
            while rest:  # an unbuffered read may be partial
                count = file.readinto(rest)
                if not count:
                    raise CheckpointError(f"Checkpoint {path} is damaged: a file ends too early.")
                rest = rest[count:]
            if piece_checksum(piece.data) != checksum:
                raise CheckpointError(
                    f"Checkpoint {path} is damaged: the weights of unit {unit} that are not "
                    f"trained ({entry['file']}) do not match their checksum."
                )
            if not is_there:
                store.put(unit, _PLANE, place + begin, piece)
            meter.add(end - begin)
        # The page cache need not keep what the planes now hold.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
