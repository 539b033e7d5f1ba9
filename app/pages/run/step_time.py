"""Labels and colors of the parts of a step's time."""

from __future__ import annotations

from app.shared.charts.drawing import AMBER, BLUE, GRAY, GREEN, OLIVE, ORANGE, PINK, TEAL
from app.verdict.step_shares import PART_LABELS

_COLORS = {
    "compute": GREEN,
    "data": TEAL,
    "h2d": BLUE,
    "d2h": ORANGE,
    "optimizer": PINK,
    "disk": AMBER,
    "exchange": OLIVE,
    "other": GRAY,
}
PARTS = {name: (words, _COLORS[name]) for name, words in PART_LABELS.items()}
"""Label and color of each part; the color is that of the timeline."""
