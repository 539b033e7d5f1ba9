"""Each of these functions checks one value. A ConfigError names the setting and says what is wrong
with the value.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from engine.errors import ConfigError

LARGEST = {"max_seq_len": 1 << 24, "steps": 10**9, "batch_size": 1 << 20}
"""A larger number must be a typing error, and computing with it would take hours."""


def at_least(name: str, value: float, low: int) -> None:
    """Raises ConfigError when `value` is below `low`."""
    if value < low:
        raise ConfigError(name, f"{value} is too small; the least is {low}.")


def at_most(name: str, value: float, high: int) -> None:
    """Raises ConfigError when `value` is above `high`."""
    if value > high:
        raise ConfigError(name, f"{value:,} is too large; the most is {high:,}.")


def between(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError when `value` is below `low` or above `high`."""
    if not low <= value <= high:
        raise ConfigError(name, f"{value} is outside {low} to {high}.")


def web_address(name: str, value: str) -> None:
    """Raises ConfigError when `value` is not the http or https address of a host."""
    try:
        parts = urlsplit(value)
        is_web_address = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        )
    except ValueError:  # urlsplit refuses the address, or the port is not a number
        is_web_address = False
    if not is_web_address:
        raise ConfigError(
            name, "this is no web address; it begins with https:// or http:// and names a host."
        )
