"""The rows of a step, divided among GPUs. No torch is imported."""

from __future__ import annotations

from typing import Literal

from engine.errors import ConfigError

Whole = int | Literal["auto"]
ONE_GPU = "engine.gpus to 1 (under torchrun, start one process)"
"""A person sets this so that one GPU computes. torchrun sets engine.gpus itself."""


def check_shares(gpus: Whole, rows: int, size: Whole, disk: str | None) -> None:
    """Raises ConfigError where a step of `rows`, in micro-batches of `size`, cannot be divided
    among GPUs as the settings ask. `disk` is `engine.disk`.
    """
    if gpus == "auto" or gpus == 1:
        return
    if rows % gpus:
        raise ConfigError(
            "engine.gpus",
            f"{gpus} does not divide train.batch_size {rows}, so GPUs would get unequal shares "
            f"of a step; choose a divisor, or a multiple of {gpus} for train.batch_size.",
        )
    if size != "auto" and rows // gpus % size:
        raise ConfigError(
            "train.micro_batch_size",
            f"{size} does not divide the {rows // gpus} rows that each of {gpus} GPUs gets "
            f"(train.batch_size / engine.gpus); choose a divisor of {rows // gpus}.",
        )
    if disk is not None:
        raise ConfigError(
            "engine.disk",
            f"nothing can be on the disk where {gpus} GPUs compute; set engine.disk to "
            f"null, or {ONE_GPU}.",
        )
