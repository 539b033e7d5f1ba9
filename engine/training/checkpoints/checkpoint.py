"""A full checkpoint holds every plane except the gradients, and one of weights alone the weight
planes (`output.checkpoint`). Both are written straight from the host states's memory, in one way.

``checkpoints/step-N/`` holds one file per unit (its planes one after another), another for its
weights that are not trained (`engine.training.checkpoints.frozen_files`), ``buffers.safetensors``
if the model has persistent buffers, and ``manifest.json`` with what the checkpoint holds, sizes,
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

`engine.training.checkpoints.restore` reads these checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from engine import safe_files
from engine.config.optimizers import ADAMW
from engine.errors import CheckpointError, DiskFullError
from engine.files import FULL, body_checksum, checksum_of, disk_free, disk_full_text
from engine.planning.layout.layout import UnitLayout, checkpoint_planes
from engine.progress import Progress, no_progress
from engine.runs.record.run_folder import BEST_FOLDER
from engine.training.checkpoints import staging
from engine.training.checkpoints.chunk_files import Meter
from engine.training.checkpoints.frozen_files import FROZEN, Earlier, FrozenFiles
from engine.training.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    MOST_BYTES,
    read_manifest,
    run_of,
    step_in,
)
from engine.training.checkpoints.plane_snapshot import Snapshot
from engine.training.checkpoints.unit_files import CHECKSUM, UnitFiles

if TYPE_CHECKING:
    from torch import Tensor

    from engine.runtime.host.host_states import HostStates

BUFFERS = "buffers.safetensors"
HOLDS = "holds"
"""The manifest says under this name, near its beginning, whether the checkpoint is `full` or holds
`weights` alone.
"""

OPTIMIZER = "optimizer"
"""The manifest says under this name whose moments a full checkpoint holds (`train.optimizer`)."""

_SPARE_BYTES = 1 << 20
"""The disk must have this many bytes more than the planes, the buffers, the state and the checksums
need. They allow for the rest of the manifest, and for what planes leave unused of their last
blocks.
"""
_ENTRY_BYTES = 48
"""The manifest takes fewer bytes than this for the checksum of a chunk."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint is written from these values. Of these, only planes that `snapshot` protects may
    change during the writing.
    """

    host_states: HostStates
    state: dict[str, Any]
    """A resume needs these JSON values in addition to the planes."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """These are the model's persistent buffers, by full name."""
    snapshot: Snapshot | None = None
    """Steps go on while this snapshot of the planes is written; None where training stands still.
    """
    holds: Literal["full", "weights"] = "full"
    """The checkpoint holds the moments too, or weights alone."""

    @property
    def planes(self) -> tuple[str, ...]:
        """These planes of each unit are written, in this order."""
        states = self.host_states
        return checkpoint_planes(states.dtype, states.optimizer, self.holds)

    @property
    def plane_bytes(self) -> int:
        """The planes take this many bytes in the checkpoint."""
        return checkpoint_bytes(self.host_states, self.holds)

    @property
    def most_bytes(self) -> int:
        """The planes and the weights that are not trained, which may be on the disk already, take
        this many bytes.
        """
        frozen = (
            each.frozen_range(self.host_states.dtype) for each in self.host_states.layouts.values()
        )
        return self.plane_bytes + sum(end - begin for begin, end in frozen)

    def needed_bytes(self, root: Path) -> int:
        """Returns the free space that the checkpoint needs at most under `root`, in bytes. Weights
        that are not trained need some unless an earlier checkpoint of the run has them.

        Raises TypeError or ValueError for a state that cannot be written as JSON.
        """
        state = len(json.dumps(self.state, allow_nan=False))
        buffers = sum(tensor.nbytes for tensor in self.buffers.values())
        chunks = sum(
            -(-size // staging.CHUNK_BYTES)
            for layout in self.host_states.layouts.values()
            for size in _plane_bytes(layout, self.host_states, self.holds).values()
        )
        # The size of the state is doubled as a safety margin.
        rest = buffers + 2 * state + _ENTRY_BYTES * chunks + _SPARE_BYTES
        return self.plane_bytes + _frozen_files(self.host_states, root).new_bytes + rest


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk is described by its path and the contents of its manifest."""

    path: Path
    step: int
    bytes: int
    """Number of bytes written anew."""
    state: dict[str, Any]
    """This state was written with the checkpoint."""
    plane_bytes: int = 0
    """The planes of the weights that are trained take so many of them: what `checkpoint_bytes`
    counts. Weights that are not trained are written once, with the first checkpoint of a run.
    """
    seconds: float = 0.0
    """Writing took this many seconds; 0.0 for a checkpoint that was found on disk."""
    skipped: tuple[str, ...] = ()
    """Each sentence says which newer checkpoint could not be used, and why."""

    @property
    def in_words(self) -> str:
        """Returns which weights these are: "step 8", or "step 8 (the best weights)"."""
        best = " (the best weights)" if self.path.parent.name == BEST_FOLDER else ""
        return f"step {self.step:,}{best}"


def checkpoint_bytes(states: HostStates, holds: Literal["full", "weights"] = "full") -> int:
    """Returns the bytes of the planes in one checkpoint.

    The manifest, about 100 bytes per parameter tensor, is not included.
    """
    units = states.layouts.values()
    return sum(sum(_plane_bytes(layout, states, holds).values()) for layout in units)


# ---------------------------------------------------------------------- writing


def write_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    contents: Contents,
    keep: int,
    progress: Progress = no_progress,
) -> CheckpointInfo:
    """Writes ``root/step-<step>`` and deletes all checkpoints except the `keep` newest.

    Checkpoints of later steps are deleted too: they date from before the run was resumed from an
    earlier one. Raises TypeError or ValueError for a state that is not made of JSON values,
    DiskFullError when the disk has too little space or fills up during the writing, and
    CheckpointError when the writing fails for another reason. Earlier checkpoints are then
    untouched. Raises Ended when the snapshot was ended before it was written.
    """
    root = Path(root)
    began = time.monotonic()
    needed = contents.needed_bytes(root)
    unfinished = root / f".step-{step}.partial"
    try:
        # A run's folder that is gone is not made anew.
        safe_files.make_folder(root, root.parent, exist_ok=True)
        clear_leftovers(root)
        _check_disk_space(root, step, needed)
        safe_files.make_folder(unfinished, root.parent)
        written, planes = _write_files(unfinished, step, contents, progress)
        _move_into_place(root, step, unfinished)
    except OSError as error:
        _give_up(unfinished)
        sentence = (
            f"The checkpoint of step {step} cannot be written in {root} ({error.strerror}); the "
            "ones before it are untouched."
        )
        if error.errno in FULL:
            raise DiskFullError(
                sentence, str(root), needed, disk_free(root), disk_full_text(error)
            ) from error
        raise CheckpointError(sentence) from error
    except BaseException:
        # Any exception from `progress` cancels the checkpoint, and so does Ctrl-C.
        _give_up(unfinished)
        raise
    _delete_others(root, step, keep)
    seconds = time.monotonic() - began
    path = root / f"step-{step}"
    return CheckpointInfo(path, step, written, contents.state, planes, seconds)


def _give_up(unfinished: Path) -> None:
    with contextlib.suppress(OSError):
        safe_files.remove_tree(unfinished, run_of(unfinished))


def change_state(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces `values` of the state with which the whole checkpoint in `path` was written.

    Raises OSError if it cannot be written; the checkpoint is unchanged then.
    """
    body = json.loads(safe_files.read_bytes(path / MANIFEST, run_of(path), MOST_BYTES))
    del body["checksum"]
    body["state"] |= values
    safe_files.write_whole(path / MANIFEST, _manifest(body), run_of(path))


def _manifest(values: dict[str, Any]) -> bytes:
    """Returns the content of a manifest with its own checksum."""
    # The values go through JSON first, because the checksum must match what a reader sees, where
    # tuples have become lists.
    body = json.loads(json.dumps(values))
    return json.dumps({"checksum": body_checksum(body), **body}).encode()


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


def _frozen_files(states: HostStates, root: Path) -> FrozenFiles:
    return FrozenFiles(states, root, partial(_earlier, root))


def _earlier(root: Path) -> list[Earlier]:
    """Returns the checkpoints of the run and then its best weights, the newest first. All writers
    look in the same order, so that they share the same files.
    """
    found = []
    for place in dict.fromkeys((root.parent / "checkpoints", root.parent / BEST_FOLDER, root)):
        for _, path in sorted(folders_by_step(place).items(), reverse=True):
            with contextlib.suppress(CheckpointError):
                found.append(Earlier(path, read_manifest(path).frozen))
    return found


def _write_files(
    folder: Path, step: int, contents: Contents, progress: Progress
) -> tuple[int, int]:
    """Writes and syncs all files of a checkpoint, the manifest last, and returns the bytes that are
    written anew, and those of the planes among them.
    """
    states = contents.host_states
    layouts = list(states.layouts.values())
    sizes = [_plane_bytes(layout, states, contents.holds) for layout in layouts]
    snapshot = contents.snapshot
    if snapshot is None:
        snapshot = Snapshot(states, contents.planes)
        snapshot.arm()  # nothing changes the planes
    files = UnitFiles(folder, layouts, sizes)
    frozen = _frozen_files(states, folder.parent)
    meter = Meter(contents.plane_bytes + frozen.new_bytes, progress)
    units = files.write(snapshot, meter)
    frozen_files, new_bytes = frozen.write(folder, folder.parent / f"step-{step}", meter)
    buffers = _write_buffers(folder, contents.buffers) if contents.buffers else None
    # Weights alone are the same with every optimizer.
    moments_of = states.optimizer if contents.holds == "full" else ADAMW
    values = {
        "format": FORMAT,
        "step": step,
        HOLDS: contents.holds,
        "dtype": states.dtype,
        OPTIMIZER: moments_of,
        "chunk_checksum": CHECKSUM,
        "chunk_bytes": staging.CHUNK_BYTES,
        "units": units,
        **({FROZEN: msgspec.to_builtins(frozen_files)} if frozen_files else {}),
        "buffers": buffers,
        "state": contents.state,
    }
    manifest = _manifest(values)
    run = run_of(folder)
    safe_files.write_new(folder / MANIFEST, manifest, run)
    # The files are on the disk already; this puts their names there too.
    safe_files.sync_folder(folder, run)
    buffer_bytes = 0 if buffers is None else buffers["bytes"]
    planes = sum(unit["bytes"] for unit in units)
    return planes + new_bytes + len(manifest) + buffer_bytes, planes


def _write_buffers(folder: Path, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    from safetensors.torch import save

    content = save({name: tensor.contiguous() for name, tensor in buffers.items()})
    safe_files.write_new(folder / BUFFERS, content, run_of(folder))
    return {"file": BUFFERS, "bytes": len(content), "checksum": checksum_of(content)}


def _move_into_place(root: Path, step: int, unfinished: Path) -> None:
    run, target = root.parent, root / f"step-{step}"
    if safe_files.lstat(target, run) is not None:
        # A folder that is not empty cannot be replaced in one rename. Between the two renames,
        # `folders_by_step` finds the old folder.
        safe_files.rename(target, root / f".step-{step}.old", run)
    safe_files.rename(unfinished, target, run)
    # The renames must be on the disk before anything is deleted. `root` itself may be new, too.
    safe_files.sync_folder(root, run)
    safe_files.sync_folder(run, run)


def _delete_others(root: Path, step: int, keep: int) -> None:
    """Deletes all checkpoints except `keep` of them: that of `step` and the newest ones before
    it.
    """
    run, found = root.parent, folders_by_step(root)
    older = sorted((other for other in found if other < step), reverse=True)
    kept = {step, *older[: max(keep - 1, 0)]}
    for other, path in found.items():
        if other not in kept:
            # The new checkpoint is safe. If space runs out, the disk check of the next one reports
            # it.
            with contextlib.suppress(OSError):
                safe_files.rename(path, root / f".step-{other}.deleted", run)
    for name in safe_files.entries(root, run):
        if _is_leftover(name, ".deleted") or name == f".step-{step}.old":
            with contextlib.suppress(OSError):
                safe_files.remove_tree(root / name, run)


def clear_leftovers(root: Path) -> None:
    """Removes the leftovers of a killed writer, and restores the checkpoint that it was about to
    replace. Raises OSError where that is not possible.
    """
    there = safe_files.entries(root, root.parent)
    for name in there:
        current = name[1:].removesuffix(".old")
        if _is_leftover(name, ".old") and current not in there:
            # The writer was killed between the two renames, so the old folder is the checkpoint of
            # that step.
            safe_files.rename(root / name, root / current, root.parent)
        elif any(_is_leftover(name, ending) for ending in (".old", ".partial", ".deleted")):
            safe_files.remove_tree(root / name, root.parent)


def _is_leftover(name: str, ending: str) -> bool:
    return name.startswith(".step-") and name.endswith(ending)


# ---------------------------------------------------------------------- shared with restore


def folders_by_step(root: Path) -> dict[int, Path]:
    """Returns the checkpoint folders in `root` by their steps; no link counts.

    A ``.step-N.old`` counts if ``step-N`` itself is missing: the writer was killed between the two
    renames that replace the old folder. Raises OSError where `root` cannot be read, or is no folder
    of its run.
    """
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError):
        there = safe_files.entries(root, root.parent)
        # Names of older ones, which begin with a dot, come last.
        for name in sorted(there, reverse=True):
            step = step_in(name)
            if step is not None and stat.S_ISDIR(there[name].st_mode):
                found.setdefault(step, root / name)
    return found


def _plane_bytes(
    layout: UnitLayout, states: HostStates, holds: Literal["full", "weights"]
) -> dict[str, int]:
    """Returns the bytes of each plane that a checkpoint holds, in file order, without weights that
    are not trained.
    """
    sizes = layout.plane_bytes(states.dtype, states.optimizer)
    begin, end = layout.frozen_range(states.dtype)
    sizes["weight_high"] -= end - begin
    planes = checkpoint_planes(states.dtype, states.optimizer, holds)
    return {plane: sizes[plane] for plane in planes}
