"""The learning rate of each optimizer step follows the curves of transformers'
``get_*_schedule_with_warmup``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.config.settings import OptimConfig


def fitting_warm_up(config: OptimConfig, total_steps: int) -> tuple[OptimConfig, str]:
    """Returns the settings with a warm-up of at most half of the steps, and a warning if the
    warm-up had to be shortened, else "".

    The first step of a warm-up has a learning rate of 0, so a short run would otherwise learn
    nothing.
    """
    most = total_steps // 2
    if config.warmup_steps <= most:
        return config, ""
    warning = (
        f"train.warmup_steps {config.warmup_steps} is more than half of the {total_steps} steps, "
        f"so {most} are used."
    )
    return replace(config, warmup_steps=most), warning


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step `step` (counted from 1) in a run of
    `total_steps`.

    As in the Trainer of transformers, the scheduler advances after the optimizer, so the first step
    of a warm-up has a rate of 0.
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
