"""Checks of single values. A ConfigError names the setting and what is wrong with the value."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from engine.errors import ConfigError

LARGEST = {"max_seq_len": 1 << 24, "steps": 10**9, "batch_size": 1 << 20, "gpus": 64}
"""Numbers above which a value must be a typing error, and computing with it would take hours."""


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
    """Raises ConfigError when a message cannot be posted to `value`: when it is not the http or
    https address of a host, or has a user and a password, which would not be sent.
    """
    try:
        parts = urlsplit(value)
        is_web_address = parts.scheme in ("http", "https") and parts.port != 0
        host = parts.hostname or ""
        host.encode("idna")
    except ValueError:  # the address is refused, its port is not a number, or its host no name
        is_web_address, host = False, ""
    if "://" in value and (" " in value or not value.isprintable()):
        raise ConfigError(
            name,
            "the address has a space or a control character; leave it out, or write it as %20.",
        )
    if not is_web_address or not _HOST.fullmatch(host):
        raise ConfigError(
            name, "this is no web address; it begins with https:// or http:// and names a host."
        )
    if "@" in parts.netloc:
        raise ConfigError(
            name,
            "the address has a user or a password before its host, and these are not sent; leave "
            "them out, and give an address that needs none.",
        )
    if not (parts.path + parts.query).isascii():
        raise ConfigError(
            name, "behind its host, the address has letters beyond ASCII; write them as %C3%BC."
        )


_HOST = re.compile(r"[\w.-]+|[\da-f:.]+(%\w+)?")
"""Form of a host: a name, or an IP address of version 4 or 6."""
