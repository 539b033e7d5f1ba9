"""Pairs of answers for the tiny models of `tests.support.folders`, made from a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from tests.support.folders import WORDS, make_config
from tests.support.rows import write_rows


def made_pairs(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Returns rows with the columns prompt, chosen and rejected, whose lengths differ."""
    draw = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS[:8], k=draw.randint(least, most)))

    return [
        {
            "prompt": f"say after {words(1, 5)}",
            "chosen": f"one {words(1, 5)}",
            "rejected": f"two {words(1, 7)}",
        }
        for _ in range(count)
    ]


def made_answers(count: int, seed: int = 2) -> list[dict[str, Any]]:
    """Returns rows with the columns prompt, completion and label."""
    rows = made_pairs(count, seed)
    draw = random.Random(seed)
    found = []
    for row in rows:
        desirable = draw.random() < 0.6
        answer = row["chosen"] if desirable else row["rejected"]
        found.append({"prompt": row["prompt"], "completion": answer, "label": desirable})
    return found


def pair_config(tmp_path: Path, **values: Any) -> TrainConfig:
    """A run of quick steps on pairs; `values` are settings by dotted name."""
    data = tmp_path / "pairs.jsonl"
    if not data.exists():
        write_rows(data, made_pairs(40))
    own = {
        "data.source": str(data),
        "data.max_seq_len": 32,
        "data.eval_fraction": 0.1,
        "model.dtype": "float32",
        "train.objective": "dpo",
        "output.export": False,
    }
    return make_config(tmp_path, **own | values)


def marked_config(tmp_path: Path, **values: Any) -> TrainConfig:
    """A run of quick steps on answers with marks; `values` are settings by dotted name."""
    data = tmp_path / "answers.jsonl"
    if not data.exists():
        write_rows(data, made_answers(40))
    own = {"data.source": str(data), "train.objective": "kto"}
    return pair_config(tmp_path, **own | values)
