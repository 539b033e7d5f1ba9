"""Our cookie in whatever a browser sends beside it.

A browser sends a cookie to every port of a host, so the header also carries those of other
programs, in any form: with quotes, brackets, spaces or bytes outside of ASCII. Python's own parser
stops at the first of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST_VALUE = 200
"""Number of characters that every value of ours is below; a longer one is not read."""
MOST_OF_A_NAME = 200
"""Largest number of cookies of one name that are read. Browsers keep about 180 for a host."""
_PLAIN = re.compile(rb"[\w-]+", re.ASCII)


def login_cookie(port: int) -> str:
    """Returns the name of the cookie that proves a login under an address with this port.

    The port in the name keeps two servers on one host apart.
    """
    return f"ramstream_login_{port}"


def cookie_values(headers: Iterable[bytes], name: str) -> list[str]:
    """Returns the different values that the Cookie headers of a request hold under `name`.

    It leaves out values that no cookie of ours has.
    """
    wanted = name.encode("ascii")
    values: dict[bytes, None] = {}
    for header in headers:
        if wanted not in header:
            continue
        for pair in header.split(b";"):
            key, _, value = pair.partition(b"=")
            if key.strip(b" \t") != wanted:
                continue
            value = value.strip(b" \t")
            if len(value) <= LONGEST_VALUE and _PLAIN.fullmatch(value):
                values[value] = None
            if len(values) >= MOST_OF_A_NAME:
                break
    return [value.decode("ascii") for value in values]
