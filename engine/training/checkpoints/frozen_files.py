"""Weights that are not trained are the same in every checkpoint of a run. They have files of their
own, which a checkpoint shares with those before it: the names differ, and the bytes are on the disk
once (hard links). Where the file system has no such links, they are written again.

Each checkpoint is whole by itself: when others are deleted, its files stay. What is damaged in one
is damaged in all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from engine import safe_files
from engine.errors import CheckpointError
from engine.planning.layout.layout import UnitLayout
from engine.training.checkpoints import staging
from engine.training.checkpoints.chunk_files import ChunkFile, Meter, in_threads
from engine.training.checkpoints.manifest import FrozenFile, run_of
from engine.training.checkpoints.unit_files import chunk_checksum, file_name

if TYPE_CHECKING:
    from engine.runtime.host.host_states import HostStates

FROZEN = "frozen"
"""The manifest has these files under this name."""
_PLANE = "weight_high"


@dataclass(frozen=True)
class Earlier:
    """An `Earlier` is a checkpoint of the same run whose files may be shared."""

    path: Path
    files: Sequence[FrozenFile]
    """It has these frozen files, as its manifest describes them."""


@dataclass
class _Written:
    """`_Written` is what this process has written of one `HostStates`. The lock is held meanwhile,
    so that of two checkpoints that are written at the same time, the second finds the files of the
    first.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    newest: Sequence[Earlier] = ()
    """These files were written last. Their folder has one of two names."""

    def note(self, entries: Sequence[FrozenFile], names: tuple[Path, Path]) -> None:
        """Remembers the files that were written, into a folder with one of these names."""
        self.newest = tuple(Earlier(name, entries) for name in names)


_WRITTEN: WeakKeyDictionary[HostStates, _Written] = WeakKeyDictionary()
_WRITTEN_LOCK = threading.Lock()
_POLL_SECONDS = 0.1
"""Seconds between two checks of whether another checkpoint, whose files are awaited, is aborted."""


class FrozenFiles:
    """`FrozenFiles` are those of one checkpoint that is written under `root`, in a run's folder.
    `find` returns the checkpoints of the run, those whose files are shared first.
    """

    def __init__(self, states: HostStates, root: Path, find: Callable[[], list[Earlier]]):
        self._states = states
        self._root = root
        self._find = find
        self._layouts = [
            (index, layout)
            for index, layout in enumerate(states.layouts.values())
            if layout.high_numel > layout.numel
        ]
        self._earlier = find() if self._layouts else []
        with _WRITTEN_LOCK:
            self._written = _WRITTEN.setdefault(states, _Written())

    @cached_property
    def new_bytes(self) -> int:
        """The bytes that are not on the disk yet, or must be written again."""
        sizes = {layout.unit: self._size(layout) for _, layout in self._layouts}
        found = [found for _, layout in self._layouts for found in self._found(layout)]
        if found and self._can_link(found[0][0]):
            for _, entry in found:
                sizes[entry.unit] = 0
        return sum(sizes.values())

    def write(self, folder: Path, finished: Path, meter: Meter) -> tuple[list[FrozenFile], int]:
        """Links or writes the files, which are on the disk then, into `folder`, whose name will be
        `finished`. Returns their entries in the manifest, and the bytes that were written. Raises
        OSError, and what the callback of `meter` raises.
        """
        if not self._layouts:
            return [], 0
        before = self.new_bytes
        while not self._written.lock.acquire(timeout=_POLL_SECONDS):
            meter.add(0)
        try:
            folder_of_run, newest = self._root.parent, self._written.newest
            newest = [each for each in newest if each.path.parent.parent == folder_of_run]
            self._earlier = [*newest, *self._find()]
            put = partial(self._put, folder, meter)
            tasks = [partial(put, index, layout) for index, layout in self._layouts]
            results = in_threads(tasks, meter)
            entries, size = [entry for entry, _ in results], sum(count for _, count in results)
            if size:
                self._written.note(entries, (folder, finished))
        finally:
            self._written.lock.release()
        meter.add(max(0, before - size))  # what another checkpoint has written meanwhile
        return entries, size

    def _size(self, layout: UnitLayout) -> int:
        begin, end = layout.frozen_range(self._states.dtype)
        return end - begin

    def _can_link(self, file: Path) -> bool:
        """Tells whether the file system has links, by making one."""
        run = self._root.parent
        trial = run / f".{self._root.name}.link"
        try:
            safe_files.remove(trial, run)
            safe_files.link(file, trial, run)
            safe_files.remove(trial, run)
        except OSError:
            return False
        return True

    def _found(self, layout: UnitLayout) -> Iterator[tuple[Path, FrozenFile]]:
        """Yields the earlier files of a unit that are there now, with their entries."""
        for earlier in self._earlier:
            for entry in earlier.files:
                if entry.unit == layout.unit and entry.bytes == self._size(layout):
                    file = earlier.path / entry.file
                    if _size_of(file) == entry.bytes:
                        yield file, entry

    def _linked(self, file: Path, layout: UnitLayout) -> FrozenFile | None:
        """Links a unit's file to an earlier one, whose entry is returned; None if none can be."""
        for earlier, entry in self._found(layout):
            with contextlib.suppress(OSError):
                safe_files.link(earlier, file, run_of(file.parent))
                return msgspec.structs.replace(entry, file=file.name)
        return None

    def _put(
        self, folder: Path, meter: Meter, index: int, layout: UnitLayout
    ) -> tuple[FrozenFile, int]:
        """Links or writes the file of a unit. Returns its entry and the bytes that were written."""
        name = file_name(index, layout.unit, FROZEN)
        linked = self._linked(folder / name, layout)
        if linked is not None:
            return linked, 0
        begin, end = layout.frozen_range(self._states.dtype)
        checksums: list[str] = []
        file = ChunkFile(folder / name, run_of(folder))
        try:
            for start in range(begin, end, staging.CHUNK_BYTES):
                stop = min(start + staging.CHUNK_BYTES, end)
                content = self._states.content(layout.unit, _PLANE, start, stop).data
                checksums.append(chunk_checksum(content))
                file.write(content, start - begin)
                meter.add(len(content))
            file.close()
        finally:
            file.abandon()
        size = end - begin
        return FrozenFile(layout.unit, name, size, tuple(checksums)), size


def _size_of(file: Path) -> int | None:
    """Returns the bytes of a file, or None if it is not there or no regular file."""
    try:
        return safe_files.size_of(file, run_of(file.parent))
    except OSError:
        return None


def read_frozen(
    path: Path, entries: Sequence[FrozenFile], states: HostStates, chunk_bytes: int, meter: Meter
) -> None:
    """Reads frozen weights into the planes, and verifies them. Raises CheckpointError for what is
    damaged.
    """
    tasks: list[Callable[[], None]] = [
        partial(_read, path, entry, states, chunk_bytes, meter) for entry in entries
    ]
    in_threads(tasks, meter)


def _read(
    path: Path, entry: FrozenFile, states: HostStates, chunk_bytes: int, meter: Meter
) -> None:
    unit, place = entry.unit, states.layouts[entry.unit].frozen_range(states.dtype)[0]
    with safe_files.open_to_read(path / entry.file, run_of(path), entry.bytes, buffering=0) as file:
        for number, checksum in enumerate(entry.checksums):
            begin = number * chunk_bytes
            end = min(begin + chunk_bytes, entry.bytes)
            is_there = states.placement.is_in_ram(unit, _PLANE)
            chunk = np.empty(end - begin, np.uint8)
            if is_there:
                chunk = states.content(unit, _PLANE, place + begin, place + end)
            rest = chunk.data
            while rest:  # an unbuffered read may be partial
                count = file.readinto(rest)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"Checkpoint {path} is damaged: a file ends too early.")
                rest = rest[count:]
            if chunk_checksum(chunk.data) != checksum:
                raise CheckpointError(
                    f"Checkpoint {path} is damaged: the weights of unit {unit} that are not "
                    f"trained ({entry.file}) do not match their checksum."
                )
            if not is_there:
                states.put(unit, _PLANE, place + begin, chunk)
            meter.add(end - begin)
        # The page cache need not keep what the planes now hold.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
