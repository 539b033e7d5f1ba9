"""One event says what memory a run takes. `engine.runs.events` has the list of all events."""

from __future__ import annotations

from typing import Any, TypedDict

from engine.runs.event_base import Event
from engine.runs.field_types import Number, Whole


class RankSample(TypedDict):
    """A rank took so much memory, in bytes. `power` is that of its card in watts, 0 if unknown."""

    rank: Whole
    host: Whole
    """The process has this for itself; what all ranks share is not in it."""
    gpu_allocated: Whole
    gpu_reserved: Whole
    gpu_peak: Whole
    gpu_driver: Whole
    gpu_total: Whole
    power: Number


class MemorySampled(Event, frozen=True):
    """Memory was measured after `step`; the figures are in bytes.

    `gpu_driver` is the memory in use on the whole card, as the driver reports it. `host_total` is
    what all processes of this session together may use. `power` is the card's power in watts, or 0
    if unknown.

    Where several ranks compute, `host_rss` counts the memory of all their processes, with what they
    share once, and `power` is that of all cards; the other figures are those of rank 0.
    """

    step: Whole = 0
    host_rss: Whole = 0
    host_pinned: Whole = 0
    gpu_allocated: Whole = 0
    gpu_reserved: Whole = 0
    gpu_peak: Whole = 0
    gpu_driver: Whole = 0
    gpu_total: Whole = 0
    host_total: Whole = 0
    power: Number = 0.0
    ranks: list[RankSample] = []
    """These are the figures of each rank; a record of one rank does not have them."""

    def fields(self) -> dict[str, Any]:
        values = super().fields()
        if not self.ranks:
            del values["ranks"]
        return values
