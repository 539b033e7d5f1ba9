"""The numbers and texts of a run: the latest numbers, and the details apart from its curves. All
functions are pure and need neither Plotly nor Gradio.
"""

from __future__ import annotations

from typing import Any

from app.labels import in_bytes, in_count, in_digits, in_energy, in_flops, in_share, in_step_time
from app.pages.run.places import places
from app.pages.run.ranks import fullest_gpu
from app.shared.run_bar import recent_median
from engine.planning.fit.predictions import QUANTITIES
from engine.runs.record.events import Comparison
from engine.runs.record.snapshot import RunSnapshot
from engine.text import counted

EXCESS_SHOWN = 0.05
"""Share by which a measured value must exceed its prediction to be marked."""
SAMPLES_READ = 20
"""Number of latest samples of which one must have a value for power to be shown."""
UNITS_NAMED = 4
"""Largest number of units in a list that names them; a longer one is shown as their number."""
MOMENT_LABELS = {
    "dry_run": "Measured in a dry run of one step, before the first.",
    "running": "Measured in the first steps; again when the run ends.",
    "end": "Measured over the whole session.",
}


# ------------------------------------------------------------------ the latest numbers


def tiles(snapshot: RunSnapshot) -> list[dict[str, str]]:
    """Returns the latest numbers of the machine, each with its label, value, and a note."""
    shown = [*_speed_tiles(snapshot), _host_tile(snapshot)]
    memory = snapshot.memory
    if len(memory) and memory.gpu_total[-1]:
        shown.append(_gpu_tile(snapshot))
    if any(memory.power[-SAMPLES_READ:]):
        energy = f"{in_energy(memory.energy[-1])} so far"
        shown.append(_tile("Power", f"{memory.power[-1]:,.0f} W", energy))
    return shown


def _speed_tiles(snapshot: RunSnapshot) -> list[dict[str, str]]:
    steps = snapshot.steps
    tokens = flops = "–"
    step_note = ""
    if len(steps):
        tokens = f"{in_count(recent_median(steps.tokens_per_second))} tokens/s"
        flops = in_flops(recent_median(steps.tflops))
        step_note = f"{in_step_time(recent_median(steps.seconds))} a step"
    return [
        _tile("Speed, latest steps", tokens, step_note),
        _tile("Compute, latest steps", flops, _ceiling_note(snapshot)),
    ]


def _gpu_tile(snapshot: RunSnapshot) -> dict[str, str]:
    memory = snapshot.memory
    used, total = memory.gpu_peak[-1] or memory.gpu_allocated[-1], memory.gpu_total[-1]
    fullest = fullest_gpu(snapshot)
    if fullest is None:
        return _tile("GPU memory", in_bytes(used), f"peak, of {in_bytes(total)}")
    note = f"peak of rank {fullest['rank']}, the fullest; of {in_bytes(fullest['gpu_total'])}"
    return _tile("GPU memory", in_bytes(fullest["gpu_peak"]), note)


def _host_tile(snapshot: RunSnapshot) -> dict[str, str]:
    memory = snapshot.memory
    if not len(memory):
        return _tile("RAM", "–", "")
    pinned = memory.host_pinned[-1]
    notes = [f"{in_bytes(pinned)} pinned"] if pinned else []
    if snapshot.ranks:
        notes.append(f"{len(snapshot.ranks)} processes")
    note = ", ".join(notes)
    return _tile("RAM", in_bytes(memory.host_rss[-1]), note)


def _ceiling_note(snapshot: RunSnapshot) -> str:
    if not len(snapshot.steps):
        return "useful work"
    tflops = recent_median(snapshot.steps.tflops)
    each = ""
    if snapshot.device == "cuda" and snapshot.rank_count > 1:
        each = f"{in_flops(tflops / snapshot.rank_count)} a GPU"
    if not snapshot.peak_tflops:
        return each or "useful work"
    share = f"{in_share(tflops / snapshot.peak_tflops)} of "
    return f"{each}, {share}its top speed" if each else f"{share}this machine’s top speed"


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


# ------------------------------------------------------------------ what else is known


def details(snapshot: RunSnapshot) -> dict[str, Any]:
    """Returns the details of a run apart from its curves."""
    return {
        "facts": _facts(snapshot),
        "data": _listed(snapshot.data),
        "plan": _listed(_short(snapshot.plan_choices)),
        "forecast": _prediction_check(snapshot),
        "places": places(snapshot),
        "grid": snapshot.plan_grid,
        "formula": snapshot.flops_formula,
    }


def _facts(snapshot: RunSnapshot) -> list[list[str]]:
    """Returns pairs of a name and a text; unknown values are left out."""
    facts = []
    if snapshot.parameters:
        parameters = in_count(snapshot.parameters)
        facts.append(["Model", f"{parameters} parameters in {len(snapshot.units)} units"])
        if snapshot.trained_parameters is not None:
            trained = in_count(snapshot.trained_parameters)
            facts.append(["Trained", f"{trained} of these parameters; the others are frozen"])
    if snapshot.device:
        facts.append(["Computes on", snapshot.device_name or snapshot.device.upper()])
    if snapshot.sessions > 1:
        resumed = f"resumed at step {snapshot.resumed_step or 0:,}"
        facts.append(["Sessions", f"{snapshot.sessions} ({resumed})"])
    if snapshot.damaged_lines:
        lines = counted(snapshot.damaged_lines, "line")
        facts.append(
            [
                "Record",
                f"{lines} could not be read (see Log), so a curve may lack a point",
            ]
        )
    if snapshot.program_version:
        facts.append(["Program", snapshot.program_version])
    return facts


def _listed(values: dict[str, Any]) -> list[list[str]]:
    listed = []
    for name, value in values.items():
        text = _plain(value)
        if text:
            listed.append([name.replace("_", " ").capitalize(), text])
    return listed


def _short(choices: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan's choices, with long lists of units replaced by their length."""
    short = dict(choices)
    for name, value in choices.items():
        if isinstance(value, (list, tuple)) and len(value) > UNITS_NAMED:
            short[name] = f"{len(value)} units"
    return short


def _plain(value: Any) -> str:
    """Returns a value from the engine's summaries as text; nested ones are `name value` pairs."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if value is None:
        return ""
    if isinstance(value, bool):  # before int, since a bool is also an int
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return in_digits(value) if isinstance(value, float) else str(value)


def _prediction_check(snapshot: RunSnapshot) -> dict[str, Any] | None:
    """Returns the predictions and measurements, with a row for each quantity: its name, both
    values, and the error of the prediction as text and tone.
    """
    if snapshot.prediction_check is None:
        return None
    rows = [
        _forecast_row(name, pair) for name, pair in snapshot.prediction_check.quantities.items()
    ]
    return {"rows": rows, "caption": MOMENT_LABELS.get(snapshot.prediction_check.moment, "")}


def _forecast_row(name: str, pair: Comparison) -> dict[str, str]:
    predicted, measured, error = pair.get("predicted"), pair.get("measured"), pair.get("error")
    as_text = in_step_time if name.endswith("_seconds") else in_bytes
    is_excess = error is not None and error > EXCESS_SHOWN
    return {
        "name": QUANTITIES.get(name, name.replace("_", " ").capitalize()),
        "predicted": "–" if predicted is None else as_text(predicted),
        "measured": "–" if measured is None else as_text(measured),
        "error": "–" if error is None else _signed(100 * error),
        "tone": "warn" if is_excess else "",
    }


def _signed(percent: float) -> str:
    """Returns a percentage with a sign, as in +3.2 %, −0.4 % or 0.0 %."""
    shown = f"{abs(percent):.1f} %"
    if shown == "0.0 %":
        return shown
    return f"+{shown}" if percent > 0 else f"−{shown}"
