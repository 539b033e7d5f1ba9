"""Names that would be markup, a template or a script wherever a page took them for more than text,
and records full of them.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict, replace

from engine.runs.record.events import Event, JobProgressed, PromptsAnswered, SettingsChanged
from tests.support.synthetic_run import run_events

HOSTILE = (
    '<img src=x onerror="window.hacked=1">'
    "${window.hacked=2}{{window.hacked=3}}"
    "'\">"
    "<script>window.hacked=4</script>"
    '<a href="javascript:window.hacked=5">x</a>'
    "<b>bold</b>%{x}<svg onload=window.hacked=6>"
)
WORDS_OF_OURS = {"state", "lane", "cause", "moment", "device", "level", "command", "best_by"}
"""Fields whose texts are a choice of a few."""


def made_hostile(value: Any, field: str = "") -> Any:
    """An event, or what is in it, with every text of a person's or another program's replaced."""
    if isinstance(value, Event):
        return replace(
            value, **{name: made_hostile(inner, name) for name, inner in asdict(value).items()}
        )
    if isinstance(value, dict):
        return {name: made_hostile(inner, name) for name, inner in value.items()} | (
            {HOSTILE: HOSTILE} if field in ("summary", "choices") else {}
        )
    if isinstance(value, list):
        return [made_hostile(inner, field) for inner in value]
    return HOSTILE if isinstance(value, str) and field not in WORDS_OF_OURS else value


def hostile_events(steps: int = 60) -> list[Event]:
    """Of a run that failed, all of whose texts are hostile."""
    events = run_events(steps, ended="failed")
    more = [
        JobProgressed(job="tokenize", done=1, total=2, message="x"),
        PromptsAnswered(step=40, answers=[{"prompt": "x", "answer": "x"}]),
        SettingsChanged(step=40, values={"train.learning_rate": 1e-4}, total_steps=steps),
    ]
    return [made_hostile(event) for event in [*events[:-3], *more, *events[-3:]]]
