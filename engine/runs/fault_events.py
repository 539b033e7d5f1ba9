"""These events record a fault that a run has got over by itself."""

from __future__ import annotations

from typing import Any

from engine.runs.event_base import Event
from engine.runs.field_types import Whole


class StepSkipped(Event, frozen=True):
    """Step `step` is over without an update, since its loss or its gradient norm was not finite.

    The weights and the moments are those of the step before it.
    """

    step: Whole = 0
    what: str = ""
    """This number was not finite: the loss or the gradient norm."""
    rows: list[Whole] = []
    """The step read these training rows. They are counted from 0 in the order of the data."""


class PlannedAnew(Event, frozen=True):
    """The GPU ran out of memory before the updates of `step`, so the step was planned with less.

    It may also run out in an evaluation, which is then repeated. The new plan follows as a
    `PlanBuilt`.
    """

    step: Whole = 0
    """The step is 0 if the dry run ran out of memory."""
    attempt: Whole = 0
    """This is how often the step, or what `during` names, ran out of memory."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    """`before` and `after` hold the choices that differ, by name."""
    changes_rounding: bool = False
    """The order of sums differs from here on, or where an optimizer runs."""
    during: str = ""
    """It is empty for a step. After `step`, or before training if that is 0, it is `evaluation`,
    `prompts` (the sample prompts) or `exact_match` (the held-out prompts).
    """
