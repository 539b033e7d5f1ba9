"""The notification of another program that a run is over: a single POST of JSON to an address of
the user.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from engine.runs.record.events import RunEnded
from engine.runs.record.snapshot import RunSnapshot

SECONDS = 5.0
"""Seconds within which the other program must answer."""


def message(run_id: str, snapshot: RunSnapshot, ended: RunEnded) -> dict[str, object]:
    """Returns the content to post. Its `text` is a sentence, which chat services show."""
    name = snapshot.name or run_id
    return {
        "text": f"{name} {ended.state_text}: {ended.reason}",
        "run": run_id,
        "name": name,
        "state": ended.state,
        "reason": ended.reason,
        "export_failed": ended.export_failed,
        "step": snapshot.step,
        "total_steps": snapshot.total_steps,
        "loss": snapshot.loss,
        "seconds": round(snapshot.seconds, 1),
    }


def post(address: str, content: dict[str, object]) -> str | None:
    """Posts `content`; returns None, or one sentence on why it could not be delivered.

    Redirects are not followed, since the content is only for the given address.
    """
    request = urllib.request.Request(
        address, json.dumps(content).encode(), {"content-type": "application/json"}
    )
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        return (
            f"output.webhook: {_host(address)} answered {error.code}, so it may not know how this "
            "run ended."
        )
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return f"output.webhook: {_host(address)} could not be told how this run ended ({reason})."
    return None


def _host(address: str) -> str:
    """Returns the host of an address for the log, since the path of such an address is secret."""
    return urlsplit(address).hostname or "the address"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None
