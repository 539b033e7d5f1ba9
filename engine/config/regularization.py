"""Changes of training steps so that the model learns its rows less by heart.

No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Regularization:
    """Acts on training steps. Evaluations and samples are computed without."""

    label_smoothing: float = 0.0
    """Fraction of a target's probability that is spread evenly over the vocabulary."""
    neftune_alpha: float = 0.0
    """Strength of the noise on the embeddings; 0 adds none."""


NO_REGULARIZATION = Regularization()
