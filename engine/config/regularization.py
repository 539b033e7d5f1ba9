"""Changes of training steps so that the model learns its rows less by heart.

No torch is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True)
class Regularization:
    """Acts on training steps. Evaluations and samples are computed without."""

    label_smoothing: float = 0.0
    """Fraction of a target's probability that is spread evenly over the vocabulary."""
    neftune_alpha: float = 0.0
    """Strength of the noise on the embeddings; 0 adds none."""

    def check(self) -> None:
        """Raises ConfigError where a value is out of its range."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                "train.label_smoothing",
                f"{self.label_smoothing} is outside 0 to 1 (1 excluded); 0.1 is usual, and 0 "
                "smooths nothing.",
            )
        if not 0 <= self.neftune_alpha < math.inf:
            raise ConfigError(
                "train.neftune_alpha",
                f"{self.neftune_alpha} is not a number from 0 up; 5 is usual, and 0 adds no noise.",
            )


NO_REGULARIZATION = Regularization()
