"""A checkpoint is loaded only into the model that it is of, and only if it lacks nothing of it.

This is verified before anything is written to the planes: the layouts in the manifest must be those
of the host states, and each unit must have every plane that a checkpoint of its kind holds, with
the bytes that follow from its layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import CheckpointError
from engine.planning.layout.layout import UnitLayout, checkpoint_planes
from engine.training.checkpoints.manifest import Manifest, Parameter, UnitFile
from engine.training.checkpoints.unit_files import description

if TYPE_CHECKING:
    from engine.runtime.host.host_states import HostStates


def refuse_other_model(path: Path, manifest: Manifest, states: HostStates) -> None:
    """Raises CheckpointError for a checkpoint of another model than that of the host states."""
    if manifest.dtype != states.dtype:
        raise CheckpointError(
            f"Checkpoint {path} holds {manifest.dtype} planes and this run computes in "
            f"{states.dtype}; set model.dtype to {manifest.dtype}."
        )
    here, there = list(states.layouts), [entry.unit for entry in manifest.units]
    if here != there:
        only_one_has = [unit for unit in (*there, *here) if (unit in there) != (unit in here)]
        difference = only_one_has[0] if only_one_has else "their order"
        raise CheckpointError(
            f"Checkpoint {path} is of another model: it has {len(there)} units and this model "
            f"{len(here)}; the first difference is {difference}."
        )
    for entry in manifest.units:
        difference = _difference(states.layouts[entry.unit], entry)
        if difference:
            raise CheckpointError(
                f"Checkpoint {path} is of another model: in unit {entry.unit}, {difference}."
            )


def refuse_incomplete(path: Path, manifest: Manifest, states: HostStates) -> None:
    """Raises CheckpointError for a checkpoint of the model of the host states that does not have
    all planes of each unit, and the weights that are not trained.
    """
    for entry in manifest.units:
        lacking = _lacking(states.layouts[entry.unit], entry, manifest)
        if lacking:
            raise CheckpointError(f"Checkpoint {path} is damaged: {lacking}.")
    _refuse_other_frozen(path, manifest, states)


def _difference(layout: UnitLayout, entry: UnitFile) -> str:
    """Says in words where a unit differs from the layout of the host states, or returns an empty
    text.
    """
    described = description(layout)
    here = [msgspec.convert(each, Parameter) for each in described["parameters"]]
    there = list(entry.parameters)
    if here != there:
        return _first_difference(here, there)
    if (layout.numel, layout.decay_numel) != (entry.numel, entry.decay_numel):
        return f"a plane has {entry.numel:,} elements there and {layout.numel:,} here"
    return ""


def _first_difference(here: list[Parameter], there: list[Parameter]) -> str:
    for mine, theirs in zip(here, there):
        if mine.full_name != theirs.full_name:
            return f"it has {theirs.full_name} where this model has {mine.full_name}"
        own = _shown(mine)
        for key, value in _shown(theirs).items():
            if own[key] != value:
                return f"the {key} of {mine.full_name} is {value} there and {own[key]} here"
    return f"there are {len(there)} parameters there and {len(here)} here"


def _shown(parameter: Parameter) -> dict[str, object]:
    return msgspec.structs.asdict(parameter) | {"shape": list(parameter.shape)}


def _lacking(layout: UnitLayout, entry: UnitFile, manifest: Manifest) -> str:
    """Says in words which plane of a unit is missing, is one too many, or has other bytes than its
    layout; returns an empty text if none is.
    """
    sizes = layout.plane_bytes(manifest.dtype, manifest.optimizer)
    # Weights that are not trained have files of their own.
    begin, end = layout.frozen_range(manifest.dtype)
    sizes["weight_high"] -= end - begin
    wanted = checkpoint_planes(manifest.dtype, manifest.optimizer, manifest.holds)
    for plane in (*wanted, *entry.planes):
        if plane not in entry.planes:
            return f"{plane} of unit {entry.unit} is missing"
        if plane not in wanted:
            return f"unit {entry.unit} has a plane {plane[:40]}, which no such checkpoint has"
        if entry.planes[plane].bytes != sizes[plane]:
            return (
                f"{plane} of unit {entry.unit} has {entry.planes[plane].bytes:,} bytes instead of "
                f"{sizes[plane]:,}"
            )
    if tuple(entry.planes) != wanted:
        return f"the planes of unit {entry.unit} are in another order"
    return ""


def _refuse_other_frozen(path: Path, manifest: Manifest, states: HostStates) -> None:
    """Raises CheckpointError where other weights that are not trained are there than in the host
    states, or have other sizes.
    """
    wanted: dict[str, int] = {}
    for layout in states.layouts.values():
        begin, end = layout.frozen_range(states.dtype)
        if begin < end:
            wanted[layout.unit] = end - begin
    units = [each.unit for each in manifest.frozen]
    found = {each.unit: each.bytes for each in manifest.frozen}
    if found == wanted and len(units) == len(found):
        return
    names = (*wanted, *units)
    first = next((unit for unit in names if found.get(unit) != wanted.get(unit)), units[:1])
    raise CheckpointError(
        f"Checkpoint {path} is damaged: it does not have the weights of this model that are not "
        f"trained, those of unit {first} for example."
    )
