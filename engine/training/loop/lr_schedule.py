"""The learning rate of each optimizer step, on the curves of transformers'
``get_*_schedule_with_warmup``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.config.settings import OptimConfig

DECAYING = 0.1
"""Default share of the steps in which the rate falls with the schedule `warmup_stable_decay`, as in
MiniCPM (arXiv 2404.06395).
"""


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
    of a warm-up has a rate of 0, and the last step a little more than the least rate.
    """
    before = step - 1
    peak, least = config.learning_rate, config.min_learning_rate
    if before < config.warmup_steps:
        share = before / config.warmup_steps
        # Only this one of transformers' schedules begins at the least rate.
        bottom = least if config.schedule == "warmup_stable_decay" else 0.0
        return bottom + (peak - bottom) * share
    left = _share_left(config, before, total_steps)
    return least + (peak - least) * max(0.0, left)


def _share_left(config: OptimConfig, before: int, total_steps: int) -> float:
    """Returns the share of the way from the least rate to the peak that is left after `before`
    steps.
    """
    steady = config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "warmup_stable_decay":
        steady = max(steady, total_steps - _decay_steps(config, total_steps))
        if before < steady:
            return 1.0
    decay_steps = max(1, total_steps - steady)
    if config.schedule == "linear":
        return (total_steps - before) / decay_steps
    return 0.5 * (1.0 + math.cos(math.pi * (before - steady) / decay_steps))


def _decay_steps(config: OptimConfig, total_steps: int) -> int:
    """Returns the number of steps at the end in which the rate falls."""
    if config.decay_steps is not None:
        return config.decay_steps
    return max(1, round(DECAYING * total_steps))
