"""A data set is invented: a file, the settings to read it with, and what must hold of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.formats.all_formats import FORMATS as READ
from tests.support.invented.changes import changed
from tests.support.invented.files import DAMAGE, KINDS, MOVES_TEXTS, TABLES, damaged, made_file
from tests.support.invented.rows import FORMATS, Rows, with_tokens

_WRONG_COLUMNS = (
    DataColumns(prompt="prompt", completion="note"),
    DataColumns(messages="conversations"),
    DataColumns(text="note"),
    DataColumns(prompt="nosuch"),
)


@dataclass(frozen=True)
class DataSet:
    """An invented data set."""

    config: DataConfig
    format: str
    rows: list[dict[str, Any]]
    story: str
    """This tells how the file came to be."""
    is_whole: bool
    """Neither the rows nor the file were changed."""
    keeps_parts: bool
    """No change made a question an answer, or one that is excluded one that is not."""


def invented(random: Random, tokenizer: Any, folder: Path) -> DataSet:
    """Invents a data set and writes its file into the folder."""
    name = random.choice(FORMATS)
    drawn = Rows(random, name)
    rows = [drawn.row() for _ in range(random.choice((1, 1, 2, 3, 5, 12)))]
    if name == "tokens":
        rows = [with_tokens(row, tokenizer) for row in rows]
    changes = random.choice(("none", "none", "none", "kept", "kept", "kept", "free"))
    for place in range(len(rows)):
        if changes != "none" and random.random() < 0.4:
            rows[place] = changed(rows[place], random, changes == "free")
    kind = random.choice(KINDS)
    if name == "oasst" and kind == "columns.json":  # a list of trees would be a list of rows
        kind = ".json"
    file, content = made_file(rows, kind, random)
    damage = random.choice(DAMAGE) if random.random() < 0.25 else "none"
    if damage != "none":
        content = damaged(content, damage, random)
    path = folder / file
    path.write_bytes(content)
    config, is_plain = _settings(random, str(path))
    is_moved = damage == "flip" or (damage in MOVES_TEXTS and kind in TABLES)
    is_shifted = drawn.are_of_lists and changes != "none"
    return DataSet(
        config,
        name,
        rows,
        f"{name}, {changes} changed, {file}, {damage}, {config}",
        is_whole=changes == damage == "none" and is_plain and kind != ".txt",
        keeps_parts=changes != "free" and is_plain and not is_moved and not is_shifted,
    )


def _settings(random: Random, source: str) -> tuple[DataConfig, bool]:
    """Returns settings, and whether they leave it to the rows what is trained."""
    settings: dict[str, Any] = {
        "source": source,
        "max_seq_len": random.choice((8192, 8192, 8192, 64, 16, 2)),
        "packing": random.random() < 0.3,
        "dropped_turns": random.choice(("turn_by_turn", "turn_by_turn", "refuse")),
        "typed_tokens": random.choice(("text", "text", "tokens")),
        "eval_fraction": random.choice((0.0, 0.0, 0.3)),
        "long_texts": random.choice(("continue", "continue", "cut", "skip")),
        "overlap": random.choice((0, 0, 1)),
    }
    if random.random() < 0.85:
        return DataConfig(**settings), True
    wrong: dict[str, Any] = random.choice(
        (
            {"format": random.choice(sorted(READ))},
            {"train_on": "all"},
            {"columns": random.choice(_WRONG_COLUMNS)},
        )
    )
    return DataConfig(**settings, **wrong), False
