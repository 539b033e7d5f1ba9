"""A step for which the GPU's memory does not last is planned anew with less. So is an evaluation,
which is then repeated.

The first two attempts plan for a fraction of what the failed plan takes, or for what is free now if
that is less. They keep the order of sums if they can: fewer blocks keep their activations or stay
kept in slots, and block inputs go to the host. The third attempt takes the minimum-memory plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.config.settings import AUTO
from engine.errors import GpuMemoryError
from engine.machine.cgroups import sample_host_memory
from engine.planning.fit.buffer_sizes import state_bytes
from engine.planning.fit.choose import CPU_RUNTIME_BYTES, choose
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.job import Job, Target
from engine.runs.record.events import PlannedAnew
from engine.runtime.device.backend import Backend
from engine.text import in_gib
from engine.training.loop.explain import explained, note_memory
from engine.training.loop.failures import forget_frames
from engine.training.loop.planning import Planned, simulated_step, typical_length
from engine.training.loop.prepare import Prepared
from engine.training.loop.session import Session

SHARES = (0.8, 0.5)
"""Fractions of what the failed plan takes, for which the first attempts plan."""
MOST_ATTEMPTS = len(SHARES) + 1
"""Number of times at most that a step, or an evaluation, is planned anew."""
OUT_OF_MEMORY = (torch.OutOfMemoryError, GpuMemoryError)
"""Errors for which the GPU's memory does not last."""
_LOOSE = (
    "train.micro_batch_size",
    "engine.activation_checkpointing",
    "engine.blocks_kept_in_slots",
    "engine.slots",
)
"""Settings that are chosen anew, also where a person has set them."""


@dataclass(frozen=True)
class Moment:
    """Where in a run the GPU's memory did not last."""

    step: int
    """Step under way; 0 in the dry run and before training."""
    during: str = ""
    """As in `PlannedAnew`; empty for a step and for the dry run."""

    @property
    def after(self) -> int:
        """Step that the planes hold at this moment."""
        return self.step if self.during else max(0, self.step - 1)

    def when(self) -> str:
        """Returns a clause for this moment, such as "before the updates of step 7"."""
        if not self.during:
            return f"before the updates of step {self.step:,}" if self.step else "in the dry run"
        when = f"after step {self.step:,}" if self.step else "before training"
        return f"{_DURING[self.during]} {when}"


_DURING = {
    "evaluation": "in the evaluation",
    "reference": "while the answers were compared with these weights",
    "prompts": "while the sample prompts were answered",
    "exact_match": "while validation prompts were answered",
}


class OomRecovery:
    """Plans a prepared run anew with less, at most three times for one moment.

    If that changes the order of sums, `take_rounding` gets the step after which it does so, and the
    new `Chosen.rounding`.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        take_rounding: Callable[[int, Mapping[str, Any]], None],
    ):
        self._session = session
        self._take_rounding = take_rounding
        self._prepared = prepared
        self._moment = Moment(0)
        """Moment that ran out of memory last."""
        self._attempt = 0
        """Number of times that it was planned anew."""

    def repeated(self, moment: Moment, work: Callable[[], None]) -> None:
        """Does `work`, which updates nothing, once every submitted step is applied. If the GPU's
        memory does not last, it is planned with less and repeated. Raises GpuMemoryError if there
        is nothing less, and every other error of `work`.
        """
        while True:
            try:
                work()
                return
            except OUT_OF_MEMORY as error:
                failed = error
            note_memory(failed, self._prepared.planned.breakdown.note)
            # The first error counts, and the lanes have ended if another one follows.
            with contextlib.suppress(Exception):
                self._prepared.drain()
            self.plan(moment, failed)

    def plan(self, moment: Moment, error: Exception) -> None:
        """Makes a plan with less, and its engine, after `error`. No lane may be working. Raises
        GpuMemoryError if there is nothing less.
        """
        prepared, recorder = self._prepared, self._session.recorder
        note_memory(error, prepared.planned.breakdown.note)
        while True:
            before = prepared.planned
            self._attempt = self._attempt + 1 if moment == self._moment else 1
            self._moment = moment
            forget_frames(error)
            prepared.close_engine()
            chosen = None
            if self._attempt <= MOST_ATTEMPTS:
                chosen = plan_with_less_memory(before, prepared.backend, self._attempt)
            if chosen is None:
                raise explained(error, before.chosen.gpu_items, is_least=True) or error
            length = typical_length(self._session.config, prepared.data, chosen)
            simulated = simulated_step(before.job, chosen, before.target, length)
            try:
                built = prepared.build_engine(replace(before, chosen=chosen, simulated=simulated))
                break
            except OUT_OF_MEMORY as again:
                note_memory(again, before.breakdown.note)
                error = again
        old, new = differences(before.chosen, chosen)
        anew = chosen.rounding != before.chosen.rounding
        recorder.emit(PlannedAnew(moment.step, self._attempt, old, new, anew, moment.during))
        self._session.log("warning", recovery_text(moment, before.chosen, chosen))
        recorder.emit(built)
        if simulated is not None:
            recorder.emit(simulated)
        if anew:
            self._take_rounding(moment.after, chosen.rounding)


def plan_with_less_memory(planned: Planned, backend: Backend, attempt: int) -> Chosen | None:
    """Returns choices that take less device memory than those of `planned`, or None if there are
    none.

    `attempt` counts from 1. The buffers of the failed plan must be free already.
    """
    failed, target = planned.chosen, planned.target
    limit = 0
    if attempt <= len(SHARES):
        limit = round(SHARES[attempt - 1] * failed.gpu_bytes)
        if target.device != "cpu":
            # The planes of units that live there are there still, and count as part of the plan.
            sizes = planned.job.shape.states.gpu_resident_bytes_on(planned.job.ranks)
            gpu_resident = sizes[failed.choices.placement.gpu_resident_units]
            limit = min(limit, backend.free_memory() + gpu_resident + CUDA_CONTEXT_BYTES)
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
        each = limit + CPU_RUNTIME_BYTES
        return replace(target, host_free=planned.job.ranks * each + shape.states.host_bytes)
    # The planes are allocated already, and the planner subtracts them.
    host_free = sample_host_memory()[1] + state_bytes(shape, planned.chosen.choices)
    return replace(target, gpu_limit=limit, host_free=host_free)


def _loosened(job: Job, failed: Chosen) -> Job:
    values: dict[str, Any] = dict.fromkeys(_LOOSE, AUTO)
    values["engine.kernels"] = "compiled" if failed.choices.kernels.compiled else "eager"
    return replace(job, config=job.config.with_values(values), rounding={})


def differences(before: Chosen, after: Chosen) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the choices that differ, by name, as they were and as they are."""
    old, new = _values(before), _values(after)
    names = [name for name in old if old[name] != new[name]]
    return {name: old[name] for name in names}, {name: new[name] for name in names}


def _values(chosen: Chosen) -> dict[str, Any]:
    sizes = {"micro_batch_size": chosen.micro_batch_size, "loss_chunk": chosen.loss_chunk}
    values = chosen.choices.to_dict() | sizes | {"device_bytes": chosen.gpu_bytes}
    return values | {"device_updated_units": list(chosen.choices.updates.device_updated_units)}


def recovery_text(moment: Moment, before: Chosen, after: Chosen) -> str:
    """Returns a sentence for the log on what is planned anew."""
    parts = [f"{in_gib(after.gpu_bytes)} instead of {in_gib(before.gpu_bytes)}"]
    if after.micro_batch_size != before.micro_batch_size:
        parts.append(
            f"micro-batches of {after.micro_batch_size} rows, not {before.micro_batch_size}"
        )
    for name, words in _COUNTED.items():
        old, new = before.choices.value(name), after.choices.value(name)
        if old != new:
            parts.append(f"{new} {words}, not {old}")
    if after.choices.kernels.tile_tokens != before.choices.kernels.tile_tokens:
        parts.append(f"blocks in sequence chunks of {after.choices.kernels.tile_tokens:,} tokens")
    if (
        after.choices.activations.offloaded_block_inputs
        and not before.choices.activations.offloaded_block_inputs
    ):
        parts.append("block inputs in RAM")
    sums = "No result changes by that."
    if after.rounding != before.rounding:
        sums = "Sums are rounded in another order from here on."
    lack = f"The GPU ran out of memory {moment.when()}."
    less = f"planned anew with less ({', '.join(parts)})"
    if moment.during:
        return f"{lack} Steps are {less}, this is repeated, and the run goes on. {sums}"
    return f"{lack} The step is {less} and the run goes on. {sums}"


_COUNTED = {
    "rounds": "rounds",
    "blocks_without_recompute": "blocks with activations kept",
    "attention_blocks": "blocks that keep what attention returned",
    "blocks_kept_in_slots": "blocks kept in slots",
    "gpu_resident_units": "units that live on the GPU",
    "disk_offloaded_units": "units with moments on the disk",
    "disk_offloaded_block_inputs": "block inputs on the disk",
    "update_buffers": "update buffers",
}
