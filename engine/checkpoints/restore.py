"""What `engine.checkpoints.checkpoint` has written is found, verified and loaded here.

- A manifest must match its own checksum, and be of a format that this version knows.
- The files must have the sizes that the manifest says. That much is verified to find a checkpoint.
- The layouts in the manifest must be those of the model, before anything is written to the planes.
- Planes are read straight into the store's memory, and their checksums are verified on the way. A
  damaged checkpoint is skipped for the one before it, which overwrites all planes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
    """A later version of this program wrote the checkpoint."""


@dataclass(frozen=True)
class _Target:
    """A checkpoint is loaded into these, in place."""

    store: HostStore
    buffers: Mapping[str, Tensor]
    planes: tuple[str, ...]
    """Only these planes are loaded."""

    @classmethod
    def of(
        cls, store: HostStore, buffers: Mapping[str, Tensor], planes: Collection[str] | None
    ) -> _Target:
        """Returns a target of `planes`, or of all planes if that is None."""
        wanted = PLANE_ITEM_BYTES[store.dtype] if planes is None else planes
        return cls(store, buffers, tuple(wanted))


def newest_checkpoint(root: str | os.PathLike[str]) -> CheckpointInfo | None:
    """Returns the newest checkpoint whose manifest and file sizes are right; None when there is
    none. Checksums are verified by loading.

    Raises CheckpointError when there are some and none is right, or when the newest is of a later
    version.
    """
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        return _info(path, manifest, skipped)
    _refuse_if_any(root, skipped)
    return None


def load_newest_checkpoint(
    root: str | os.PathLike[str],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = untold,
) -> CheckpointInfo | None:
    """Loads the newest checkpoint that verifies, checksums included, as `load_checkpoint` does.

    Returns None when there is none. Raises CheckpointError when there are some and none verifies,
    or when the newest is of another model, dtype or a later version.
    """
    target = _Target.of(store, buffers, planes)
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, skipped):
        _refuse_other_model(path, manifest, store)
        try:
            _fill(path, manifest, target, progress)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return _info(path, manifest, skipped)
    _refuse_if_any(root, skipped)
    return None


def load_checkpoint(
    path: str | os.PathLike[str],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = untold,
) -> CheckpointInfo:
    """Fills planes of the store and the model's persistent `buffers`, by full name and in place.

    `planes` must be allocated: all of them by default, WEIGHT_PLANES for sampling and export.
    Raises CheckpointError when the checkpoint is of another model or dtype, before anything is
    written to the planes, and when it is damaged; the planes then hold a mixture.
    """
    path = Path(path)
    manifest = _verified_manifest(path)
    _refuse_other_model(path, manifest, store)
    _fill(path, manifest, _Target.of(store, buffers, planes), progress)
    return _info(path, manifest, [])


def _fill(path: Path, manifest: dict[str, Any], target: _Target, progress: Progress) -> None:
    try:
        _read_planes(path, manifest["units"], target, progress)
        _read_buffers(path, manifest["buffers"], target.buffers)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None


def _read_buffers(path: Path, entry: dict[str, Any] | None, buffers: Mapping[str, Tensor]) -> None:
    """Fills the buffers. The `entry` of a manifest is None where the model had none."""
    from safetensors.torch import load

    found: dict[str, Tensor] = {}
    if entry is not None:
        content = (path / entry["file"]).read_bytes()
        if checksum_of(content) != entry["checksum"]:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {entry['file']} does not match its checksum."
            )
        found = load(content)
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
    """Yields the checkpoints whose manifest and file sizes are right, newest first.

    The reasons against the others are appended to `skipped`.
    """
    for _, path in sorted(folders_by_step(Path(root)).items(), reverse=True):
        try:
            manifest = _verified_manifest(path)
        except NewerFormat:
            raise  # going on from an older checkpoint would delete this one
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            yield path, manifest


def _files_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the manifest's entries of files: those of the units, and that of the buffers."""
    buffers = manifest["buffers"]
    return [*manifest["units"], buffers] if buffers else manifest["units"]


def _info(path: Path, manifest: dict[str, Any], skipped: list[str]) -> CheckpointInfo:
    size = (path / MANIFEST).stat().st_size + sum(file["bytes"] for file in _files_of(manifest))
    return CheckpointInfo(path, manifest["step"], size, manifest["state"], skipped=tuple(skipped))


def _refuse_if_any(root: str | os.PathLike[str], skipped: list[str]) -> None:
    """Raises CheckpointError where there are checkpoints and none could be used."""
    if skipped:
        raise CheckpointError(
            f"No checkpoint in {root} can be used; restore one from a copy, or start a new run. "
            f"{' '.join(skipped)}"
        )


def _verified_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, of which it and the sizes of the files are right.

    Raises CheckpointError for any other, and NewerFormat for a format of a later version.
    """
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
    for entry in _files_of(body):
        _verify_size(path, entry)
    return body


def _verify_size(path: Path, entry: dict[str, Any]) -> None:
    try:
        size = (path / entry["file"]).stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {entry['file']} cannot be read ({error.strerror})."
        ) from None
    if size != entry["bytes"]:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {entry['file']} has {size:,} bytes instead of "
            f"{entry['bytes']:,}."
        )


def _refuse_other_model(path: Path, manifest: dict[str, Any], store: HostStore) -> None:
    """Raises CheckpointError for a checkpoint whose planes do not fit the store's."""
    if manifest["dtype"] != store.dtype:
        raise CheckpointError(
            f"Checkpoint {path} holds {manifest['dtype']} planes and this run computes in "
            f"{store.dtype}; set model.dtype to {manifest['dtype']}."
        )
    # Through JSON, as the manifest went: tuples become lists.
    here = {
        unit: json.loads(json.dumps(description(layout))) for unit, layout in store.layouts.items()
    }
    there = {entry["unit"]: entry for entry in manifest["units"]}
    if list(here) != list(there):
        only_one_has = [unit for unit in (*there, *here) if (unit in there) != (unit in here)]
        difference = only_one_has[0] if only_one_has else "their order"
        raise CheckpointError(
            f"Checkpoint {path} is of another model: it has {len(there)} units and this model "
            f"{len(here)}; the first difference is {difference}."
        )
    for unit, mine in here.items():
        theirs = {key: there[unit][key] for key in mine}
        if mine != theirs:
            raise CheckpointError(
                f"Checkpoint {path} is of another model: in unit {unit}, "
                f"{_first_difference(mine['parameters'], theirs['parameters'])}."
            )


def _first_difference(here: list[dict[str, Any]], there: list[dict[str, Any]]) -> str:
    """Says in words where the parameters of a unit differ."""
    for mine, theirs in zip(here, there):
        if mine["full_name"] != theirs["full_name"]:
            return f"it has {theirs['full_name']} where this model has {mine['full_name']}"
        for key, value in theirs.items():
            if mine[key] != value:
                return f"the {key} of {mine['full_name']} is {value} there and {mine[key]} here"
    return f"there are {len(there)} parameters there and {len(here)} here"


def _read_planes(
    path: Path, units: list[dict[str, Any]], target: _Target, progress: Progress
) -> None:
    """Reads the planes of all units, given by their entries of the manifest."""
    total = 0
    for unit in units:
        total += sum(unit["planes"][plane]["bytes"] for plane in _wanted(unit, target))
    meter = Meter(total, progress)
    in_threads([partial(_read_unit, path, unit, target, meter) for unit in units], meter)


def _wanted(unit: dict[str, Any], target: _Target) -> list[str]:
    return [plane for plane in unit["planes"] if plane in target.planes]


def _read_unit(path: Path, unit: dict[str, Any], target: _Target, meter: Meter) -> None:
    """Reads planes of one unit straight into the store, and verifies their checksums."""
    with (path / unit["file"]).open("rb", buffering=0) as file:
        for plane in _wanted(unit, target):
            entry = unit["planes"][plane]
            file.seek(entry["offset"])
            digest = new_digest()
            for chunk in chunks(target.store, unit["unit"], plane):
                rest = chunk
                while rest:  # an unbuffered file may give less than it is asked for
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
        # The page cache is to hold other things than what is in the planes now.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
