"""A checkpoint holds every plane except the gradients, written straight from the host store's
memory.

``checkpoints/step-N/`` holds one file per unit (its planes one after another),
``buffers.safetensors`` if the model has persistent buffers, and ``manifest.json`` with sizes,
checksums and whatever else a resume needs. The steps below run in this order, so that a crash or a
power failure at any moment loses no complete checkpoint:

- The leftovers of a killed writer are removed. If it was killed between the two renames below, the
  old checkpoint gets its name back.
- Unless the disk has room for the whole checkpoint, nothing is written.
- The unit files are written into the hidden folder ``.step-N.partial`` and synced, then the
  buffers. Older checkpoints are not touched during this.
- The manifest is written and synced after all files that it lists. Then the folder itself is
  synced, so that the file names are on the disk as well.
- If ``step-N`` already exists, it is renamed to ``.step-N.old``.
- ``.step-N.partial`` is renamed to ``step-N``. From now on the checkpoint counts: a folder with
  that name was complete once, and the sizes and checksums in its manifest show whether it still is.
- The folder that contains it and the parent of that folder are synced, so that the new name is on
  the disk.
- Only then are the replaced checkpoint and those beyond the number to keep deleted. Each is first
  renamed to ``.step-N.deleted``, so that a half-deleted checkpoint does not count.

`engine.checkpoints.restore` reads these checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, DiskFullError
from engine.files import (
    FULL,
    body_checksum,
    checksum_of,
    disk_free,
    is_full_in_words,
    new_digest,
    sync_folder,
    write_synced,
)
from engine.model.layout import UnitLayout
from engine.progress import Progress, untold

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runtime.host_store import HostStore

FORMAT = 1
MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"

THREADS = 4
CHUNK_BYTES = 8 << 20
"""Planes are written, read and hashed in chunks of this many bytes."""
UNSYNCED_BYTES = 64 << 20
"""A thread writes about this many bytes between syncs, because dirty page cache counts against the
same memory limit as the planes.
"""
_SPARE_BYTES = 1 << 20
"""The disk must have this many bytes more than the planes, the buffers and the state need. They
allow for the rest of the manifest.
"""


@dataclass(frozen=True)
class Contents:
    """A checkpoint is written from these values, which must not change during the writing."""

    store: HostStore
    state: dict[str, Any]
    """A resume needs these JSON values in addition to the planes."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """These are the model's persistent buffers, by full name."""

    @property
    def plane_bytes(self) -> int:
        """The planes take this many bytes in the checkpoint."""
        return checkpoint_bytes(self.store.layouts, self.store.dtype)

    def needed_bytes(self) -> int:
        """Returns the free space that the checkpoint needs at most, in bytes.

        Raises TypeError or ValueError for a state that cannot be written as JSON.
        """
        state = len(json.dumps(self.state, allow_nan=False))
        buffers = sum(tensor.nbytes for tensor in self.buffers.values())
        # The size of the state is doubled as a safety margin.
        return self.plane_bytes + buffers + 2 * state + _SPARE_BYTES


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk is described by its path and the contents of its manifest."""

    path: Path
    step: int
    bytes: int
    state: dict[str, Any]
    """This state was written with the checkpoint."""
    seconds: float = 0.0
    """Writing took this many seconds; 0.0 for a checkpoint that was found on disk."""
    skipped: tuple[str, ...] = ()
    """Each sentence says which newer checkpoint could not be used, and why."""


def checkpoint_bytes(layouts: Mapping[str, UnitLayout] | Iterable[UnitLayout], dtype: str) -> int:
    """Returns the bytes of the planes in one checkpoint.

    The manifest, about 100 bytes per parameter tensor, is not included.
    """
    units = layouts.values() if isinstance(layouts, Mapping) else layouts
    return sum(sum(_plane_bytes(layout, dtype).values()) for layout in units)


# ---------------------------------------------------------------------- writing


def write_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    contents: Contents,
    keep: int,
    progress: Progress = untold,
) -> CheckpointInfo:
    """Writes ``root/step-<step>`` and deletes all checkpoints except the `keep` newest.

    Checkpoints of later steps are deleted too: they date from before the run was resumed from an
    earlier one. Raises TypeError or ValueError for a state that is not made of JSON values,
    DiskFullError when the disk has too little space or fills up during the writing, and
    CheckpointError when the writing fails for another reason. Earlier checkpoints are then
    untouched.
    """
    root = Path(root)
    began = time.monotonic()
    needed = contents.needed_bytes()
    unfinished = root / f".step-{step}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(root)
        _check_disk_space(root, step, needed)
        unfinished.mkdir()
        written = _write_files(unfinished, step, contents, progress)
        _move_into_place(root, step, unfinished)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        sentence = (
            f"The checkpoint of step {step} cannot be written in {root} ({error.strerror}); the "
            "ones before it are untouched."
        )
        if error.errno in FULL:
            raise DiskFullError(
                sentence, str(root), needed, disk_free(root), is_full_in_words(error)
            ) from error
        raise CheckpointError(sentence) from error
    except BaseException:
        # Any exception from `progress` cancels the checkpoint, and so does Ctrl-C.
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _delete_others(root, step, keep)
    seconds = time.monotonic() - began
    return CheckpointInfo(root / f"step-{step}", step, written, contents.state, seconds)


def _check_disk_space(root: Path, step: int, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise DiskFullError(
            f"The checkpoint of step {step} needs {needed:,} bytes in {root} and "
            f"{free:,} are free; free some disk space and save again.",
            str(root),
            needed,
            free,
        )


def _write_files(folder: Path, step: int, contents: Contents, progress: Progress) -> int:
    """Writes and syncs all files of a checkpoint, the manifest last, and returns their size in
    bytes.
    """
    store = contents.store
    total = contents.plane_bytes
    units = _write_units(folder, store, Meter(total, progress))
    buffers = _write_buffers(folder, contents.buffers) if contents.buffers else None
    values = {
        "format": FORMAT,
        "step": step,
        "dtype": store.dtype,
        "units": units,
        "buffers": buffers,
        "state": contents.state,
    }
    # The values go through JSON first, because the checksum must match what a reader sees, where
    # tuples have become lists.
    body = json.loads(json.dumps(values))
    manifest = json.dumps({"checksum": body_checksum(body), **body}).encode()
    write_synced(folder / MANIFEST, manifest)
    # The files are on the disk already; this puts their names there too.
    sync_folder(folder)
    buffer_bytes = 0 if buffers is None else buffers["bytes"]
    return total + len(manifest) + buffer_bytes


def _write_units(folder: Path, store: HostStore, meter: Meter) -> list[dict[str, Any]]:
    """Writes the file of every unit, and returns the manifest entries of the units."""
    layouts = list(store.layouts.values())
    names = []
    for index, layout in enumerate(layouts):
        plain = re.sub("[^A-Za-z0-9]+", "-", layout.unit)
        names.append(f"{index:04d}-{plain}.planes")
    tasks = [
        partial(_write_unit, folder / name, layout, store, meter)
        for name, layout in zip(names, layouts)
    ]
    units = []
    for name, layout, planes in zip(names, layouts, in_threads(tasks, meter)):
        size = sum(plane["bytes"] for plane in planes.values())
        units.append({**description(layout), "file": name, "bytes": size, "planes": planes})
    return units


def _write_buffers(folder: Path, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    from safetensors.torch import save

    content = save({name: tensor.contiguous() for name, tensor in buffers.items()})
    write_synced(folder / BUFFERS, content)
    return {"file": BUFFERS, "bytes": len(content), "checksum": checksum_of(content)}


def _write_unit(
    path: Path, layout: UnitLayout, store: HostStore, meter: Meter
) -> dict[str, dict[str, Any]]:
    """Writes and syncs the planes of one unit. Returns the offset, bytes and checksum of each
    plane.
    """
    entries: dict[str, dict[str, Any]] = {}
    position = 0
    synced = 0
    with path.open("xb", buffering=0) as file:
        for plane in _plane_bytes(layout, store.dtype):
            digest = new_digest()
            begin = position
            for chunk in chunks(store, layout.unit, plane):
                digest.update(chunk)
                rest = chunk
                while rest:  # an unbuffered write may be partial
                    rest = rest[file.write(rest) :]
                position += len(chunk)
                if position - synced >= UNSYNCED_BYTES:
                    # Only pages that are on the disk can be dropped from the page cache.
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(
                        file.fileno(), synced, position - synced, os.POSIX_FADV_DONTNEED
                    )
                    synced = position
                meter.add(len(chunk))
            entries[plane] = {
                "offset": begin,
                "bytes": position - begin,
                "checksum": digest.hexdigest(),
            }
        # The manifest is written later and must not reach the disk before this file.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return entries


def _move_into_place(root: Path, step: int, unfinished: Path) -> None:
    target = root / f"step-{step}"
    if target.exists():
        # A folder that is not empty cannot be replaced in one rename. Between the two renames,
        # `folders_by_step` finds the old folder.
        target.rename(root / f".step-{step}.old")
    unfinished.rename(target)
    # The renames must be on the disk before anything is deleted. `root` itself may be new, too.
    sync_folder(root)
    sync_folder(root.parent)


def _delete_others(root: Path, step: int, keep: int) -> None:
    """Deletes all checkpoints except `keep` of them: that of `step` and the newest ones before
    it.
    """
    found = folders_by_step(root)
    older = sorted((other for other in found if other < step), reverse=True)
    kept = {step, *older[: max(keep - 1, 0)]}
    for other, path in found.items():
        if other not in kept:
            try:
                path.rename(root / f".step-{other}.deleted")
            except OSError:
                # The new checkpoint is safe. If space runs out, the disk check of the next one
                # reports it.
                continue
    for leftover in (*root.glob(".step-*.deleted"), root / f".step-{step}.old"):
        shutil.rmtree(leftover, ignore_errors=True)


def _clear_leftovers(root: Path) -> None:
    """Removes the leftovers of a killed writer, and restores the checkpoint that it was about to
    replace.
    """
    for path in list(root.glob(".step-*")):
        current = root / path.name[1:].rsplit(".", 1)[0]
        if path.suffix == ".old" and not current.exists():
            # The writer was killed between the two renames, so the old folder is the checkpoint of
            # that step.
            path.rename(current)
        elif path.suffix in (".old", ".partial", ".deleted"):
            shutil.rmtree(path)


# ---------------------------------------------------------------------- shared with restore


def folders_by_step(root: Path) -> dict[int, Path]:
    """Returns the checkpoint folders in `root` by their steps.

    A ``.step-N.old`` counts if ``step-N`` itself is missing: the writer was killed between the two
    renames that replace the old folder.
    """
    found: dict[int, Path] = {}
    if root.is_dir():
        for pattern in (r"step-(\d+)", r"\.step-(\d+)\.old"):
            for path in root.iterdir():
                match = re.fullmatch(pattern, path.name)
                if match and path.is_dir():
                    found.setdefault(int(match[1]), path)
    return found


def newest_step(root: Path) -> int | None:
    """Returns the step of the newest checkpoint folder in `root`, or None if there is none or the
    folder cannot be read.
    """
    try:
        return max(folders_by_step(root), default=None)
    except OSError:
        return None


def _plane_bytes(layout: UnitLayout, dtype: str) -> dict[str, int]:
    """Returns the bytes of each plane that a checkpoint holds, in file order."""
    return {plane: size for plane, size in layout.plane_bytes(dtype).items() if plane != "grad"}


def description(layout: UnitLayout) -> dict[str, Any]:
    """Describes a layout. Two layouts with the same description have interchangeable planes."""
    parameters = []
    for spec, offset in zip(layout.parameters, layout.offsets):
        fields = asdict(spec)
        del fields["exact"]  # the planes are the same, whatever the device computes with
        parameters.append({**fields, "offset": offset})
    return {
        "unit": layout.unit,
        "numel": layout.numel,
        "decay_numel": layout.decay_numel,
        "parameters": parameters,
    }


def chunks(store: HostStore, unit: str, plane: str) -> Iterator[memoryview]:
    """Yields writable views of the plane's own memory, as bytes."""
    memory = store.array(unit, plane).view("uint8").data
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]


class Meter:
    """A meter adds up the bytes from all threads for one progress callback."""

    def __init__(self, total: int, progress: Progress):
        self._stopped = False
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds `count` bytes that a thread has written or read.

        Raises what the callback raises, and RuntimeError once the meter has been stopped.
        """
        # The callback is called under the lock, because only one thread at a time may call it.
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped, since another thread failed")
            self._done += count
            self._progress(self._done, self._total)

    def stop(self) -> None:
        """Makes the next `add` of every thread raise, which ends its task."""
        self._stopped = True


def in_threads(tasks: Sequence[Callable[[], Any]], meter: Meter) -> list[Any]:
    """Returns the results of all tasks, in order.

    The first exception is raised. The other tasks end soon, because their meter is stopped.
    """
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
        futures: list[Future] = [pool.submit(task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            meter.stop()
            for future in futures:
                future.cancel()
            raise
