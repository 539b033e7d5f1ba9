"""A new run can start from the weights of an earlier run's checkpoint (`model.start_from`).

The fp32 masters are taken to the bit, also where the new run has another precision that can hold
them, or trains other parts of the model. Only weights that the new run does not train are rounded
to bf16, if it computes in that. The moments of AdamW begin anew, as do the steps and the order of
the rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine import safe_files
from engine.errors import CheckpointError, ModelError
from engine.planning.layout.layout import WEIGHT_PLANES, UnitLayout, lay_out
from engine.progress import Progress, no_progress
from engine.runs.record.run_folder import BEST_FOLDER
from engine.runtime.host.host_states import HostStates
from engine.training.checkpoints.checkpoint import CheckpointInfo
from engine.training.checkpoints.manifest import MANIFEST, Manifest
from engine.training.checkpoints.restore import (
    load_checkpoint,
    newest_checkpoint,
    verified_manifest,
)
from engine.training.weights.resize_embeddings import ResizedEmbeddings

if TYPE_CHECKING:
    from torch import Tensor


def newest_weights(place: str | os.PathLike[str]) -> Path:
    """Returns the folder of the checkpoint that `place` names: a checkpoint; a run, of which the
    newest checkpoint counts or, where it has none, the best weights that it kept; or the folder
    with these. Raises ModelError if there is none.
    """
    path = Path(place).expanduser()
    if path.is_symlink() or ".." in path.parts:
        path = path.resolve()  # a person named it; links in it are not followed
    if safe_files.is_file(path / MANIFEST, path):
        return path
    try:
        places = (path / "checkpoints", path, path / BEST_FOLDER)
        found = next(filter(None, map(newest_checkpoint, places)), None)
    except CheckpointError as error:
        raise ModelError(f"model.start_from: {error}") from None
    if not path.exists():
        raise ModelError(f"model.start_from: the folder {path} does not exist; check the path.")
    if found is None:
        raise ModelError(
            f"model.start_from: there is no checkpoint in {path}; name the folder of a run that "
            "was saved, or of one of its checkpoints."
        )
    return found.path


def load_start(
    place: str | os.PathLike[str],
    states: HostStates,
    buffers: Mapping[str, Tensor],
    progress: Progress = no_progress,
    rows: Callable[[int], ResizedEmbeddings] | None = None,
) -> CheckpointInfo:
    """Fills the weight planes of `states` and the model's `buffers` from the checkpoint at `place`.
    rows: the new rows of a model to which tokens are added; they are returned for a checkpoint that
    has them all, else None.

    Only the weight planes need to be allocated. Raises ModelError if there is no checkpoint, or if
    it is damaged or of another model.
    """
    path = newest_weights(place)
    try:
        manifest = verified_manifest(path)
        _refuse_adapters(path, manifest, states)
        dtype = manifest.dtype
        layouts = _layouts_of(manifest, states, rows)
        if dtype == states.dtype and layouts == list(states.layouts.values()):
            return load_checkpoint(path, states, buffers, WEIGHT_PLANES, progress)
        # The moments are allocated later, so there is room for both kinds of weights.
        other = HostStates(layouts, dtype)
        try:
            other.allocate_weights()
            info = load_checkpoint(path, other, buffers, WEIGHT_PLANES, progress)
            specs = [spec for layout in states.layouts.values() for spec in layout.parameters]
            wanted = {spec.full_name: spec.shape for spec in specs}
            for unit, layout in other.layouts.items():
                for spec in layout.parameters:
                    values = other.parameters.master(unit, spec.name)
                    if rows is not None and spec.shape != wanted[spec.full_name]:
                        values = rows(spec.shape[0]).grown(values, unit)
                    states.parameters.write(unit, spec.name, values)
            return info
        finally:
            other.close()
    except CheckpointError as error:
        raise ModelError(f"model.start_from: {error}") from None


def _refuse_adapters(path: Path, manifest: Manifest, states: HostStates) -> None:
    """Raises CheckpointError for weights of a run with adapters, if the new run has none."""
    has_adapters = any(spec.adapter for each in states.layouts.values() for spec in each.parameters)
    names = [each.full_name for unit in manifest.units for each in unit.parameters]
    if not has_adapters and any(name.endswith(".lora_A.weight") for name in names):
        raise CheckpointError(
            f"{path} is of a run that trained adapters; export that run as a whole model, and give "
            "its folder as model.source."
        )


def _layouts_of(
    manifest: Manifest, states: HostStates, rows: Callable[[int], ResizedEmbeddings] | None
) -> list[UnitLayout]:
    """Returns the layouts of host states with those parameters frozen that the run of a checkpoint
    did not train, and without new `rows` that it lacks. Those of a checkpoint of another model are
    the host states, and loading it refuses it.
    """
    written = {entry.unit: entry.parameters for entry in manifest.units}
    layouts = []
    for unit, layout in states.layouts.items():
        names = [each.full_name for each in written.get(unit, ())]
        # A run without adapters may have written the weights beside which some are trained now.
        own = {
            spec.full_name: spec
            for spec in layout.parameters
            if not spec.adapter or spec.full_name in names
        }
        if sorted(names) != sorted(own):
            return list(states.layouts.values())
        specs = []
        for each in written[unit]:
            spec, shape = own[each.full_name], each.shape
            if rows is not None and shape and rows(shape[0]).are_for(shape, spec.shape):
                spec = replace(spec, shape=shape)
            specs.append(replace(spec, frozen=each.frozen))
        layouts.append(lay_out(unit, specs))
    return layouts
