"""Where the units of a run live, by its recorded plan."""

from __future__ import annotations

from typing import Any

from app.shared.pool_labels import places_text
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import Units, listed, units_by_place
from engine.planning.schedule.choices import Gradients, Placement, PlanChoices, Updates
from engine.runs.record.snapshot import RunSnapshot

PLACES = {PartName.GPU: "GPU", PartName.HOST: "RAM", PartName.DISK: "disk"}


def places(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Returns where units live: sentences, and a row for units with the same place, which has what
    lives where and what updates them. Returns None before there is a plan.
    """
    count = len(snapshot.units)
    if not snapshot.plan_choices or count <= MOST_OUTSIDE:
        return None
    units = units_by_place(count, _choices(snapshot.plan_choices, count))
    on_gpu = snapshot.device == "cuda"
    text, more = places_text(units, on_gpu)
    rows = [[each.words, _place(each), _updated(each, on_gpu)] for each in units]
    return {"caption": text, "more": more, "rows": rows}


MOST_OUTSIDE = 2
"""Embed and head, which are units but not blocks."""


def _choices(recorded: dict[str, Any], count: int) -> PlanChoices:
    """Returns the choices that places depend on. A record may lack them, and may be damaged."""
    listed_units = recorded.get("device_updated_units")
    device_updated = listed_units if isinstance(listed_units, (list, tuple)) else ()
    kept = _number(recorded.get("blocks_kept_in_slots"), count - MOST_OUTSIDE)
    return PlanChoices(
        placement=Placement(
            gpu_resident_units=_number(recorded.get("gpu_resident_units"), count),
            gpu_resident_apart=recorded.get("gpu_resident_apart") is True,
            blocks_kept_in_slots=kept,
        ),
        gradients=Gradients(gradients_on_gpu=recorded.get("gradients_on_gpu") is True),
        updates=Updates(device_updated_units=tuple(map(str, device_updated))),
    )


def _number(value: Any, most: int) -> int:
    return min(max(0, value), most) if type(value) is int else 0


def _place(units: Units) -> str:
    """Returns what lives where, as in "RAM, gradients: GPU"."""
    main = units.placement.weights
    found = [PLACES[main]]
    for name, words in PLACES.items():
        planes = units.placement.planes_in(name)
        if name != main and planes:
            found.append(f"{listed(planes)}: {words}")
    return ", ".join(found)


def _updated(units: Units, on_gpu: bool) -> str:
    """Returns where the optimizer runs for the units."""
    if not on_gpu:
        return "CPU"
    if units.updated_on_gpu == len(units.numbers):
        return "GPU"
    if not units.updated_on_gpu:
        return "CPU"
    return f"CPU; {units.updated_on_gpu} of them: GPU"
