"""Requests to a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config.changes import Change


@dataclass(frozen=True)
class Requests:
    """Functions by which the training loop gets the requests to its run, from any process."""

    take: Callable[[], list[str | Change]]
    """Returns the requests that arrived since its last call; only the training loop calls it."""
    count_endings: Callable[[], int]
    """Returns the number of requests to end the run so far. Any thread may call it."""
    is_urgent: Callable[[], bool] = lambda: False
    """Returns whether a request to stop cannot wait for the end of a step. Any thread may call
    it.
    """
    will_be_urgent: Callable[[], bool] = lambda: False
    """Returns whether such a request has arrived or is on its way: a signal reaches the main thread
    only once an op that this computes is over. Any thread may call it.
    """
