"""`Requests` are what people ask of a run while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config.changes import Change


@dataclass(frozen=True)
class Requests:
    """A `Requests` object gives the training loop what was asked of its run, from any process."""

    take: Callable[[], list[str | Change]]
    """It returns the requests that arrived since its last call; only the training loop calls it."""
    count_endings: Callable[[], int]
    """It returns how many requests to end the run have arrived so far. Any thread may call it."""
    is_urgent: Callable[[], bool] = lambda: False
    """It returns whether a request to stop cannot wait for the end of a step. Any thread may call
    it.
    """
    will_be_urgent: Callable[[], bool] = lambda: False
    """It returns whether such a request has arrived or is on its way: a signal is told to the main
    thread only once an op that this computes is over. Any thread may call it.
    """
