"""Finding, verifying and loading what `engine.checkpoints.checkpoint` has written."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoints.checkpoint import (
    FORMAT,
    MANIFEST,
    CheckpointInfo,
    Meter,
    chunks,
    description,
    folders_by_step,
    in_threads,
)
from engine.errors import CheckpointError
from engine.files import body_checksum, checksum_of, new_digest
from engine.model.layout import PLANE_ITEM_BYTES
from engine.progress import Progress, untold

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runtime.host_store import HostStore


class NewerFormat(CheckpointError):
    """A checkpoint of a later version of this program."""


def newest_checkpoint(root: str | os.PathLike[str]) -> CheckpointInfo | None:
    """The newest checkpoint whose manifest and file sizes are right; checksums are verified by
    loading. None when there is none; raises CheckpointError when there are some and none is right,
    or the newest is of a later version.
    """
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        return _info(path, manifest, skipped)
    return _nothing(root, skipped)


def load_newest_checkpoint(
    root: str | os.PathLike[str],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = untold,
) -> CheckpointInfo | None:
    """As `load_checkpoint`, from the newest one that verifies, checksums included.

    None when there is none. Raises CheckpointError when there are some and none verifies, or when
    the newest is of another model, dtype or a later version.
    """
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        _refuse_other_model(path, manifest, store)
        try:
            _fill(path, manifest, store, buffers, planes, progress)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return _info(path, manifest, skipped)
    return _nothing(root, skipped)


def load_checkpoint(
    path: str | os.PathLike[str],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = untold,
) -> CheckpointInfo:
    """Fill `planes` of the store (allocated before; all by default, WEIGHT_PLANES for sampling and
    export) and the model's persistent `buffers`, in place.

    Raises CheckpointError when the checkpoint is of another model or dtype, before anything is
    written to the planes, and when it is damaged; the planes then hold a mixture.
    """
    path = Path(path)
    manifest = _verified_manifest(path)
    _refuse_other_model(path, manifest, store)
    _fill(path, manifest, store, buffers, planes, progress)
    return _info(path, manifest, [])


def _fill(
    path: Path,
    manifest: dict[str, Any],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None,
    progress: Progress,
) -> None:
    wanted = tuple(PLANE_ITEM_BYTES[store.dtype]) if planes is None else tuple(planes)
    try:
        _read_planes(path, manifest, store, wanted, progress)
        _read_buffers(path, manifest["buffers"], buffers)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None


def _read_buffers(path: Path, entry: dict[str, Any] | None, buffers: Mapping[str, Tensor]) -> None:
    from safetensors.torch import load

    content = b"" if entry is None else (path / entry["file"]).read_bytes()
    if entry is not None and checksum_of(content) != entry["checksum"]:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {entry['file']} does not match its checksum."
        )
    found = load(content) if content else {}
    if found.keys() != buffers.keys():
        raise CheckpointError(
            f"Checkpoint {path} is of another model: it has the buffers {sorted(found) or 'none'} "
            f"and this model {sorted(buffers) or 'none'}."
        )
    for name, tensor in found.items():
        buffers[name].copy_(tensor)


def _whole_ones(
    root: str | os.PathLike[str], skipped: list[str]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Newest first, those whose manifest and sizes are right; the reasons against the others go to
    `skipped`.
    """
    for _, path in sorted(folders_by_step(Path(root)).items(), reverse=True):
        try:
            manifest = _verified_manifest(path)
        except NewerFormat:
            raise  # going on from an older one would delete it
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            yield path, manifest


def _info(path: Path, manifest: dict[str, Any], skipped: list[str]) -> CheckpointInfo:
    parts = [*manifest["units"], *([manifest["buffers"]] if manifest["buffers"] else [])]
    size = (path / MANIFEST).stat().st_size + sum(part["bytes"] for part in parts)
    return CheckpointInfo(path, manifest["step"], size, manifest["state"], skipped=tuple(skipped))


def _nothing(root: str | os.PathLike[str], skipped: list[str]) -> None:
    if skipped:
        raise CheckpointError(
            f"No checkpoint in {root} can be used; restore one from a copy, or start a new run. "
            f"{' '.join(skipped)}"
        )


def _verified_manifest(path: Path) -> dict[str, Any]:
    try:
        body = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"Checkpoint {path} has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.pop("checksum", None) != body_checksum(body):
        raise CheckpointError(f"Checkpoint {path} is damaged: {MANIFEST} is not what was written.")
    if body["format"] > FORMAT:
        raise NewerFormat(
            f"Checkpoint {path} has format {body['format']}, which this version cannot read; use "
            "the version of Ramstream that wrote it."
        )
    for unit in [*body["units"], *([body["buffers"]] if body["buffers"] else [])]:
        file = path / unit["file"]
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {unit['file']} cannot be read ({error.strerror})."
            ) from None
        if size != unit["bytes"]:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {unit['file']} has {size:,} bytes instead of "
                f"{unit['bytes']:,}."
            )
    return body


def _refuse_other_model(path: Path, manifest: dict[str, Any], store: HostStore) -> None:
    if manifest["dtype"] != store.dtype:
        raise CheckpointError(
            f"Checkpoint {path} holds {manifest['dtype']} planes and this run computes in "
            f"{store.dtype}; set model.dtype to {manifest['dtype']}."
        )
    here = {
        unit: json.loads(json.dumps(description(layout))) for unit, layout in store.layouts.items()
    }
    there = {
        unit["unit"]: {key: unit[key] for key in here.get(unit["unit"], unit)}
        for unit in manifest["units"]
    }
    if list(here) != list(there):
        unit = next(
            (unit for unit in (*there, *here) if (unit in there) != (unit in here)), "their order"
        )
        raise CheckpointError(
            f"Checkpoint {path} is of another model: it has {len(there)} units and this model "
            f"{len(here)}; the first difference is {unit}."
        )
    for unit in here:
        if here[unit] != there[unit]:
            raise CheckpointError(
                f"Checkpoint {path} is of another model: in unit {unit}, "
                f"{_first_difference(here[unit]['parameters'], there[unit]['parameters'])}."
            )


def _first_difference(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    for mine, theirs in zip(here, there):
        if mine["full_name"] != theirs["full_name"]:
            return f"it has {theirs['full_name']} where this model has {mine['full_name']}"
        for key, value in theirs.items():
            if mine[key] != value:
                return f"the {key} of {mine['full_name']} is {value} there and {mine[key]} here"
    return f"there are {len(there)} parameters there and {len(here)} here"


def _read_planes(
    path: Path,
    manifest: dict[str, Any],
    store: HostStore,
    planes: tuple[str, ...],
    progress: Progress,
) -> None:
    units = manifest["units"]
    total = sum(
        entry["bytes"]
        for unit in units
        for plane, entry in unit["planes"].items()
        if plane in planes
    )
    meter = Meter(total, progress)
    in_threads(
        [lambda unit=unit: _read_unit(path, unit, store, planes, meter) for unit in units], meter
    )


def _read_unit(
    path: Path, unit: dict[str, Any], store: HostStore, planes: tuple[str, ...], meter: Meter
) -> None:
    with open(path / unit["file"], "rb", buffering=0) as file:
        for plane, entry in unit["planes"].items():
            if plane not in planes:
                continue
            file.seek(entry["offset"])
            digest = new_digest()
            for chunk in chunks(store, unit["unit"], plane):
                rest = chunk
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise CheckpointError(
                            f"Checkpoint {path} is damaged: {unit['file']} ends too early."
                        )
                    rest = rest[count:]
                digest.update(chunk)
                meter.add(len(chunk))
            if digest.hexdigest() != entry["checksum"]:
                raise CheckpointError(
                    f"Checkpoint {path} is damaged: {plane} of unit {unit['unit']} "
                    f"({unit['file']}) does not match its checksum."
                )
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
