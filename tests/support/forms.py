"""Forms of a new run, as the page sends them."""

from __future__ import annotations

from app.form.settings_form import shown_values
from engine.config.settings import TrainConfig


def shown(**values):
    """Returns the component values of a form with these settings: `train__steps=3`, say."""
    config = TrainConfig.from_dict(
        {
            "model": {"source": "Qwen/Qwen2.5-0.5B"},
            "data": {"source": "assets/starter.jsonl"},
            "train": {"steps": 500},
        }
    )
    return shown_values(
        config.with_values({name.replace("__", "."): value for name, value in values.items()})
    )
