"""These functions find, verify and load the checkpoints that
`engine.training.checkpoints.checkpoint` has written.

- A manifest must match its own checksum, have a format that this version knows and be typed as this
  version writes it (`engine.training.checkpoints.manifest`).
- The files must be regular files in the checkpoint's folder, with the sizes listed in the manifest.
  Finding a checkpoint verifies no more than this.
- The layouts in the manifest must be those of the model, and no plane may be missing
  (`engine.training.checkpoints.same_model`). This is checked before anything is written to the
  planes.
- A checkpoint that holds weights alone is passed over by a resume, which needs the moments too.
- Moments that another optimizer keeps in another way are converted. States that cannot be
  converted are refused before anything is written.
- Other planes are read straight into the memory of the host states, except those that live on the
  device.
- Checksums are verified on the way. If a checkpoint is damaged, the one before it is loaded
  instead, which overwrites all planes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from engine import safe_files
from engine.config.optimizers import ADAMW, OPTIMIZERS, Optimizer
from engine.errors import CheckpointError, first_line
from engine.files import checksum_of
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.progress import Progress, no_progress
from engine.training.checkpoints.checkpoint import CheckpointInfo, folders_by_step
from engine.training.checkpoints.chunk_files import Meter, in_threads
from engine.training.checkpoints.frozen_files import read_frozen
from engine.training.checkpoints.manifest import (
    BuffersFile,
    FrozenFile,
    Manifest,
    OtherCheckpointFormat,
    UnitFile,
    read_manifest,
    run_of,
)
from engine.training.checkpoints.own_folders import linked_steps, refuse_other_kind
from engine.training.checkpoints.same_model import refuse_incomplete, refuse_other_model
from engine.training.checkpoints.staging import CHUNK_BYTES
from engine.training.checkpoints.unit_files import chunk_checksum

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runtime.host.host_states import HostStates
    from engine.runtime.optimizer.moment_conversion import Bytes


@dataclass(frozen=True)
class _Target:
    """The host states and the buffers that a checkpoint is loaded into, in place."""

    host_states: HostStates
    buffers: Mapping[str, Tensor]
    planes: tuple[str, ...]
    """Only these planes are loaded."""
    chunk_bytes: int = CHUNK_BYTES
    """The planes were written in chunks of this many bytes, of which each may have a checksum."""
    optimizer: Optimizer = ADAMW
    """The checkpoint holds the states of this optimizer. They are converted to those of the host
    states.
    """

    @classmethod
    def of(
        cls, states: HostStates, buffers: Mapping[str, Tensor], planes: Collection[str] | None
    ) -> _Target:
        """Returns a target of `planes`, or of all planes if that is None."""
        wanted = states.planes if planes is None else planes
        return cls(states, buffers, tuple(wanted))

    def memory(self, unit: str, plane: str, begin: int, end: int) -> np.ndarray:
        """Returns the memory into which a chunk of a plane is read, uint8 [bytes]: its place in the
        states, or other memory if it is converted later or is not in RAM.
        """
        if self.converts(plane) or not self.host_states.placement.is_in_ram(unit, plane):
            return np.empty(end - begin, np.uint8)
        return self.host_states.content(unit, plane, begin, end)

    def take(self, unit: str, plane: str, begin: int, chunk: np.ndarray) -> None:
        """Takes a chunk that was read, uint8 [bytes], unless it is in its place already or is
        converted later.
        """
        if not self.host_states.placement.is_in_ram(unit, plane) and not self.converts(plane):
            self.host_states.put(unit, plane, begin, chunk)

    def converts(self, plane: str) -> bool:
        """Returns whether the host states keeps the values of a plane in another way."""
        return plane not in WEIGHT_PLANES and self.optimizer != self.host_states.optimizer

    def convert(self, unit: str, plane: str, read: Bytes) -> None:
        """Sets a plane of states from that of another optimizer, whose bytes `read` returns
        (`engine.runtime.optimizer.moment_conversion`).
        """
        # Few resumes convert anything, and this loads torch and compiles kernels.
        from engine.runtime.optimizer.moment_conversion import convert_moments

        states = self.host_states
        here = states.content(unit, plane, 0, states.nbytes(unit, plane))
        convert_moments(
            states.layouts[unit], plane, (read, self.optimizer), (here, states.optimizer)
        )
        if not states.placement.is_in_ram(unit, plane):
            states.put(unit, plane, 0, here)

    @property
    def is_of_a_resume(self) -> bool:
        """Returns whether more than weights is loaded."""
        return not set(self.planes) <= set(WEIGHT_PLANES)


def newest_checkpoint(
    root: str | os.PathLike[str], to_resume: bool = False
) -> CheckpointInfo | None:
    """Returns the newest checkpoint whose manifest and file sizes are right, or None if there are
    no checkpoints. The checksums of planes are verified only on loading. `to_resume` passes over
    those that hold weights alone.

    Raises CheckpointError when there are checkpoints but none is right, or when a later version
    wrote the newest.
    """
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, to_resume, skipped):
        return _info(path, manifest, skipped)
    _refuse_if_any(root, skipped)
    return None


def load_newest_checkpoint(
    root: str | os.PathLike[str],
    states: HostStates,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = no_progress,
) -> CheckpointInfo | None:
    """Loads the newest checkpoint that verifies, checksums included, as `load_checkpoint` does.

    Checkpoints of weights alone are passed over unless `planes` are those of the weights. Returns
    None if there are no checkpoints. Raises CheckpointError when there are checkpoints but none
    verifies, when the newest belongs to another model or dtype, or when a later version wrote it.
    """
    target = _Target.of(states, buffers, planes)
    skipped: list[str] = []
    for path, manifest in _whole_ones(root, target.is_of_a_resume, skipped):
        refuse_other_model(path, manifest, states)
        _refuse_other_states(path, manifest, target)
        try:
            refuse_incomplete(path, manifest, states)
            _fill(path, manifest, target, progress)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return _info(path, manifest, skipped)
    _refuse_if_any(root, skipped)
    return None


def load_checkpoint(
    path: str | os.PathLike[str],
    states: HostStates,
    buffers: Mapping[str, Tensor],
    planes: Collection[str] | None = None,
    progress: Progress = no_progress,
) -> CheckpointInfo:
    """Fills planes of the host states and the model's persistent `buffers` (by full name) in place.

    `planes` must be allocated: all of them by default, WEIGHT_PLANES for sampling and export.
    Raises CheckpointError when the checkpoint belongs to another model or dtype, or holds weights
    alone and more is to be filled; the planes are then unchanged. Also raises CheckpointError when
    the checkpoint is damaged; the planes then hold a mixture of old and new values.
    """
    path = Path(path)
    target = _Target.of(states, buffers, planes)
    manifest = verified_manifest(path)
    refuse_other_model(path, manifest, states)
    if target.is_of_a_resume:
        _refuse_weights_alone(path, manifest)
    _refuse_other_states(path, manifest, target)
    refuse_incomplete(path, manifest, states)
    _fill(path, manifest, target, progress)
    return _info(path, manifest, [])


def _refuse_other_states(path: Path, manifest: Manifest, target: _Target) -> None:
    """Raises CheckpointError where states are loaded and cannot be converted to those of the host
    states.
    """
    asked = target.host_states.optimizer
    if target.is_of_a_resume and manifest.optimizer not in (asked, *OPTIMIZERS[asked].resumes):
        raise CheckpointError(
            f"Checkpoint {path} has the states of {manifest.optimizer}, which cannot be converted "
            f"to those of {asked}; set train.optimizer to {manifest.optimizer}."
        )


def _fill(path: Path, manifest: Manifest, target: _Target, progress: Progress) -> None:
    try:
        cut = replace(target, chunk_bytes=manifest.chunk_bytes, optimizer=manifest.optimizer)
        _read_planes(path, manifest, cut, progress)
        _read_buffers(path, manifest.buffers, target.buffers)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} cannot be read ({error.strerror}).") from None


def _read_buffers(path: Path, entry: BuffersFile | None, buffers: Mapping[str, Tensor]) -> None:
    """Fills the buffers. `entry`, from the manifest, is None if the model had no buffers."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    found: dict[str, Tensor] = {}
    if entry is not None:
        content = safe_files.read_bytes(path / entry.file, run_of(path), entry.bytes)
        if checksum_of(content) != entry.checksum:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {entry.file} does not match its checksum."
            )
        try:
            found = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"Checkpoint {path} is damaged: {entry.file} holds no tensors "
                f"({first_line(error)})."
            ) from None
    if found.keys() != buffers.keys():
        raise CheckpointError(
            f"Checkpoint {path} is of another model: it has the buffers {sorted(found) or 'none'} "
            f"and this model {sorted(buffers) or 'none'}."
        )
    for name, tensor in found.items():
        own = buffers[name]
        if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
            raise CheckpointError(
                f"Checkpoint {path} is of another model: its buffer {name} is {tensor.dtype} "
                f"{list(tensor.shape)}, and that of this model {own.dtype} {list(own.shape)}."
            )
    for name, tensor in found.items():
        buffers[name].copy_(tensor)


def _whole_ones(
    root: str | os.PathLike[str], to_resume: bool, skipped: list[str]
) -> Iterator[tuple[Path, Manifest]]:
    """Yields the checkpoints whose manifest and file sizes are right, newest first; with
    `to_resume`, only full ones.

    For each checkpoint that is left out, the reason is appended to `skipped`. Raises
    CheckpointError where `root` is no folder of its run.
    """
    refuse_other_kind(Path(root))
    skipped += linked_steps(Path(root))
    for _, path in sorted(folders_by_step(Path(root)).items(), reverse=True):
        try:
            manifest = verified_manifest(path)
            if to_resume:
                _refuse_weights_alone(path, manifest)
        except OtherCheckpointFormat:
            raise  # resuming from a checkpoint before it would delete this one
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            yield path, manifest


def _info(path: Path, manifest: Manifest, skipped: list[str]) -> CheckpointInfo:
    size = manifest.manifest_bytes + sum(file.bytes for file in manifest.files)
    return CheckpointInfo(path, manifest.step, size, manifest.state, skipped=tuple(skipped))


def _refuse_if_any(root: str | os.PathLike[str], skipped: list[str]) -> None:
    """Raises CheckpointError if checkpoints were skipped; the caller has found none that can be
    used.
    """
    if skipped:
        raise CheckpointError(
            f"No checkpoint in {root} can be used; restore one from a copy, or start a new run. "
            f"{' '.join(skipped)}"
        )


def verified_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint after verifying the manifest and the file sizes.

    Raises CheckpointError if either is wrong, and OtherCheckpointFormat for another format.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        _verify_size(path, entry)
    return manifest


def _verify_size(path: Path, entry: UnitFile | FrozenFile | BuffersFile) -> None:
    try:
        found = safe_files.lstat(path / entry.file, run_of(path))
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {path} is damaged: {entry.file} cannot be read ({error.strerror})."
        ) from None
    problem = ""
    if found is None:
        problem = f"{entry.file} cannot be read ({os.strerror(errno.ENOENT)})"
    elif not stat.S_ISREG(found.st_mode):
        problem = f"{entry.file} is not a regular file"
    elif found.st_size != entry.bytes:
        problem = f"{entry.file} has {found.st_size:,} bytes instead of {entry.bytes:,}"
    if problem:
        raise CheckpointError(f"Checkpoint {path} is damaged: {problem}.")


def _refuse_weights_alone(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for a checkpoint without moments."""
    if manifest.holds == "weights":
        raise CheckpointError(
            f"Checkpoint {path} holds weights alone, which can be trained on from in a new run; a "
            "resume needs a full checkpoint, and those that it writes take the place of this one."
        )


def _read_planes(path: Path, manifest: Manifest, target: _Target, progress: Progress) -> None:
    """Reads the planes of all units, and the weights that are not trained."""
    total = sum(entry.bytes for entry in manifest.frozen)
    for unit in manifest.units:
        total += sum(unit.planes[plane].bytes for plane in _wanted(unit, target))
    meter = Meter(total, progress)
    read_unit = partial(_read_unit, path, target=target, meter=meter)
    in_threads([partial(read_unit, unit) for unit in manifest.units], meter)
    read_frozen(path, manifest.frozen, target.host_states, target.chunk_bytes, meter)


def _wanted(unit: UnitFile, target: _Target) -> list[str]:
    return [plane for plane in unit.planes if plane in target.planes]


def _read_unit(path: Path, unit: UnitFile, target: _Target, meter: Meter) -> None:
    """Reads planes of one unit straight into the host states, and verifies their checksums. Moments
    of another optimizer are verified first and then converted, so that little memory is needed.
    """
    with safe_files.open_to_read(path / unit.file, run_of(path), unit.bytes, buffering=0) as file:
        for plane in _wanted(unit, target):
            entry = unit.planes[plane]
            written = _WrittenPlane(file, entry.offset, path / unit.file)
            verifier = _ChunkChecksums(entry.checksums)
            for begin in range(0, entry.bytes, target.chunk_bytes):
                end = min(begin + target.chunk_bytes, entry.bytes)
                memory = target.memory(unit.unit, plane, begin, end)
                chunk = memory.data
                written.read(begin, chunk)
                verifier.add(chunk)
                target.take(unit.unit, plane, begin, memory)
                meter.add(len(chunk))
            if not verifier.is_right():
                raise CheckpointError(
                    f"Checkpoint {path} is damaged: {plane} of unit {unit.unit} ({unit.file}) does "
                    "not match its checksum."
                )
            if target.converts(plane):
                target.convert(unit.unit, plane, written.bytes)
        # The page cache need not keep what the planes now hold.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class _WrittenPlane:
    """A `_WrittenPlane` reads one plane of a checkpoint."""

    file: BinaryIO
    offset: int
    """The plane begins at this byte of the file."""
    path: Path
    """The file has this name."""

    def read(self, begin: int, memory: memoryview) -> None:
        """Fills `memory` with the bytes of the plane from `begin` on."""
        self.file.seek(self.offset + begin)
        rest = memory
        while rest:  # an unbuffered read may be partial
            count = self.file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"Checkpoint {self.path.parent} is damaged: {self.path.name} ends too early."
                )
            rest = rest[count:]

    def bytes(self, begin: int, end: int) -> np.ndarray:
        """Returns the bytes of the plane between two places, uint8 [bytes]."""
        memory = np.empty(end - begin, np.uint8)
        self.read(begin, memory.data)
        return memory


class _ChunkChecksums:
    """A `_ChunkChecksums` verifies a plane whose chunks have checksums of their own."""

    def __init__(self, checksums: Sequence[str]):
        self._checksums = list(checksums)
        self._found: list[str] = []

    def add(self, chunk: memoryview) -> None:
        """Adds the next chunk of the plane."""
        self._found.append(chunk_checksum(chunk))

    def is_right(self) -> bool:
        """Returns whether the chunks are those that were written."""
        return self._found == self._checksums
