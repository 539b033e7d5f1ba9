"""What the server says of runs whose records are given: nothing in it is measured, so it is
compared to the digit.
"""

from __future__ import annotations

from typing import Any

from tests.support.behavior.answers import Asked
from tests.support.behavior.sides import Side
from tests.support.behavior.small import recorded_runs, small_place

COMPARED = (
    ("finished", "changed"),
    ("finished", "cut", "failed", "damaged", "newer", "described"),
    ("empty", "preparing"),
    ("finished", "broken-settings"),
    ("finished",),
    ("finished", "finished"),
    ("finished", "nobody"),
    ("finished", "changed", "cut", "failed", "stopped", "damaged", "newer"),
)


def gather(side: Side) -> dict[str, Any]:
    place = small_place(side, "records")
    runs = place / "runs"
    runs.mkdir()
    ids = recorded_runs(runs)
    facts: dict[str, Any] = {}
    with side.serve(runs) as server:
        ask = Asked(server, facts)
        ask("GET", "/api/live")
        ask("GET", "/api/runs")
        ask("GET", "/api/chat/choices")
        ask("GET", "/api/jobs")
        for name, run_id in ids.items():
            for query in (
                "",
                "?since=0&axis=time",
                "?axis=tokens",
                "?since=50",
                "?since=x&axis=moon",
            ):
                ask("GET", f"/api/live/{run_id}{query}", name=f"live of {name} {query}")
            ask("GET", f"/api/runs/{run_id}/details", name=f"details of {name}")
            ask("GET", f"/api/runs/{run_id}/timeline", name=f"timeline of {name}")
        for name in ("finished", "damaged", "newer"):
            for step in ("1", "5", "10", "7", "-1", "x", "99999999999999999999"):
                for view in ("timeline", "trace"):
                    ask(
                        "GET",
                        f"/api/runs/{ids[name]}/{view}?step={step}",
                        name=f"{view} of {name}, step {step}",
                    )
            for window in (
                "from=0&to=2000",
                "from=-500&to=500&step=5",
                "from=5&to=5",
                "from=a&to=7",
                "to=7",
                "",
            ):
                ask(
                    "GET",
                    f"/api/runs/{ids[name]}/stretch?{window}",
                    name=f"stretch of {name} {window}",
                )
        for names in COMPARED:
            for axis in ("step", "time", "moon"):
                asked = ",".join(ids.get(name, name) for name in names)
                ask(
                    "GET",
                    f"/api/compare?runs={asked}&axis={axis}",
                    name=f"compare {', '.join(names)} by {axis}",
                )
        _changes(ask, ids)
    facts["printed"] = side.plain(server.printed)
    facts["exit code"] = server.code
    return facts


def _changes(ask: Asked, ids: dict[str, str]) -> None:
    """Names, notes, drafts and what is asked of runs that are over."""
    run_id = ids["finished"]
    for body in (
        {"name": " New name ", "note": "A note\nof two lines"},
        {"name": "a\nb", "note": ""},
        {"name": "x" * 121, "note": ""},
        {"name": "", "note": "y" * 4001},
        {"name": 5, "note": ""},
        {"note": ""},
        {"name": "", "note": ""},
    ):
        ask("POST", f"/api/runs/{run_id}/describe", body)
        ask("GET", f"/api/runs/{run_id}/details", name=f"details after describe {str(body)[:80]}")
    for name in ("finished", "cut", "stopped", "broken-settings"):
        for command in ("stop", "discard", "pause", "save", "fly", 7):
            ask(
                "POST",
                f"/api/runs/{ids[name]}/control",
                {"command": command},
                name=f"{command} a run that is {name}",
            )
    ask("POST", f"/api/runs/{ids['cut']}/control", {"command": "resume", "seen": "paused"})
    ask("POST", f"/api/runs/{ids['finished']}/control", {"command": "resume", "seen": ""})
    ask("POST", f"/api/runs/{ids['finished']}/control", {"seen": 5})
    for values in (
        {"train.steps": 5},
        {"train.steps": 50},
        {"train.learning_rate": -1},
        {"train.seed": 3},
        {},
        [],
        {"train.steps": "many"},
        {"train.steps": True},
        {"train.steps": 0},
    ):
        ask("POST", f"/api/runs/{run_id}/change", {"values": values})
    for changes in (
        {},
        {"train.steps": 7},
        {"train.steps": 0},
        {"no.such": 1},
        5,
        {"data.columns.prompt": "q"},
    ):
        ask("POST", f"/api/runs/{run_id}/draft", {"changes": changes})
    ask("POST", f"/api/runs/{ids['broken-settings']}/draft", {"changes": {}})
    for wrong in ("nobody", "..", ".hidden", "%2e%2e%2fx", "x" * 130, "%00"):
        ask("GET", f"/api/live/{wrong}")
        ask("GET", f"/api/runs/{wrong}/details")
        ask("GET", f"/api/runs/{wrong}/timeline")
        ask("POST", f"/api/runs/{wrong}/control", {"command": "stop"})
        ask("POST", f"/api/runs/{wrong}/delete", {})
    for folder in ("", "  ", 5, "\u0000", "full/" * 2000):
        ask("POST", f"/api/runs/{run_id}/export", {"folder": folder})
    for path in ("continue", "x/remove", "x/up", "x/detached"):
        ask("POST", f"/api/queue/{path}", {})
    ask("POST", "/api/queue/x/detached", {"detached": True})
    ask("POST", f"/api/runs/{ids['discarded']}/delete", {})
    ask("GET", f"/api/runs/{ids['discarded']}/details", name="details of a run that was deleted")
    ask("GET", "/api/runs", name="runs after one was deleted")
