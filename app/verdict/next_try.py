"""What to try next with a run, by its outcome and the passes that it made over its rows: the only
place that decides this, so that no two runs are told the opposite. All functions are pure.
"""

from __future__ import annotations

from typing import Literal

from engine.config.setting_warnings import MOST_PASSES
from engine.config.settings import TrainConfig
from engine.runs.record.snapshot import RunSnapshot

FEWEST_PASSES = 3
"""Number of passes up to which no run is told to make fewer: a usual run makes as many."""
TOO_SMALL = "This model was made for its example: choose a larger one for your own data."
"""What an example's model on other data is told, whatever its outcome: no number of passes helps
it.
"""

Outcome = Literal["learns by heart", "best was earlier", "no better", "still falls"]


def passes_of(snapshot: RunSnapshot, config: TrainConfig | None) -> float | None:
    """Returns how many passes a run has made over its rows, or None where that is not known."""
    rows = snapshot.data.get("train_rows")
    if config is None or not isinstance(rows, int) or rows < 1:
        return None
    return snapshot.step * config.train.batch_size / rows


def next_try(outcome: Outcome, passes: float | None, rate: str = "") -> str:
    """Returns what to try next, as in `more data or a lower learning rate`.

    `learns by heart` is a run whose validation loss stands still while it knows its rows; `best was
    earlier` one whose validation loss has risen since; `still falls` one whose loss fell to its
    end. rate: the learning rate to try, in words.
    """
    more = ["more passes"] if passes is None or passes < MOST_PASSES else []
    fewer = ["fewer passes"] if passes is None or passes > FEWEST_PASSES else []
    tries = {
        "learns by heart": ["more data", rate or "a lower learning rate"],
        "best was earlier": [*fewer, "more data", rate or "a lower learning rate"],
        "no better": [*more, "more data", rate or "another learning rate"],
        "still falls": [rate or "a higher learning rate", *more],
    }[outcome]
    *first, last = tries
    return f"{', '.join(first)} or {last}" if first else last
