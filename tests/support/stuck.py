"""Checks that what is done waits for nothing that never comes, on a machine however busy."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

PATIENCE = 120
"""What takes longer than so many seconds is stuck."""


@contextlib.contextmanager
def never_stuck(computing: float = 5.0) -> Iterator[None]:
    """Fails where what is done does not end, such as a pipe that nobody writes to, or where this
    process and those that have ended meanwhile compute for `computing` seconds. How long it waits
    for a busy machine does not matter.
    """

    def abort(*_: Any) -> None:
        pytest.fail(f"it is stuck: it has not ended after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, abort)
    signal.alarm(PATIENCE)
    began = _computed()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert _computed() - began < computing


def _computed() -> float:
    return sum(os.times()[:4])
