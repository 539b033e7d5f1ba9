"""Refusals of requests to runs that are over, with how they ended."""

from __future__ import annotations

from engine.config.changes import CHANGE, Change
from engine.errors import RunError
from engine.runs.record.run_folder import RunFolder
from engine.runs.summaries.listing import summarize

ENDED_AS_ASKED = {"stop": "stopped", "discard": "discarded"}
"""State in which a run ends that has carried out such a request."""


def refuse_if_paused_when_seen(name: str, seen: str) -> None:
    """Raises RunError if the person meant to end a pause. Otherwise a run that another person
    ended meanwhile would start again.
    """
    if seen in ("paused", "pausing"):
        raise RunError(
            f"{name} is no longer paused: somebody has ended it. Press Resume again to continue "
            "from its last checkpoint."
        )


def refuse_unless_done(folder: RunFolder, command: str | Change) -> None:
    """Checks a request to a run that is over. Raises RunError, with how the run ended, unless it
    ended as requested.
    """
    run = summarize(folder)
    if run is None:
        raise RunError("This run was deleted.")
    asked = name_of(command)
    if run.state == "interrupted":
        raise RunError(
            f"{run.name} cannot {asked}: it was interrupted when its program ended. Resume "
            "continues it."
        )
    if ENDED_AS_ASKED.get(asked) != run.state:
        raise RunError(f"{run.name} has ended already. {run.reason}".rstrip())


def name_of(command: str | Change) -> str:
    """Returns the name of a command."""
    return CHANGE if isinstance(command, Change) else command
