"""Learning rate of each optimizer step: the curves of transformers' ``get_*_schedule_with_warmup``."""

from __future__ import annotations

import math

from engine.config.settings import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate that optimizer step `step` (from 1) of `total_steps` uses, as in a transformers
    Trainer: the scheduler moves after the optimizer, so the first step with warm-up has rate 0.
    """
    before = step - 1
    if before < config.warmup_steps:
        return config.learning_rate * (before / config.warmup_steps)
    if config.schedule == "constant":
        return config.learning_rate
    decay_steps = max(1, total_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.learning_rate * max(0.0, (total_steps - before) / decay_steps)
    progress = (before - config.warmup_steps) / decay_steps
    return config.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
