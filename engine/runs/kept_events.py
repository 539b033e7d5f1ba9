"""These events record which weights of a run are kept beside its checkpoints."""

from __future__ import annotations

from engine.runs.event_base import Event
from engine.runs.field_types import Number, Whole


class BestKept(Event, frozen=True):
    """The weights after `step` are on the disk, in `path` within the run folder, since no other
    weights that are kept there were better in an evaluation.

    They take the place of those that were kept before (`output.keep_best`).
    """

    step: Whole = 0
    loss: Number = 0.0
    """The held-out rows had this loss after `step`."""
    path: str = ""
    bytes: Whole = 0
    seconds: Number = 0.0
    """They were whole this long after their writing began."""
    waited_seconds: Number = 0.0
    """Training waited at most this long for them, as with a checkpoint."""
    copied_bytes: Whole = 0
    """So much was copied in RAM first, so that updates could go on."""
    correct: Whole = 0
    total: Whole = 0
    """So many of `total` held-out prompts were answered exactly, where the run chooses by that; if
    not, both are 0.
    """
