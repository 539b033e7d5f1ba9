"""The lines of the Summary beside the form: what will be trained, how long it takes, and what the
button says. All functions are pure.
"""

from __future__ import annotations

from typing import Any

from app.form.source_names import named_together, short_name
from app.labels import in_predicted_time
from app.pages.new.known_models import model_title
from app.pages.new.run_length import RunLength, in_passes
from engine.config.settings import TrainConfig
from engine.text import counted

TO_MEASURE = "Measure the speed of this CPU in Hardware."
"""Why the time of a run is not known, where measuring this machine would tell."""


def job_lines(config: TrainConfig, found: RunLength | None) -> list[str]:
    """Returns the run in two lines: its model and method, its data and length. found: the length
    of the run, where it is known.
    """
    train = config.train
    method = {
        "full": "all weights",
        "parts": "named parts",
        "lora": f"LoRA, rank {train.lora_rank}",
    }
    data = named_together([short_name(part.only_source) for part, _ in config.data.parts()])
    return [
        f"{model_title(config.model.source)} · {method[train.method]}",
        f"{data} · {_length(config, found)}",
    ]


def _length(config: TrainConfig, found: RunLength | None) -> str:
    if config.train.steps is not None:
        steps = counted(config.train.steps, "step")
        return f"{steps} ({in_passes(found.passes)})" if found is not None else steps
    passes = in_passes(config.train.epochs or 0.0)
    if found is None:
        return passes
    return f"{passes} ({counted(max(1, round(found.steps)), 'step')})"


def clock(
    seconds: float | None, why_unknown: str, note: str = "", begins: float | None = 0.0
) -> dict[str, Any]:
    """Returns the time of a run: its `seconds` and their `text` with a `note`, or `why` they are
    not known. `to_measure`: measuring this machine would tell. `begins`: when the run can begin, in
    Unix seconds; 0 for at once, None where that is not known.
    """
    if seconds is not None:
        text = in_predicted_time(seconds)
        return {
            "seconds": seconds,
            "begins": begins,
            "text": text,
            "why": "",
            "note": note,
            "to_measure": False,
        }
    return {
        "seconds": None,
        "begins": begins,
        "text": "unknown" if why_unknown else "",
        "why": why_unknown,
        "note": "",
        "to_measure": why_unknown == TO_MEASURE,
    }


def queue_text(waiting: int) -> str:
    """Returns the label of the button that queues a run. waiting: number of runs in the queue."""
    return f"Add to queue ({ordinal(waiting + 1)})" if waiting else "Add to queue"


def ordinal(number: int) -> str:
    """Returns a place in a row: 1st, 2nd, 11th."""
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
