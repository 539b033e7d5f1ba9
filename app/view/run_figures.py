"""The curves of a run by the name of their place on the page, and what each says in words. Pure
functions of a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.view.axes import Axis
from app.view.drawing import Figure
from app.view.learning_figures import loss_figure, norms_figure, optimizer_figure
from app.view.machine_figures import (
    memory_figure,
    power_figure,
    step_time_figure,
    throughput_figure,
)
from app.view.memory_words import growth_words, memory_kinds
from app.view.step_time import PARTS, recent_shares
from app.words import GIB, in_digits, in_share, in_step_time
from engine.runs.snapshot import RunSnapshot

FIGURES: dict[str, Callable[[RunSnapshot, Axis], Figure]] = {
    "loss": loss_figure,
    "throughput": throughput_figure,
    "optimizer": optimizer_figure,
    "memory": memory_figure,
    "step_time": step_time_figure,
    "power": power_figure,
    "norms": norms_figure,
}
"""Figures on the linked axis."""


def summaries(snapshot: RunSnapshot) -> dict[str, str]:
    """One sentence a figure, for those who cannot or will not read the curve."""
    steps, memory, said = snapshot.steps, snapshot.memory, {}
    if len(steps):
        said["loss"] = _loss_words(snapshot)
        norm = steps.grad_norm
        said["optimizer"] = (
            f"rate {in_digits(steps.learning_rate[-1])} at step {steps.step[-1]:,}; norm "
            f"{norm[-1]:.2g}, {np.min(norm):.2g} to {np.max(norm):.2g} so far"
        )
        said["throughput"] = _throughput_words(snapshot)
        said["step_time"] = _step_time_words(snapshot)
    if len(memory):
        said["memory"] = _memory_words(snapshot)
    if len(memory) and any(memory.power):
        said["power"] = (
            f"{float(np.median(memory.power)):,.0f} W in the median sample, "
            f"{in_digits(memory.energy[-1])} Wh so far; the card alone"
        )
    if len(snapshot.norms):
        said["norms"] = _norms_words(snapshot)
    return said


def alarms(snapshot: RunSnapshot) -> set[str]:
    """Names of the figures that show something to look at."""
    return {"memory"} if any(kind.growth.is_growing for kind in memory_kinds(snapshot)) else set()


def _loss_words(snapshot: RunSnapshot) -> str:
    steps, evals = snapshot.steps, snapshot.evals
    told = (
        f"{steps.loss[0]:.3g} at step {steps.step[0]:,}, {steps.loss[-1]:.3g} at step "
        f"{steps.step[-1]:,}"
    )
    return told + (
        f"; held out {evals.loss[-1]:.3g} at step {evals.step[-1]:,}" if len(evals) else ""
    )


def _memory_words(snapshot: RunSnapshot) -> str:
    return "; ".join(
        f"{kind.name} {kind.most / GIB:.2f} GiB at most{growth_words(kind.growth)}"
        for kind in memory_kinds(snapshot)
    )


def _throughput_words(snapshot: RunSnapshot) -> str:
    """What was measured, beside what the plan's simulation had predicted and what the machine can
    do, where that is known.
    """
    steps = snapshot.steps
    told = f"{float(np.median(steps.tokens_per_second)):,.0f} tokens/s in the median step"
    predicted = snapshot.plan_choices.get("predicted_seconds")
    if predicted:
        seconds = float(np.median(steps.seconds))
        told += f"; a step takes {in_step_time(seconds)}, {in_step_time(predicted)} were predicted"
    if snapshot.ceiling_tflops:
        tflops, ceiling = float(np.median(steps.tflops)), snapshot.ceiling_tflops
        told += (
            f"; {in_digits(tflops)} TFLOPS, {in_share(tflops / ceiling)} of the "
            f"{in_digits(ceiling)} that large matrix products reach here"
        )
    return told


def _step_time_words(snapshot: RunSnapshot) -> str:
    """Shares of the latest steps, those that can be seen."""
    shares = recent_shares(snapshot)
    told = [
        f"{PARTS[name][0]} {in_share(share)}" for name, share in shares.items() if share >= 0.005
    ]
    return f"of the latest steps: {', '.join(told)}" if told else ""


def _norms_words(snapshot: RunSnapshot) -> str:
    norms = snapshot.norms
    latest = {unit: values[-1] for unit, values in norms.norms.items() if values[-1] > 0}
    if not latest:
        return f"step {norms.step[-1]:,}: no unit has a gradient"

    def said(unit: int) -> str:
        name = snapshot.units[unit] if unit < len(snapshot.units) else f"unit {unit}"
        return f"{name} ({in_digits(latest[unit])})"

    most, least = max(latest, key=latest.__getitem__), min(latest, key=latest.__getitem__)
    return f"step {norms.step[-1]:,}: largest in {said(most)}, smallest in {said(least)}"
