"""A record is given the time of a clock that ran on evenly since the run began.

A person, or a time server, may set the wall clock of a machine at any moment. So the difference of
two recorded wall times says nothing. Each record therefore has `elapsed`, which its writer counts
on a clock that nobody sets. Only where there is no such clock is the wall clock used: between two
sessions, and in the records of earlier versions.
"""

from __future__ import annotations

from engine.runs.record.events import Event, Record, RunStarted, StateChanged

LONGEST_SILENCE = 86_400.0
"""Within a session of an earlier version, a jump of more than this many seconds means that somebody
has set the clock: it counts as no time.
"""


def steady_time(
    record: Record, started: float | None, latest: float | None, set_by: float
) -> float:
    """Returns the Unix time of a record by an even clock.

    The run's first record had the time `started` and the latest one `latest`. The wall clock was
    then ahead by `set_by` seconds.
    """
    if not record.time or started is None:
        return record.time
    if record.elapsed is not None:
        return started + record.elapsed
    time = record.time - set_by
    if latest is None:
        return time
    longest = float("inf") if _begins(record.event) else LONGEST_SILENCE
    return time if 0 <= time - latest <= longest else latest


def _begins(event: Event) -> bool:
    """Returns whether a session may begin with this event, any time after the one before it."""
    return isinstance(event, RunStarted) or (
        isinstance(event, StateChanged) and event.state == "preparing"
    )
