"""A run, a secret and the addresses that tests of the app with odd requests use."""

from __future__ import annotations

from app.form.presets import FIRST_PRESET
from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT

RUN = "20260101-000000-run"


SECRET = "what nobody may read"


SHOWN = shown_values(TrainConfig.load(PROGRAM_ROOT / "presets" / FIRST_PRESET))
TABLE = {"rows": 32, "tokens": 1024, "dtype": "bfloat16"}
CHOICE = {"run_id": RUN, "weights": "newest"}
BODIES = {
    "/api/check": {"preset": None, "shown": SHOWN, "keep": False},
    "/api/command": {"preset": None, "shown": SHOWN},
    "/api/derived": {"preset": None, "before": SHOWN, "after": SHOWN},
    "/api/draft/own": {"tab": ""},
    "/api/opening": {"tab": "a", "other": "b"},
    "/api/rows": {"shown": SHOWN},
    "/api/fitting": {"shown": SHOWN},
    "/api/models": {"preset": None, "shown": SHOWN},
    "/api/presets": {"name": "Starter", "shown": SHOWN},
    "/api/presets/remove": {"file": "no file"},
    "/api/hardware/column": {"machine": "This machine", "timed": False, "settings": TABLE},
    "/api/hardware/csv": {"machines": ["This machine"], "models": ["x"], "settings": TABLE},
    "/api/hardware/largest": {"settings": TABLE},
    "/api/hardware/offers": {"model": "no model", "settings": TABLE},
    "/api/hardware/measure": {},
    "/api/jobs/{number}/cancel": {},
    "/api/chat/about": {"choice": CHOICE},
    "/api/chat/send": {
        "choice": CHOICE,
        "message": "",
        "system": "",
        "compare": False,
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    },
    "/api/chat/stop": {},
    "/api/chat/new": {},
    "/api/chat/unload": {},
    "/api/runs/{run_id}/evaluate": {
        "validation": True,
        "answers": 0,
        "blind": False,
        "tasks": [],
        "own": "",
        "limit": 0,
        "chat": False,
        "programs": False,
        "weights": "",
    },
    "/api/runs/{run_id}/evaluation/vote": {"evaluation": "a", "prompt": 0, "place": "left"},
    "/api/runs/{run_id}/evaluation/reveal": {"evaluation": "a"},
    "/api/serve/start": {"run_id": RUN},
    "/api/serve/stop": {},
    "/api/runs/{run_id}/control": {"command": "no command"},
    "/api/runs/{run_id}/describe": {"name": "A name", "note": "A note", "tags": ["a"]},
    "/api/runs/{run_id}/change": {"values": {"train.learning_rate": 1e-4}},
    "/api/runs/{run_id}/draft": {"changes": {"train.learning_rate": 1e-4}},
    "/api/runs/{run_id}/export": {"folder": ""},
    "/api/runs/{run_id}/push": {"folder": "", "repository": ""},
    "/api/runs/{run_id}/delete": {},
    "/api/queue/continue": {},
    "/api/queue/resume": {"run": "no run"},
    "/api/uploads": {"name": "a.csv", "bytes": 5},
    "/api/queue/{queued}/remove": {},
    "/api/queue/{queued}/up": {},
    "/api/queue/{queued}/detached": {"detached": True},
}
"""A body for every route that takes one; none starts long work."""


def filled(path, run=RUN):
    return path.replace("{run_id}", run).replace("{queued}", "abc").replace("{number}", "99")
