"""A run trains the whole model, or the parts of it that its settings name.

No torch is imported. `engine.planning.layout.freezing` finds the parameters of a model that are
meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

NAMES, BLOCKS = "train.part_names", "train.last_blocks"


@dataclass(frozen=True)
class Parts:
    """Names the parameters that are trained. All others are frozen."""

    names: tuple[str, ...] = ()
    """Patterns that their names fit, as names of files fit those of a shell."""
    last_blocks: int = 0
    """Number of blocks, counted from the last, that they are in."""


def check_parts(method: str, names: tuple[str, ...], last_blocks: int) -> None:
    """Raises ConfigError where settings ask for the training of parts and name none."""
    if any(not name.strip() for name in names):
        raise ConfigError(NAMES, "a pattern is empty; leave it out, or give * for all parameters.")
    if method == "parts" and not (names or last_blocks):
        raise ConfigError(
            "train.method",
            f"no parts are named; give {NAMES} or {BLOCKS}, or set train.method to full.",
        )
