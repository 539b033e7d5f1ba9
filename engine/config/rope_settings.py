"""Settings that scale rotary embeddings are checked here, and what they make of a model's length is
computed. No torch is imported.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

from engine.errors import ConfigError

RopeScaling = Literal["none", "linear", "dynamic", "yarn"]
ROPE_SCALING, ROPE_FACTOR = "model.rope_scaling", "model.rope_factor"
USUAL_FACTOR, MOST_FACTOR = 2.0, 1024.0


class Scales(Protocol):
    """Source from which these settings are read."""

    @property
    def rope_scaling(self) -> RopeScaling: ...

    @property
    def rope_factor(self) -> float: ...


def check_rope(model: Scales) -> None:
    """Raises ConfigError for a factor that scales nothing."""
    factor = model.rope_factor
    if not math.isfinite(factor) or not 1 < factor <= MOST_FACTOR:
        raise ConfigError(
            ROPE_FACTOR,
            f"{factor:g} is not above 1 and at most {MOST_FACTOR:g}; give by how much longer rows "
            "may be, such as 4.",
        )


def positions_with(model: Scales, own: int) -> int:
    """Returns how many positions a model has in training that has `own` positions of its own."""
    if model.rope_scaling in ("none", "dynamic"):
        return own
    return int(own * model.rope_factor)


def refuse_longer_rows(model: Scales, length: int, own: int) -> None:
    """Raises ConfigError for rows of `length` tokens, where scaled embeddings are not meant for
    them. own: the positions of the model without them.
    """
    most = positions_with(model, own)
    if length <= most:
        return
    if model.rope_scaling == "dynamic":
        raise ConfigError(
            "data.max_seq_len",
            f"{length:,} is beyond the {own:,} positions of this model, where frequencies that are "
            "scaled by dynamic depend on the rows before, so no step could be repeated; set "
            f"{ROPE_SCALING} to yarn or linear, or this to {own} or less.",
        )
    raise ConfigError(
        "data.max_seq_len",
        f"{length:,} is beyond the {most:,} positions that {ROPE_SCALING} makes of {own:,}; raise "
        f"{ROPE_FACTOR} to {-(-length // own)} or more, or lower this to {most}.",
    )
