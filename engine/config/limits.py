"""Limits of single values. A ConfigError names the setting and what is wrong with the value."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from msgspec import Meta

from engine.errors import ConfigError

LARGEST = {"max_seq_len": 1 << 24, "steps": 10**9, "batch_size": 1 << 20, "gpus": 64}
"""Numbers above which a value must be a typing error, and computing with it would take hours."""


def check_limits(name: str, value: Any, limits: Meta) -> None:
    """Raises ConfigError for a number that is outside of `limits`, whose description ends the
    sentence. Other values, such as null, have none.
    """
    if not isinstance(value, (int, float)):
        return
    low = limits.gt if limits.ge is None else limits.ge
    high = limits.lt if limits.le is None else limits.le
    is_low = low is not None and (value < low or value == limits.gt)
    is_high = high is not None and (value > high or value == limits.lt)
    if not is_low and not is_high:
        return
    if isinstance(value, int):
        end = f"large; the most is {high:,}" if is_high else f"small; the least is {low}"
        problem = f"too {end}"
    elif high is None:
        problem = f"{'not above' if limits.ge is None else 'below'} {low}"
    else:
        excluded = [end for end in (limits.gt, limits.lt) if end is not None]
        without = f" ({excluded[0]} excluded)" if excluded else ""
        problem = f"outside {low} to {high:,}{without}"
    advice = f"; {limits.description}" if limits.description else ""
    raise ConfigError(name, f"{value:,} is {problem}{advice}.")


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
