"""The parts of a step's time have these colours."""

from __future__ import annotations

from app.shared.charts.drawing import AMBER, BLUE, GREEN, GREY, OLIVE, ORANGE, PINK, TEAL
from app.verdict.step_shares import PART_WORDS

_COLOURS = {
    "compute": GREEN,
    "data": TEAL,
    "h2d": BLUE,
    "d2h": ORANGE,
    "optimizer": PINK,
    "disk": AMBER,
    "exchange": OLIVE,
    "other": GREY,
}
PARTS = {name: (words, _COLOURS[name]) for name, words in PART_WORDS.items()}
"""Each part has its words and a colour, which is the same as in the timeline."""
