"""A step for which the GPU's memory does not last is planned anew with less.

The first two attempts plan for a share of what the failed plan takes, or for what is free now if
that is less. They keep the order of sums if they can: fewer blocks keep their activations or stay
resident, and boundaries go to the host. The third attempt takes the leanest plan there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.config.settings import AUTO
from engine.fit.choose import CPU_RUNTIME_BYTES, Chosen, choose
from engine.fit.job import Job, Target
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.machine.cgroups import sample_host_memory
from engine.runtime.backend import Backend
from engine.train.planning import Planned
from engine.words import in_gib

SHARES = (0.8, 0.5)
"""The first attempts plan for these shares of what the failed plan takes."""
MOST_ATTEMPTS = len(SHARES) + 1
"""A step is planned anew at most this many times."""
_LOOSE = ("train.micro_batch_size", "engine.save_level", "engine.residency", "engine.slots")
"""These settings are chosen anew, also where a person has set them."""


def plan_with_less(planned: Planned, backend: Backend, attempt: int) -> Chosen | None:
    """Returns choices that take less device memory than those of `planned`, or None if there are
    none.

    `attempt` counts from 1. The buffers of the failed plan must be free already.
    """
    failed, target = planned.chosen, planned.target
    limit = 0
    if attempt <= len(SHARES):
        limit = round(SHARES[attempt - 1] * failed.gpu_bytes)
        if target.device != "cpu":
            limit = min(limit, backend.free_memory() + CUDA_CONTEXT_BYTES)
    lowered = _lowered(planned, limit)
    if limit:
        same_sums = choose(replace(planned.job, rounding=failed.rounding), lowered)
        if same_sums.gpu_bytes <= limit:
            return same_sums
    found = choose(_loosened(planned.job, failed), lowered)
    return found if found.gpu_bytes < failed.gpu_bytes else None


def _lowered(planned: Planned, limit: int) -> Target:
    """Returns the target with `limit` bytes for everything that the plan has on the device."""
    target, shape = planned.target, planned.job.shape
    if target.device == "cpu":
        return replace(target, host_free=limit + shape.host_bytes + CPU_RUNTIME_BYTES)
    # The planes are allocated already, and the planner subtracts them.
    host_free = sample_host_memory()[1] + shape.host_bytes
    return replace(target, gpu_limit=limit, host_free=host_free)


def _loosened(job: Job, failed: Chosen) -> Job:
    values: dict[str, Any] = dict.fromkeys(_LOOSE, AUTO)
    values["engine.kernels"] = "compiled" if failed.choices.compiled else "eager"
    return replace(job, config=job.config.with_values(values), rounding={})


def differences(before: Chosen, after: Chosen) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the choices that differ, by name, as they were and as they are."""
    old, new = _values(before), _values(after)
    names = [name for name in old if old[name] != new[name]]
    return {name: old[name] for name in names}, {name: new[name] for name in names}


def _values(chosen: Chosen) -> dict[str, Any]:
    sizes = {"micro_batch_size": chosen.micro_batch_size, "loss_chunk": chosen.loss_chunk}
    values = chosen.choices.to_dict() | sizes | {"device_bytes": chosen.gpu_bytes}
    return values | {"device_homes": list(chosen.choices.device_homes)}


def replanned_in_words(step: int, before: Chosen, after: Chosen) -> str:
    """Returns a sentence for the log about a step that is planned anew."""
    where = f"before the updates of step {step:,}" if step else "in the dry run"
    parts = [f"{in_gib(after.gpu_bytes)} instead of {in_gib(before.gpu_bytes)}"]
    if after.micro_batch_size != before.micro_batch_size:
        parts.append(
            f"micro-batches of {after.micro_batch_size} rows, not {before.micro_batch_size}"
        )
    for name, words in _COUNTED.items():
        old, new = getattr(before.choices, name), getattr(after.choices, name)
        if old != new:
            parts.append(f"{new} {words}, not {old}")
    if after.choices.host_boundaries and not before.choices.host_boundaries:
        parts.append("boundaries on the host")
    sums = "No result changes by that."
    if after.rounding != before.rounding:
        sums = "Sums are rounded in another order from here on."
    return (
        f"The GPU ran out of memory {where}. The step is planned anew with less "
        f"({', '.join(parts)}) and the run goes on. {sums}"
    )


_COUNTED = {
    "rounds": "rounds",
    "kept_blocks": "blocks with activations kept",
    "resident_blocks": "blocks resident",
    "update_buffers": "update buffers",
}
