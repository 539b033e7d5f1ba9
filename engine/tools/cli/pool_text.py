"""The pool of memory for a terminal: which units live where, and what that costs a step."""

from __future__ import annotations

from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import Held, Pool, Units, listed
from engine.planning.fit.pool_costs import Costs, cost_text
from engine.planning.fit.requirements import PART_WORDS
from engine.text import in_gib

_WITHIN = {PartName.GPU: "in", PartName.HOST: "in", PartName.DISK: "on"}


def pool_as_text(pool: Pool, costs: Costs | None) -> list[str]:
    """Returns the pool as lines of text: a line for units with the same place, with what they take
    of each memory and what that costs a step.
    """
    title = "Where the model lives"
    rows = [(each.words, _places(pool, each), _cost(each, costs)) for each in pool.units]
    first, second = (max(map(len, column)) for column in list(zip(*rows))[:2])
    lines = [
        f"  {words:<{first}}  {places:<{second}}  {cost}".rstrip() for words, places, cost in rows
    ]
    if costs is not None:
        title = f"{title}, and what that costs a step"
    return [title, *lines]


def _places(pool: Pool, units: Units) -> str:
    """Returns what the units take of each part, as in "GPU memory 46.6 GiB"."""
    found = []
    for part in pool.parts:
        for share in part.shares:
            if share.units != units:
                continue
            text, within = f"{PART_WORDS[part.name]} {in_gib(share.bytes)}", _WITHIN[part.name]
            if share.held == Held.COPY:
                text = f"a copy of the weights in {text}"
            elif part.name != units.placement.weights:
                text = f"{listed(units.placement.planes_in(part.name))} {within} {text}"
            found.append((share.held, text))
    if units.placement.moments == PartName.DISK and not _tells_of_disk(pool, units):
        found.append((Held.MODEL, "moments on disk"))
    order = list(Held)
    return ", ".join(text for _, text in sorted(found, key=lambda each: order.index(each[0])))


def _tells_of_disk(pool: Pool, units: Units) -> bool:
    """Returns whether the pool's disk is the one that has moments of the units."""
    disks = [part for part in pool.parts if part.name == PartName.DISK]
    return any(share.units == units for part in disks for share in part.shares)


def _cost(units: Units, costs: Costs | None) -> str:
    return "" if costs is None else cost_text(costs.of([units]), costs.step_seconds)
