"""Checkpoints: every plane but the gradients, unit by unit, straight from and into the host store's
memory.

``checkpoints/step-N/`` holds one file a unit (its planes one after another),
``buffers.safetensors`` where the model has buffers that belong to its weights, and
``manifest.json``. A checkpoint is written beside, synced, and only then renamed into place, so a
folder called ``step-N`` was complete once; sizes and checksums in the manifest tell whether it
still is. Hidden siblings are leftovers of a killed process. `engine.checkpoints.restore` reads what
is written here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
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
UNSYNCED_BYTES = 64 << 20
"""Written and not yet synced, a thread: dirty page cache counts against the memory limit that the
planes share.
"""
_SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk, with the `state` that was written with it. `seconds` is how long
    writing took, 0.0 for one that was found; `skipped` says, a sentence each, which newer ones
    could not be used and why.
    """

    path: Path
    step: int
    bytes: int
    state: dict[str, Any]
    seconds: float = 0.0
    skipped: tuple[str, ...] = ()


def checkpoint_bytes(layouts: Mapping[str, UnitLayout] | Iterable[UnitLayout], dtype: str) -> int:
    """Bytes of the planes in one checkpoint; the manifest, some 100 bytes a parameter tensor, comes
    on top.
    """
    units = layouts.values() if isinstance(layouts, Mapping) else layouts
    return sum(sum(_plane_bytes(layout, dtype).values()) for layout in units)


# ---------------------------------------------------------------------- writing


def write_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    store: HostStore,
    state: dict[str, Any],
    keep: int,
    progress: Progress = untold,
    buffers: Mapping[str, Tensor] | None = None,
) -> CheckpointInfo:
    """Write ``root/step-<step>`` and delete what is beyond the `keep` newest.

    The planes must not change meanwhile. `buffers`: the model's persistent ones. `state` is
    whatever else a resume needs, as JSON values (others raise TypeError or ValueError). Raises
    DiskFullError when the disk lacks the space, before or midway, and CheckpointError when it
    fails; the checkpoints that were there before are then untouched. Checkpoints of later steps are
    from before a resume of an older one, and go too.
    """
    root, began = Path(root), time.monotonic()
    spare = (
        2 * len(json.dumps(state, allow_nan=False))
        + _SPARE_BYTES
        + sum(t.nbytes for t in (buffers or {}).values())
    )
    total = checkpoint_bytes(store.layouts, store.dtype)
    partial = root / f".step-{step}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(root)
        free = shutil.disk_usage(root).free
        if free < total + spare:
            raise DiskFullError(
                f"The checkpoint of step {step} needs {total + spare:,} bytes in {root} and "
                f"{free:,} are free; free some disk space and save again.",
                str(root),
                total + spare,
                free,
            )
        partial.mkdir()
        written = _write_files(partial, step, store, state, buffers or {}, total, progress)
        _move_into_place(root, step, partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        sentence = (
            f"The checkpoint of step {step} cannot be written in {root} ({error.strerror}); the "
            "ones before it are untouched."
        )
        if error.errno in FULL:
            raise DiskFullError(
                sentence, str(root), total + spare, disk_free(root), is_full_in_words(error)
            ) from error
        raise CheckpointError(sentence) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _delete_others(root, step, keep)
    return CheckpointInfo(root / f"step-{step}", step, written, state, time.monotonic() - began)


def _write_files(
    folder: Path,
    step: int,
    store: HostStore,
    state: dict[str, Any],
    buffers: Mapping[str, Tensor],
    total: int,
    progress: Progress,
) -> int:
    layouts = list(store.layouts.values())
    files = [
        f"{index:04d}-{re.sub('[^A-Za-z0-9]+', '-', layout.unit)}.planes"
        for index, layout in enumerate(layouts)
    ]
    meter = Meter(total, progress)
    planes = in_threads(
        [
            lambda name=name, layout=layout: _write_unit(folder / name, layout, store, meter)
            for name, layout in zip(files, layouts)
        ],
        meter,
    )
    units = [
        {
            **description(layout),
            "file": name,
            "bytes": sum(entry["bytes"] for entry in entries.values()),
            "planes": entries,
        }
        for name, layout, entries in zip(files, layouts, planes)
    ]
    # Through JSON first: the checksum is of what a reader will see.
    values = {
        "format": FORMAT,
        "step": step,
        "dtype": store.dtype,
        "units": units,
        "buffers": _write_buffers(folder, buffers) if buffers else None,
        "state": state,
    }
    body = json.loads(json.dumps(values))
    manifest = json.dumps({"checksum": body_checksum(body), **body}).encode()
    write_synced(folder / MANIFEST, manifest)
    sync_folder(folder)
    return total + len(manifest) + (values["buffers"] or {"bytes": 0})["bytes"]


def _write_buffers(folder: Path, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    from safetensors.torch import save

    content = save({name: tensor.contiguous() for name, tensor in buffers.items()})
    write_synced(folder / BUFFERS, content)
    return {"file": BUFFERS, "bytes": len(content), "checksum": checksum_of(content)}


def _write_unit(
    path: Path, layout: UnitLayout, store: HostStore, meter: Meter
) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    position = synced = 0
    with open(path, "xb", buffering=0) as file:
        for plane in _plane_bytes(layout, store.dtype):
            digest, begin = new_digest(), position
            for chunk in chunks(store, layout.unit, plane):
                digest.update(chunk)
                rest = chunk
                while rest:
                    rest = rest[file.write(rest) :]
                position += len(chunk)
                if position - synced >= UNSYNCED_BYTES:
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
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return entries


def _move_into_place(root: Path, step: int, partial: Path) -> None:
    target, old = root / f"step-{step}", root / f".step-{step}.old"
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_folder(root)
    sync_folder(root.parent)


def _delete_others(root: Path, step: int, keep: int) -> None:
    older = sorted((other for other in folders_by_step(root) if other < step), reverse=True)
    kept = {step, *older[: keep - 1]} if keep > 1 else {step}
    for other, path in folders_by_step(root).items():
        if other not in kept:
            try:
                path.rename(root / f".step-{other}.deleted")
            except OSError:
                # the checkpoint is safe; the disk check of the next one speaks up if space runs out
                continue
    for leftover in (*root.glob(".step-*.deleted"), root / f".step-{step}.old"):
        shutil.rmtree(leftover, ignore_errors=True)


def _clear_leftovers(root: Path) -> None:
    for path in list(root.glob(".step-*")):
        current = root / path.name[1:].rsplit(".", 1)[0]
        if path.suffix == ".old" and not current.exists():
            path.rename(
                current
            )  # killed between the two renames: this is the checkpoint of that step
        elif path.suffix in (".old", ".partial", ".deleted"):
            shutil.rmtree(path)


# ---------------------------------------------------------------------- shared with engine.checkpoi


def folders_by_step(root: Path) -> dict[int, Path]:
    """Step to folder. A ``.step-N.old`` counts where ``step-N`` itself is missing: its writer was
    killed between the two renames that replace one by the other.
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
    return {plane: size for plane, size in layout.plane_bytes(dtype).items() if plane != "grad"}


def description(layout: UnitLayout) -> dict[str, Any]:
    """What must be the same for planes to be interchangeable."""
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
    """Views of the plane's own memory, as bytes."""
    memory = memoryview(store.array(unit, plane).view("uint8"))
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin : begin + CHUNK_BYTES]


class Meter:
    """Adds up the bytes of all threads for one progress callback."""

    def __init__(self, total: int, progress: Progress):
        self._stopped = False
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped, since another thread failed")
            self._done += count
            self._progress(self._done, self._total)

    def stop(self) -> None:
        """The next bytes of any thread are refused."""
        self._stopped = True


def in_threads(tasks: list[Callable[[], Any]], meter: Meter) -> list[Any]:
    """Results in order; the first exception ends the other tasks soon, and is raised."""
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
