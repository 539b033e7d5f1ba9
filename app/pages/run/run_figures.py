"""The figures of a run by name, which is also that of their place on the page, with a sentence for
each. All functions are pure and take a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from app.labels import (
    in_bytes,
    in_count,
    in_digits,
    in_energy,
    in_flops,
    in_loss,
    in_share,
    in_step_time,
    in_time,
)
from app.pages.run.learning_figures import (
    accuracy_figure,
    loss_figure,
    norms_figure,
    optimizer_figure,
)
from app.pages.run.machine_figures import (
    memory_figure,
    power_figure,
    step_time_figure,
    tflops_figure,
    throughput_figure,
)
from app.pages.run.memory_line import (
    flat_text,
    memory_line_figure,
    memory_text,
    predicted_text,
)
from app.pages.run.preference_figure import preference_figure, preference_summary
from app.pages.run.step_time import PARTS
from app.shared.charts.axes import Axis
from app.shared.charts.drawing import Figure
from app.verdict.memory_kinds import growth_text, memory_kinds
from app.verdict.memory_rules import in_danger
from app.verdict.speed import slow_text
from app.verdict.step_shares import recent_shares
from engine.runs.record.snapshot import RECENT_STEPS, RunSnapshot

FIGURES: dict[str, Callable[[RunSnapshot, Axis], Figure]] = {
    "loss": loss_figure,
    "preference": preference_figure,
    "accuracy": accuracy_figure,
    "tflops": tflops_figure,
    "throughput": throughput_figure,
    "optimizer": optimizer_figure,
    "memory": memory_figure,
    "memory_line": memory_line_figure,
    "step_time": step_time_figure,
    "power": power_figure,
    "norms": norms_figure,
}
"""Figures that are drawn on the shared x axis."""
SHARE_SEEN = 0.005
"""Least share of a step's time at which a part of the step is mentioned."""


def summaries(snapshot: RunSnapshot) -> dict[str, str]:
    """Returns a sentence for each figure, for people who cannot or do not want to read it."""
    texts = {}
    if len(snapshot.steps):
        texts["loss"] = _loss_text(snapshot)
        texts["optimizer"] = _optimizer_text(snapshot)
        texts["tflops"] = _tflops_text(snapshot)
        texts["throughput"] = _throughput_text(snapshot)
        texts["step_time"] = _step_time_text(snapshot)
    elif seconds := snapshot.plan_choices.get("predicted_seconds"):
        whole = in_time(seconds * snapshot.total_steps)
        texts["tflops"] = f"predicted: {in_step_time(seconds)} a step, {whole} in all"
    asked = [match for match in snapshot.exact_matches if match.total]
    if asked:
        texts["accuracy"] = "; ".join(
            f"{match.correct} of {match.total} {_moment(match.step)}" for match in asked[-2:]
        )
    pairs = preference_summary(snapshot)
    if pairs:
        texts["preference"] = pairs
    memory = snapshot.memory
    if len(memory):
        texts["memory"] = _memory_text(snapshot)
        texts["memory_line"] = memory_text(snapshot)
    elif said := predicted_text(snapshot):
        texts["memory_line"] = said
    if len(memory) and any(memory.power):
        cards = f"{len(snapshot.ranks)} GPUs" if snapshot.ranks else "GPU"
        texts["power"] = (
            f"{float(np.median(memory.power)):,.0f} W · {in_energy(memory.energy[-1])} so far, "
            f"{cards} alone"
        )
    if len(snapshot.norms):
        texts["norms"] = _norms_text(snapshot)
    return texts


def _moment(step: int) -> str:
    return f"at step {step:,}" if step else "before training"


def alarms(snapshot: RunSnapshot) -> set[str]:
    """Returns the names of the figures that show a problem."""
    memory = {"memory"} if in_danger(snapshot) else set()
    speed = {"tflops"} if slow_text(snapshot) else set()
    return memory | speed


def _loss_text(snapshot: RunSnapshot) -> str:
    steps, evals = snapshot.steps, snapshot.evals
    text = f"Latest: training {in_loss(steps.loss[-1])} {_moment(steps.step[-1])}"
    if len(evals):
        text += f", validation {in_loss(evals.loss[-1])} {_moment(evals.step[-1])}"
    return text


def _optimizer_text(snapshot: RunSnapshot) -> str:
    steps = snapshot.steps
    norm = steps.grad_norm
    return (
        f"Latest: rate {_short(steps.learning_rate[-1])}, norm {_short(norm[-1])} "
        f"({_short(np.min(norm))} to {_short(np.max(norm))} so far)"
    )


def _short(value: float) -> str:
    """Returns a number with three digits."""
    return in_digits(float(f"{value:.3g}"))


def _memory_text(snapshot: RunSnapshot) -> str:
    texts = []
    for kind in memory_kinds(snapshot):
        label = "RAM" if kind.name == "host" else kind.name
        texts.append(f"{label} {in_bytes(kind.most)}{growth_text(kind.growth)}")
    return " · ".join(texts)


def _throughput_text(snapshot: RunSnapshot) -> str:
    """Returns the measured values, together with the prediction of the plan's simulation and the
    limit of the machine, where these are known.
    """
    steps = snapshot.steps
    text = f"Median of the run: {float(np.median(steps.tokens_per_second)):,.0f} tokens/s"
    predicted = snapshot.plan_choices.get("predicted_seconds")
    if predicted:
        seconds = float(np.median(steps.seconds))
        text += f" · {in_step_time(seconds)} a step, predicted {in_step_time(predicted)}"
    if snapshot.peak_tflops:
        tflops = float(np.median(steps.tflops))
        ceiling = snapshot.peak_tflops
        share = in_share(tflops / ceiling)
        text += f" · {_of_ceiling(tflops, ceiling)}, {share} of the top speed"
    return text


def _of_ceiling(tflops: float, ceiling: float) -> str:
    """Returns both rates, as in 1.25 of 2.00 TFLOPS; the unit is written once."""
    value, unit = in_flops(tflops).split()
    most, of = in_flops(ceiling).split()
    return f"{value} of {most} {of}" if unit == of else f"{value} {unit} of {most} {of}"


def _tflops_text(snapshot: RunSnapshot) -> str:
    if slow := slow_text(snapshot):
        return slow.rstrip(".")
    steps = snapshot.steps
    rate = in_count(float(np.median(steps.tokens_per_second[-RECENT_STEPS:])))
    seconds = in_step_time(float(np.median(steps.seconds[-RECENT_STEPS:])))
    return f"{_peak_text(snapshot)} · {rate} tokens/s · {seconds} a step, latest steps"


def _peak_text(snapshot: RunSnapshot) -> str:
    """Returns the share of the device's measured peak, or TFLOPS where none was measured."""
    tflops = float(np.median(snapshot.steps.tflops[-RECENT_STEPS:]))
    if not snapshot.peak_tflops:
        return in_flops(tflops)
    return f"{in_share(tflops / snapshot.peak_tflops)} of this machine’s top speed"


def machine_text(snapshot: RunSnapshot) -> str:
    """Returns one line on the steps, the memory and the speed of a run."""
    if not len(snapshot.steps):
        return ""
    seconds = in_step_time(float(np.median(snapshot.steps.seconds[-RECENT_STEPS:])))
    texts = [f"{seconds} a step, latest steps", flat_text(snapshot), _peak_text(snapshot)]
    return " · ".join(filter(None, texts))


def _step_time_text(snapshot: RunSnapshot) -> str:
    """Returns the parts of the latest steps whose shares are large enough to be seen."""
    parts = []
    for name, share in recent_shares(snapshot).items():
        if share >= SHARE_SEEN:
            parts.append(f"{PARTS[name][0]} {in_share(share)}")
    return f"Latest steps: {' · '.join(parts)}" if parts else ""


def _norms_text(snapshot: RunSnapshot) -> str:
    norms = snapshot.norms
    latest = {unit: values[-1] for unit, values in norms.norms.items() if values[-1] > 0}
    if not latest:
        return f"step {norms.step[-1]:,}: no unit has a gradient"

    def unit_text(unit: int) -> str:
        name = snapshot.units[unit] if unit < len(snapshot.units) else f"unit {unit}"
        return f"{name} ({in_digits(latest[unit])})"

    most = max(latest, key=latest.__getitem__)
    least = min(latest, key=latest.__getitem__)
    return f"step {norms.step[-1]:,}: largest in {unit_text(most)}, smallest in {unit_text(least)}"
