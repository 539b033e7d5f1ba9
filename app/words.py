"""How numbers are said on the screen."""

from __future__ import annotations

import math

from engine.words import GIB

STATE_WORDS = {
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
    "finished": "good",
    "failed": "bad",
    "stopped": "calm",
    "discarded": "calm",
    "unreadable": "bad",
}
"""`dashboard.css` colours by tone."""


def in_bytes(count: float) -> str:
    """1.5 GiB, 312 MiB, 4 KiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f} bytes"


def in_time(seconds: float) -> str:
    """45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h; an en dash for what is not known."""
    if not math.isfinite(seconds):
        return "–"
    seconds = max(0, round(seconds))
    for name, size, smaller, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            rest = seconds % size // smaller_size
            return f"{seconds // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"


def in_short_time(seconds: float) -> str:
    """As `in_time`, with fractions below ten seconds: 0.034 s, 2.41 s."""
    return f"{_three_digits(seconds)} s" if seconds < 10 else in_time(seconds)


def in_step_time(seconds: float) -> str:
    """As `in_time`, with fractions below a hundred seconds, so that steps can be compared: 0.034 s,
    11.7 s.
    """
    return f"{_three_digits(seconds)} s" if seconds < 99.95 else in_time(seconds)


def in_count(value: float) -> str:
    """948, 12.3k, 7.62B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{_three_digits(value / (1e3 if unit == 'k' else size))}{unit}"
    return f"{value:,.0f}"


def in_share(share: float) -> str:
    """3 %, 0.4 %, 100 %; never 0 % of something that is not nothing."""
    percent = 100 * share
    return (
        f"{percent:.0f} %"
        if percent >= 1 or percent == 0
        else f"{percent:.1f} %"
        if percent >= 0.1
        else "< 0.1 %"
    )


def in_digits(value: float | None) -> str:
    """Four significant digits, as 0.01234 or 1.2e-5; an en dash for what is not known."""
    if value is None or not math.isfinite(value):
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
