"""A checkpoint holds every plane but the gradients, written straight from the host store's memory.

``checkpoints/step-N/`` holds one file a unit (its planes one after another),
``buffers.safetensors`` where the model has buffers that belong to its weights, and
``manifest.json`` with sizes, checksums and whatever else a resume needs. It is written in this
order, so that a crash or a power failure at any moment loses no checkpoint that was complete:

- What a killed writer left behind is removed. If it was killed between the two renames below, the
  old checkpoint gets its name back.
- The disk must have room for the whole checkpoint, or nothing is begun.
- The files of the units are written into the hidden folder ``.step-N.partial`` and synced, then the
  buffers. The older checkpoints stay untouched meanwhile.
- The manifest is written and synced after all files that it lists. Then the folder itself is
  synced, so that the names of the files are on the disk as well.
- If there is a ``step-N`` already, it is renamed to ``.step-N.old``.
- ``.step-N.partial`` is renamed to ``step-N``. From here on the checkpoint counts: a folder of that
  name was complete once, and the sizes and checksums in its manifest tell whether it still is.
- The folder around it and the parent of that folder are synced, so that the new name is on the
  disk.
- Only then are checkpoints beyond the number to keep deleted, and the replaced one. Each is first
  renamed to ``.step-N.deleted``, so that one that is half deleted does not count.

`engine.checkpoints.restore` reads what is written here.
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
"""Planes are written, read and hashed in pieces of this size."""
UNSYNCED_BYTES = 64 << 20
"""A thread writes at most this much before it syncs: dirty page cache counts against the memory
limit that the planes share.
"""
_SPARE_BYTES = 1 << 20
"""The disk must have this much more than the planes, the buffers and the state need: the rest of
the manifest is taken from it.
"""


@dataclass(frozen=True)
class Contents:
    """A checkpoint is written from these, which must not change meanwhile."""

    store: HostStore
    state: dict[str, Any]
    """A resume needs these values beside the planes. They are JSON values."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """These are the model's persistent buffers, by full name."""

    @property
    def plane_bytes(self) -> int:
        """The planes take this many bytes in the checkpoint."""
        return checkpoint_bytes(self.store.layouts, self.store.dtype)

    def needed_bytes(self) -> int:
        """Returns the free space that the checkpoint needs at most, in bytes.

        Raises TypeError or ValueError for a state that JSON does not have.
        """
        state = len(json.dumps(self.state, allow_nan=False))
        buffers = sum(tensor.nbytes for tensor in self.buffers.values())
        # The state counts twice, to be safe.
        return self.plane_bytes + buffers + 2 * state + _SPARE_BYTES


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk is described by where it is and what its manifest says."""

    path: Path
    step: int
    bytes: int
    state: dict[str, Any]
    """This state was written with the checkpoint."""
    seconds: float = 0.0
    """Writing took this long; 0.0 for a checkpoint that was found."""
    skipped: tuple[str, ...] = ()
    """Each sentence says which newer checkpoint could not be used, and why."""


def checkpoint_bytes(layouts: Mapping[str, UnitLayout] | Iterable[UnitLayout], dtype: str) -> int:
    """Returns the bytes of the planes in one checkpoint.

    The manifest, some 100 bytes a parameter tensor, comes on top.
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
    """Writes ``root/step-<step>`` and deletes what is beyond the `keep` newest.

    Checkpoints of later steps are from before a resume of an older one, and are deleted, too.
    Raises TypeError or ValueError for a state that is not made of JSON values, DiskFullError when
    the disk lacks the space, before or midway, and CheckpointError when it fails. The checkpoints
    that were there before are then untouched.
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
        # Whatever `progress` raises gives up, Ctrl-C among it.
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
    """Writes and syncs all files of a checkpoint, the manifest last, and returns their bytes."""
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
    # Through JSON first: the checksum is of what a reader will see, where tuples are lists.
    body = json.loads(json.dumps(values))
    manifest = json.dumps({"checksum": body_checksum(body), **body}).encode()
    write_synced(folder / MANIFEST, manifest)
    # The files are on the disk; now their names in the folder are, too.
    sync_folder(folder)
    buffer_bytes = 0 if buffers is None else buffers["bytes"]
    return total + len(manifest) + buffer_bytes


def _write_units(folder: Path, store: HostStore, meter: Meter) -> list[dict[str, Any]]:
    """Writes the file of every unit, and returns what the manifest says of them."""
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
    """Writes and syncs the planes of one unit, and returns where each lies in the file."""
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
                while rest:  # an unbuffered file may take less than it is given
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
        # The manifest, which is written later, must not be on the disk before this file is.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return entries


def _move_into_place(root: Path, step: int, unfinished: Path) -> None:
    target = root / f"step-{step}"
    if target.exists():
        # A folder that is not empty cannot be replaced in one rename. Between the two of them
        # `folders_by_step` takes the old one.
        target.rename(root / f".step-{step}.old")
    unfinished.rename(target)
    # The renames are on the disk before anything is deleted. `root` itself may be new, too.
    sync_folder(root)
    sync_folder(root.parent)


def _delete_others(root: Path, step: int, keep: int) -> None:
    """Deletes all checkpoints but that of `step` and the newest of those before it."""
    found = folders_by_step(root)
    older = sorted((other for other in found if other < step), reverse=True)
    kept = {step, *older[: max(keep - 1, 0)]}
    for other, path in found.items():
        if other not in kept:
            try:
                path.rename(root / f".step-{other}.deleted")
            except OSError:
                # The checkpoint is safe. The disk check of the next one speaks up if space runs
                # out.
                continue
    for leftover in (*root.glob(".step-*.deleted"), root / f".step-{step}.old"):
        shutil.rmtree(leftover, ignore_errors=True)


def _clear_leftovers(root: Path) -> None:
    """Removes what a killed writer left behind, and restores what it was about to replace."""
    for path in list(root.glob(".step-*")):
        current = root / path.name[1:].rsplit(".", 1)[0]
        if path.suffix == ".old" and not current.exists():
            # The writer was killed between the two renames: this is the checkpoint of that step.
            path.rename(current)
        elif path.suffix in (".old", ".partial", ".deleted"):
            shutil.rmtree(path)


# ---------------------------------------------------------------------- shared with restore


def folders_by_step(root: Path) -> dict[int, Path]:
    """Returns the checkpoint folders in `root` by their steps.

    A ``.step-N.old`` counts where ``step-N`` itself is missing: its writer was killed between the
    two renames that replace one by the other.
    """
    found: dict[int, Path] = {}
    if root.is_dir():
        for pattern in (r"step-(\d+)", r"\.step-(\d+)\.old"):
            for path in root.iterdir():
                match = re.fullmatch(pattern, path.name)
                if match and path.is_dir():
                    found.setdefault(int(match[1]), path)
    return found


def _plane_bytes(layout: UnitLayout, dtype: str) -> dict[str, int]:
    """Returns the bytes of each plane that a checkpoint holds, in the order of the file."""
    return {plane: size for plane, size in layout.plane_bytes(dtype).items() if plane != "grad"}


def description(layout: UnitLayout) -> dict[str, Any]:
    """Describes a layout: two with the same description have interchangeable planes."""
    parameters = [
        {**asdict(spec), "offset": offset}
        for spec, offset in zip(layout.parameters, layout.offsets)
    ]
    return {
        "unit": layout.unit,
        "numel": layout.numel,
        "decay_numel": layout.decay_numel,
        "parameters": parameters,
    }


def chunks(store: HostStore, unit: str, plane: str) -> Iterator[memoryview]:
    """Yields views of the plane's own memory, as bytes: what is written to them is in the plane."""
    memory = store.array(unit, plane).view("uint8").data
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]


class Meter:
    """A meter adds up the bytes of all threads for one progress callback."""

    def __init__(self, total: int, progress: Progress):
        self._stopped = False
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Counts bytes that a thread has written or read.

        Raises what the callback raises, and RuntimeError once the meter was stopped.
        """
        # The callback is called under the lock: it promises to be called by one thread at a time.
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped, since another thread failed")
            self._done += count
            self._progress(self._done, self._total)

    def stop(self) -> None:
        """Refuses the next bytes of any thread, which ends its task."""
        self._stopped = True


def in_threads(tasks: Sequence[Callable[[], Any]], meter: Meter) -> list[Any]:
    """Returns the results of all tasks, in order.

    The first exception ends the other tasks soon, by their meter, and is raised.
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
