"""Settings that fit a person's own data, once they are read: a preset's are those of its own.
All functions are pure.
"""

from __future__ import annotations

import math
from typing import Any

from app.pages.new.run_length import RunLength
from app.verdict.few_rows import FEWEST_ROWS
from engine.config.preference_settings import OBJECTIVE
from engine.config.settings import AUTO, TrainConfig

LEAST_STEPS = 8
"""Number of steps of a pass below which the batch is made smaller."""
MOST_OF_FEW = 5
"""Of few rows, one in so many is kept for validation at most."""
PAIRS = ("preference", "arena")
"""Formats of two answers, of which one is better."""


def fitting(config: TrainConfig, data_format: str, found: RunLength | None) -> dict[str, Any]:
    """Returns the changes that make settings fit the data. data_format: as which the data were
    read. found: the length of the run with the settings as they are, where it is known.
    """
    changes: dict[str, Any] = {}
    if data_format in PAIRS and not config.objective.is_preference:
        changes[OBJECTIVE] = "dpo"
    if found is None:
        return changes
    batch = _batch(config.train.batch_size, found.steps / found.passes if found.passes else 0.0)
    steps = max(1, round(found.steps * config.train.batch_size / batch))
    if batch != config.train.batch_size:
        changes |= {"train.batch_size": batch, "train.micro_batch_size": AUTO}
    if config.train.warmup_steps > steps // 4:
        changes["train.warmup_steps"] = steps // 10
    if config.output.eval_every > steps // 2:
        changes["output.eval_every"] = max(1, steps // 6)
    return changes | _validation_share(found)


def _validation_share(found: RunLength) -> dict[str, Any]:
    """Returns the share that keeps enough of few rows to judge by; empty if enough are kept."""
    rows = found.rows + found.validation
    wanted = min(FEWEST_ROWS, rows // MOST_OF_FEW)
    if not 0 < found.validation < wanted:
        return {}
    return {"data.eval_fraction": math.ceil(100 * wanted / rows) / 100}


def _batch(rows: int, steps_of_a_pass: float) -> int:
    """Returns the largest batch, of `rows` halved, with which a pass has `LEAST_STEPS`."""
    while rows > 1 and steps_of_a_pass < LEAST_STEPS:
        rows, steps_of_a_pass = rows // 2, steps_of_a_pass * 2
    return rows
