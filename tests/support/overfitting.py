"""Tiny runs that learn their rows by heart: their validation loss falls at first, and
then rises.
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

from engine.config.settings import TrainConfig
from tests.support.folders import WORDS, make_config

STEPS, EVAL_EVERY = 36, 6


def overfitting(tmp_path: Path, **values) -> TrainConfig:
    """Returns a run of 36 steps that is best in its third evaluation of six, after step 18."""
    draw = random.Random(0)
    rows = []
    for _ in range(24):
        asked = " ".join(draw.choice(WORDS) for _ in range(5))
        turns = [{"role": "user", "content": asked}]
        # The answer has nothing to do with what was asked.
        turns.append({"role": "assistant", "content": draw.choice(WORDS[:4])})
        rows.append(json.dumps({"messages": turns}))
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = {
        "data.eval_fraction": 0.5,
        "train.steps": STEPS,
        "train.learning_rate": 1.5e-2,
        "output.eval_every": EVAL_EVERY,
        "output.checkpoint_every": 0,
    }
    return make_config(tmp_path, **settings | values)


def by_heart(folder: Path) -> TrainConfig:
    """Returns a run over a small CSV whose answers have nothing to do with what was asked. Its
    validation loss is best after more than half of its 60 steps, and rises far enough to be told.
    """
    draw = random.Random(0)
    path = folder / "by-heart.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", "completion"])
        for _ in range(48):
            asked = " ".join(draw.choice(WORDS) for _ in range(4))
            rows.writerow([asked, " ".join(draw.choice(WORDS[:8]) for _ in range(3))])
    settings = {
        "name": "By heart",
        "data.source": str(path),
        "data.eval_fraction": 0.5,
        "data.packing": False,
        "train.batch_size": 24,
        "train.micro_batch_size": 24,
        "train.learning_rate": 1.5e-2,
        "train.steps": 60,
        "output.eval_every": 5,
        "output.checkpoint_every": 0,
        "output.export": True,
    }
    return make_config(folder, **settings)
