"""Numbers and states as the texts that the screen shows."""

from __future__ import annotations

import math

from engine.runs.record.events import EXPORT_FAILED
from engine.text import GIB, in_hours

STATE_LABELS = {
    "preparing": "Preparing",
    "running": "Running",
    "pausing": "Pausing",
    "paused": "Paused",
    "stopping": "Stopping",
    "saving": "Saving",
    "finished": "Finished",
    "stopped": "Stopped",
    "failed": "Failed",
    "discarded": "Discarded",
    "interrupted": "Interrupted",
    "unreadable": "Unreadable",
}
STATE_TONES = {
    "preparing": "busy",
    "running": "busy",
    "pausing": "busy",
    "stopping": "busy",
    "saving": "busy",
    "paused": "warn",
    "interrupted": "warn",
    "finished": "calm",
    "failed": "bad",
    "stopped": "calm",
    "discarded": "calm",
    "unreadable": "bad",
}
"""Tone of each state; `base.css` has a color for each tone."""


METHOD_LABELS = {"full": "all weights", "lora": "LoRA", "parts": "some parts"}
"""What is trained, in few words."""


def state_label(state: str, export_failed: str = "") -> str:
    """Returns the label of a state. `export_failed` is why a run that has finished has no export,
    if that is so.
    """
    word = STATE_LABELS[state]
    return f"{word}, {EXPORT_FAILED}" if export_failed else word


def state_tone(state: str, export_failed: str = "") -> str:
    """Returns the tone of a state, as `state_label` names it."""
    return "warn" if export_failed else STATE_TONES[state]


def in_bytes(count: float) -> str:
    """Returns a number of bytes with its unit, as in 1.5 GiB, 312 MiB or 4 KiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} bytes"


def in_time(seconds: float) -> str:
    """Returns a time in its two largest units, as in 45 s, 3 min 20 s, 2 h 5 min or 3 d 4 h. An
    unknown time (NaN or infinite) is an en dash.
    """
    if not math.isfinite(seconds):
        return "–"
    return in_hours(max(0, seconds))


def in_rough_time(seconds: float) -> str:
    """Returns a time as `in_time` does, rounded up to what an estimate is good for, so that it
    counts down evenly: to 5 s below a minute, to 10 s below ten minutes, else to minutes.
    """
    if not math.isfinite(seconds):
        return "–"
    grain = next((grain for below, grain in ((60, 5), (600, 10)) if seconds <= below), 60)
    return in_time(math.ceil(seconds / grain) * grain)


def in_predicted_time(seconds: float) -> str:
    """Returns the time that a run is predicted to take, no finer than that is known: a few seconds,
    ≈ 45 s, ≈ 3 min 20 s.
    """
    return "a few seconds" if seconds < 10 else f"≈ {in_rough_time(seconds)}"


def in_short_time(seconds: float) -> str:
    """Returns a time as `in_time` does, but with fractions below ten seconds: 0.034 s, 2.41 s."""
    return f"{_three_digits(seconds)} s" if seconds < 10 else in_time(seconds)


def in_step_time(seconds: float) -> str:
    """Returns a time as `in_time` does, but with fractions below a hundred seconds, so that steps
    can be compared: 0.034 s, 11.7 s.
    """
    return f"{_three_digits(seconds)} s" if seconds < 99.95 else in_time(seconds)


def in_count(value: float) -> str:
    """Returns a short form of a number, as in 948, 12.3k or 7.62B."""
    # Numbers below ten thousand are short enough to be written in full.
    for unit, least, size in (
        ("T", 1e12, 1e12),
        ("B", 1e9, 1e9),
        ("M", 1e6, 1e6),
        ("k", 1e4, 1e3),
    ):
        if abs(value) >= least:
            return f"{_three_digits(value / size)}{unit}"
    return f"{value:,.0f}"


def in_share(share: float) -> str:
    """Returns a share in percent, as in 3 %, 0.4 % or 100 %. A share above zero is never shown as 0
    %.
    """
    percent = 100 * share
    if percent >= 1 or percent == 0:
        return f"{percent:.0f} %"
    if percent >= 0.1:
        return f"{percent:.1f} %"
    return "< 0.1 %"


SUPERSCRIPTS = dict(zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def in_digits(value: float | None) -> str:
    """Returns a number with at most four significant digits, as in 0.01234, 0.00012 or 1.2×10⁻⁵. An
    unknown number is an en dash.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        mantissa, _, power = f"{value:.2e}".partition("e")
        raised = "".join(SUPERSCRIPTS[digit] for digit in str(int(power)))
        return f"{mantissa.rstrip('0').rstrip('.')}×10{raised}"
    if abs(value) >= 1e4:  # format g would write 1.235e+04
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.4g}"


def in_loss(value: float | None) -> str:
    """Returns a loss with three digits after the point, as in 0.841, 0.120 or 2.345, so that two of
    them can be compared; below 0.1 with three digits in all, and from 10 on with four.
    """
    if value is None or not math.isfinite(value) or not 1e-4 <= abs(value) < 100:
        return in_digits(value)
    if abs(value) < 0.1:
        return f"{value:#.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def in_flops(tflops: float) -> str:
    """Returns a rate of floating-point operations with three digits, as in 1.25 TFLOPS or 6.02
    GFLOPS.
    """
    value, unit = (tflops, "TFLOPS") if tflops >= 1 or not tflops else (1e3 * tflops, "GFLOPS")
    return f"{_three_digits(value)} {unit}"


def in_energy(watt_hours: float) -> str:
    """Returns an energy with two digits, as in 0.0038 Wh, and whole watt-hours from 10 on."""
    if watt_hours >= 10:
        return f"{watt_hours:,.0f} Wh"
    return f"{in_digits(float(f'{watt_hours:.2g}'))} Wh"


def _three_digits(value: float) -> str:
    """Returns a number with at most three digits. The thresholds are where rounding would add a
    fourth digit.
    """
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.1:
        return f"{value:.2f}"
    return f"{value:.2g}"
