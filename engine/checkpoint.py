"""Checkpoints: every plane but the gradients, unit by unit, straight from and into the host store's memory.

``checkpoints/step-N/`` holds one file a unit (its planes one after another) and ``manifest.json``. A checkpoint is
written beside, synced, and only then renamed into place, so a folder called ``step-N`` was complete once; sizes and
checksums in the manifest tell whether it still is. Hidden siblings are leftovers of a killed process.
"""

from __future__ import annotations

import hashlib
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

from engine.errors import CheckpointError
from engine.layout import PLANE_ITEM_BYTES, UnitLayout

if TYPE_CHECKING:
    from engine.host_store import HostStore

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHT_PLANES = ("weight_high", "weight_low")

THREADS = 4
CHUNK_BYTES = 8 << 20
UNSYNCED_BYTES = 64 << 20
"""Written and not yet synced, a thread: dirty page cache counts against the memory limit that the planes share."""
_SPARE_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, from one thread at a time; an exception from it stops the work."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk, with the `state` that was written with it. `seconds` is how long writing took, 0.0 for one
    that was found; `skipped` says, a sentence each, which newer ones could not be used and why."""

    path: Path
    step: int
    bytes: int
    state: dict[str, Any]
    seconds: float = 0.0
    skipped: tuple[str, ...] = ()


def checkpoint_bytes(layouts: Mapping[str, UnitLayout] | Iterable[UnitLayout], dtype: str) -> int:
    """Bytes of the planes in one checkpoint; the manifest, some 100 bytes a parameter tensor, comes on top."""
    units = layouts.values() if isinstance(layouts, Mapping) else layouts
    return sum(sum(_plane_bytes(layout, dtype).values()) for layout in units)


# ---------------------------------------------------------------------- writing

def write_checkpoint(root: str | os.PathLike[str], step: int, store: HostStore, state: dict[str, Any], keep: int,
                     progress: Progress | None = None) -> CheckpointInfo:
    """Write ``root/step-<step>`` and delete what is beyond the `keep` newest.

    The planes must not change meanwhile. `state` is whatever else a resume needs, as JSON values (others raise
    TypeError or ValueError). Raises CheckpointError when the disk lacks the room or fails; the checkpoints that were
    there before are then untouched. Checkpoints of later steps are from before a resume of an older one, and go too.
    """
    root, began = Path(root), time.monotonic()
    spare = 2 * len(json.dumps(state, allow_nan=False)) + _SPARE_BYTES
    partial = root / f".step-{step}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(root)
        total = checkpoint_bytes(store.layouts, store.dtype)
        free = shutil.disk_usage(root).free
        if free < total + spare:
            raise CheckpointError(f"The checkpoint of step {step} needs {total + spare:,} bytes in {root} and {free:,} "
                                  "are free; free some disk space and save again.")
        partial.mkdir()
        written = _write_planes(partial, step, store, state, total, progress)
        _move_into_place(root, step, partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"The checkpoint of step {step} cannot be written in {root} ({error.strerror}); the ones "
                              "before it are untouched.") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _delete_others(root, step, keep)
    return CheckpointInfo(root / f"step-{step}", step, written, state, time.monotonic() - began)


def _write_planes(folder: Path, step: int, store: HostStore, state: dict[str, Any], total: int,
                  progress: Progress | None) -> int:
    layouts = list(store.layouts.values())
    files = [f"{index:04d}-{re.sub('[^A-Za-z0-9]+', '-', layout.unit)}.planes" for index, layout in enumerate(layouts)]
    meter = _Meter(total, progress)
    planes = _in_threads([lambda name=name, layout=layout: _write_unit(folder / name, layout, store, meter)
                          for name, layout in zip(files, layouts)], meter)
    units = [{**_description(layout), "file": name, "bytes": sum(entry["bytes"] for entry in entries.values()),
              "planes": entries} for name, layout, entries in zip(files, layouts, planes)]
    # Through JSON first: the checksum is of what a reader will see.
    values = {"format": FORMAT, "step": step, "dtype": store.dtype, "units": units, "state": state}
    body = json.loads(json.dumps(values))
    manifest = json.dumps({"checksum": _body_checksum(body), **body}).encode()
    with open(folder / MANIFEST, "wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    return total + len(manifest)


def _write_unit(path: Path, layout: UnitLayout, store: HostStore, meter: _Meter) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    position = synced = 0
    with open(path, "xb", buffering=0) as file:
        for plane in _plane_bytes(layout, store.dtype):
            digest, begin = _digest(), position
            for chunk in _chunks(store, layout.unit, plane):
                digest.update(chunk)
                rest = chunk
                while rest:
                    rest = rest[file.write(rest):]
                position += len(chunk)
                if position - synced >= UNSYNCED_BYTES:
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(file.fileno(), synced, position - synced, os.POSIX_FADV_DONTNEED)
                    synced = position
                meter.add(len(chunk))
            entries[plane] = {"offset": begin, "bytes": position - begin, "checksum": digest.hexdigest()}
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return entries


def _move_into_place(root: Path, step: int, partial: Path) -> None:
    target, old = root / f"step-{step}", root / f".step-{step}.old"
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync_folder(root)
    _sync_folder(root.parent)


def _delete_others(root: Path, step: int, keep: int) -> None:
    older = sorted((other for other in _folders(root) if other < step), reverse=True)
    kept = {step, *older[:keep - 1]} if keep > 1 else {step}
    for other, path in _folders(root).items():
        if other not in kept:
            try:
                path.rename(root / f".step-{other}.deleted")
            except OSError:
                continue  # the checkpoint is safe; the disk check of the next one speaks up if room runs out
    for leftover in (*root.glob(".step-*.deleted"), root / f".step-{step}.old"):
        shutil.rmtree(leftover, ignore_errors=True)


def _clear_leftovers(root: Path) -> None:
    for path in list(root.glob(".step-*")):
        current = root / path.name[1:].rsplit(".", 1)[0]
        if path.suffix == ".old" and not current.exists():
            path.rename(current)  # killed between the two renames: this is the checkpoint of that step
        elif path.suffix in (".old", ".partial", ".deleted"):
            shutil.rmtree(path)


# ---------------------------------------------------------------------- finding and loading

def newest_checkpoint(root: str | os.PathLike[str]) -> CheckpointInfo | None:
    """The newest checkpoint whose manifest and file sizes are right; checksums are verified by loading. None when there
    is none; raises CheckpointError when there are some and none is right."""
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        return _info(path, manifest, skipped)
    return _nothing(root, skipped)


def load_newest_checkpoint(root: str | os.PathLike[str], store: HostStore,
                           progress: Progress | None = None) -> CheckpointInfo | None:
    """Fill the planes (weights and moments, allocated before) from the newest checkpoint that verifies, checksums
    included.

    None when there is none. Raises CheckpointError when there are some and none verifies, or when the newest is of
    another model or dtype.
    """
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        _refuse_other_model(path, manifest, store)
        try:
            _read_planes(path, manifest, store, tuple(PLANE_ITEM_BYTES[store.dtype]), progress)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return _info(path, manifest, skipped)
    return _nothing(root, skipped)


def load_weights(path: str | os.PathLike[str], store: HostStore, progress: Progress | None = None) -> CheckpointInfo:
    """Fill the weight planes (allocated before) from this checkpoint, for sampling and export.

    Raises CheckpointError when the checkpoint is of another model or dtype, before anything is written to the planes,
    and when it is damaged; the planes then hold a mixture.
    """
    path = Path(path)
    manifest = _verified_manifest(path)
    _refuse_other_model(path, manifest, store)
    _read_planes(path, manifest, store, WEIGHT_PLANES, progress)
    return _info(path, manifest, [])


def _whole_ones(root: str | os.PathLike[str], skipped: list[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Newest first, those whose manifest and sizes are right; the reasons against the others go to `skipped`."""
    for _, path in sorted(_folders(Path(root)).items(), reverse=True):
        try:
            manifest = _verified_manifest(path)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            yield path, manifest


def _folders(root: Path) -> dict[int, Path]:
    """Step to folder. A ``.step-N.old`` counts where ``step-N`` itself is missing: its writer was killed between the
    two renames that replace one by the other."""
    found: dict[int, Path] = {}
    if root.is_dir():
        for pattern in (r"step-(\d+)", r"\.step-(\d+)\.old"):
            for path in root.iterdir():
                match = re.fullmatch(pattern, path.name)
                if match and path.is_dir():
                    found.setdefault(int(match[1]), path)
    return found


def _info(path: Path, manifest: dict[str, Any], skipped: list[str]) -> CheckpointInfo:
    size = (path / MANIFEST).stat().st_size + sum(unit["bytes"] for unit in manifest["units"])
    return CheckpointInfo(path, manifest["step"], size, manifest["state"], skipped=tuple(skipped))


def _nothing(root: str | os.PathLike[str], skipped: list[str]) -> None:
    if skipped:
        raise CheckpointError(f"No checkpoint in {root} can be used. {' '.join(skipped)}")


def _verified_manifest(path: Path) -> dict[str, Any]:
    try:
        body = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"Checkpoint {path} has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise CheckpointError(f"Checkpoint {path} has format {body['format']}, which this version cannot read; use the "
                              "version of Ramstream that wrote it.")
    if not isinstance(body, dict) or body.pop("checksum", None) != _body_checksum(body):
        raise CheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} is not what was written.")
    for unit in body["units"]:
        file = path / unit["file"]
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"Checkpoint {path} is damaged: {unit['file']} cannot be read "
                                  f"({error.strerror}).") from None
        if size != unit["bytes"]:
            raise CheckpointError(f"Checkpoint {path} is damaged: {unit['file']} has {size:,} bytes instead of "
                                  f"{unit['bytes']:,}.")
    return body


def _refuse_other_model(path: Path, manifest: dict[str, Any], store: HostStore) -> None:
    if manifest["dtype"] != store.dtype:
        raise CheckpointError(f"Checkpoint {path} holds {manifest['dtype']} planes and this run computes in "
                              f"{store.dtype}; set model.dtype to {manifest['dtype']}.")
    here = {unit: json.loads(json.dumps(_description(layout))) for unit, layout in store.layouts.items()}
    there = {unit["unit"]: {key: unit[key] for key in here.get(unit["unit"], unit)} for unit in manifest["units"]}
    if list(here) != list(there):
        unit = next((unit for unit in (*there, *here) if (unit in there) != (unit in here)), "their order")
        raise CheckpointError(f"Checkpoint {path} is of another model: it has {len(there)} units and this model "
                              f"{len(here)}; the first difference is {unit}.")
    for unit in here:
        if here[unit] != there[unit]:
            raise CheckpointError(f"Checkpoint {path} is of another model: in unit {unit}, "
                                  f"{_first_difference(here[unit]['parameters'], there[unit]['parameters'])}.")


def _first_difference(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    for mine, theirs in zip(here, there):
        if mine["full_name"] != theirs["full_name"]:
            return f"it has {theirs['full_name']} where this model has {mine['full_name']}"
        for key, value in theirs.items():
            if mine[key] != value:
                return f"the {key} of {mine['full_name']} is {value} there and {mine[key]} here"
    return f"there are {len(there)} parameters there and {len(here)} here"


def _read_planes(path: Path, manifest: dict[str, Any], store: HostStore, planes: tuple[str, ...],
                 progress: Progress | None) -> None:
    units = manifest["units"]
    total = sum(entry["bytes"] for unit in units for plane, entry in unit["planes"].items() if plane in planes)
    meter = _Meter(total, progress)
    try:
        _in_threads([lambda unit=unit: _read_unit(path, unit, store, planes, meter) for unit in units], meter)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None


def _read_unit(path: Path, unit: dict[str, Any], store: HostStore, planes: tuple[str, ...], meter: _Meter) -> None:
    with open(path / unit["file"], "rb", buffering=0) as file:
        for plane, entry in unit["planes"].items():
            if plane not in planes:
                continue
            file.seek(entry["offset"])
            digest = _digest()
            for chunk in _chunks(store, unit["unit"], plane):
                rest = chunk
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise CheckpointError(f"Checkpoint {path} is damaged: {unit['file']} ends too early.")
                    rest = rest[count:]
                digest.update(chunk)
                meter.add(len(chunk))
            if digest.hexdigest() != entry["checksum"]:
                raise CheckpointError(f"Checkpoint {path} is damaged: {plane} of unit {unit['unit']} "
                                      f"({unit['file']}) does not match its checksum.")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---------------------------------------------------------------------- shared

def _plane_bytes(layout: UnitLayout, dtype: str) -> dict[str, int]:
    return {plane: size for plane, size in layout.plane_bytes(dtype).items() if plane != "grad"}


def _description(layout: UnitLayout) -> dict[str, Any]:
    """What must be the same for planes to be interchangeable."""
    parameters = [{**asdict(spec), "offset": offset} for spec, offset in zip(layout.parameters, layout.offsets)]
    return {"unit": layout.unit, "numel": layout.numel, "decay_numel": layout.decay_numel, "parameters": parameters}


def _chunks(store: HostStore, unit: str, plane: str) -> Iterator[memoryview]:
    """Views of the plane's own memory, as bytes."""
    memory = memoryview(store.array(unit, plane).view("uint8"))
    for begin in range(0, len(memory), CHUNK_BYTES):
        yield memory[begin:begin + CHUNK_BYTES]


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _body_checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Meter:
    """Adds up the bytes of all threads for one progress callback."""

    def __init__(self, total: int, progress: Progress | None):
        self.stopped = False
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            if self.stopped:
                raise RuntimeError("stopped, since another thread failed")
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


def _in_threads(tasks: list[Callable[[], Any]], meter: _Meter) -> list[Any]:
    """Results in order; the first exception ends the other tasks soon, and is raised."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
        futures: list[Future] = [pool.submit(task) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            meter.stopped = True
            for future in futures:
                future.cancel()
            raise
