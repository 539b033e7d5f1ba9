"""The fields of events may hold values of these types.

A reader checks each line of a record against them.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

LARGEST_WHOLE = 1 << 53
"""JavaScript still holds such a number exactly, and sums of many of them fit into 64 bits."""
LARGEST = sys.float_info.max
"""A float of a record is at most this, so it is finite."""

Whole = Annotated[int, Meta(ge=-LARGEST_WHOLE, le=LARGEST_WHOLE)]
# The bounds of a float refuse NaN and the infinities, which Python's JSON parser accepts.
Number = (
    Annotated[int, Meta(ge=-1 << 63, le=(1 << 63) - 1)]
    | Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
)
"""A whole number stays one, so that a line that is written again reads as before."""


class Span(TypedDict):
    """One op of a step ran from `start` to `end`, in seconds from the step's first op."""

    unit: str
    op: str
    lane: str
    micro_batch: NotRequired[Any]
    start: Number
    end: Number


class Wait(TypedDict):
    """The COMPUTE lane waited from `start` to `end`, for h2d, d2h, optimizer or other."""

    start: Number
    end: Number
    cause: NotRequired[str]


class Answer(TypedDict):
    """A run answered one of the fixed prompts."""

    prompt: str
    answer: str


class Comparison(TypedDict, total=False):
    """One figure of a run was predicted and measured; a value is None where it is not known.

    `error` is measured / predicted - 1.
    """

    predicted: Number | None
    measured: Number | None
    error: Number | None
