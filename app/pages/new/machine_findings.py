"""What was found on this machine that concerns a draft: what a person should confirm before a
start, and what makes it slower. All functions are pure.
"""

from __future__ import annotations

from typing import Any

from app.form.settings_form import shown_changes
from engine.config.settings import TrainConfig
from engine.machine.findings import Check, Effect, without_gpu
from engine.machine.read_machine import Machine

DEVICE = "engine.device"
DTYPE = "model.dtype"
ON_A_GPU = (Check.LOCKED, Check.KERNELS)
"""What slows runs on a GPU alone."""


def to_confirm(config: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Returns the question whether a run shall take the CPU though there is a GPU, with the button
    that says so; empty where there is nothing to ask.
    """
    found = without_gpu(machine.findings)
    if found is None or config.engine.device == "cpu":
        return {}
    changes = shown_changes({DEVICE: "cpu"})
    return {found.sentence: {"label": "Train on the CPU", "changes": changes}}


def slower_by(config: TrainConfig, machine: Machine) -> dict[str, Any]:
    """Returns sentences on what makes a run slower here, each with its button, or None."""
    on_gpu = bool(machine.gpus) and config.engine.device != "cpu"
    remarks: dict[str, Any] = {}
    for found in machine.findings:
        if found.effect != Effect.SLOWS:
            continue
        if found.check == Check.BF16 and on_gpu and config.model.dtype == "bfloat16":
            changes = shown_changes({DTYPE: "float32"})
            remarks[found.sentence] = {"label": "Compute in float32", "changes": changes}
        elif found.check == Check.CACHES or (found.check in ON_A_GPU and on_gpu):
            remarks[found.sentence] = None
    return remarks
