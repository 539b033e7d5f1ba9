"""Fields of events may have the types that are defined in this module.

A reader checks each line of a record against them.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

LARGEST_WHOLE = 1 << 53
"""JavaScript represents integers exactly up to this limit, and sums of many of them fit into 64
bits.
"""
LARGEST = sys.float_info.max
"""A float in a record must not exceed this limit, so it is finite."""

Whole = Annotated[int, Meta(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
# The bounds of a float reject NaN and the infinities, which Python's JSON parser accepts.
Number = (
    Annotated[int, Meta(ge=-1 << 63, le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
)
"""An integer stays an integer, so that a line does not change when it is read and written again."""


_LONGEST = 10**11
Moment = (
    Annotated[int, Meta(ge=-_LONGEST, le=_LONGEST)]
    | Annotated[float, Meta(ge=-_LONGEST, le=_LONGEST)]
)
"""Seconds from the first op of a step; a drawing multiplies them."""

BestBy = Literal["loss", "exact_match"]
"""The weights of a run are compared by this: by their held-out loss, or by the share of held-out
prompts that they answer exactly.
"""


class Span(TypedDict):
    """One op of a step ran from `start` to `end`, in seconds from the step's first op."""

    unit: str
    op: str
    lane: str
    micro_batch: NotRequired[Whole | None]
    start: Moment
    end: Moment
    rank: NotRequired[Whole]
    """The op ran on this rank; it is left out for rank 0, which single GPUs are."""


class Wait(TypedDict):
    """The COMPUTE lane waited from `start` to `end`, for h2d, d2h, optimizer, disk, exchange (with
    other ranks) or other.
    """

    start: Moment
    end: Moment
    cause: NotRequired[str]
    rank: NotRequired[Whole]
    """It was the lane of this rank; it is left out for rank 0."""


class Answer(TypedDict):
    """An `Answer` is a run's answer to one of the fixed prompts."""

    prompt: str
    answer: str


class Comparison(TypedDict, total=False):
    """A `Comparison` holds the predicted and the measured value of one figure; an unknown value is
    None.

    `error` is measured / predicted - 1.
    """

    predicted: Number | None
    measured: Number | None
    error: Number | None
