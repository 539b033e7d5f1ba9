"""The data section of a `TrainConfig`: its sources, their format and columns, and how they become
rows. No torch here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError

DataFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]


@dataclass(frozen=True)
class DataColumns:
    """Which column of the data is what, where its name does not tell. A part that has to be there
    and is not named is found by its usual names; once one is named, `input`, `system` and `tools`
    are used only where they are named too.
    """

    messages: str | None = None
    """Column with the turns of a conversation: a list of {role, content} or {from, value}."""

    prompt: str | None = None
    """Column with the user's turn."""

    completion: str | None = None
    """Column with the assistant's turn."""

    input: str | None = None
    """Column that is added to the user's turn."""

    system: str | None = None
    """Column with the system turn."""

    tools: str | None = None
    """Column with the tools that the chat template is told of."""

    text: str | None = None
    """Column with a text of which every token is trained."""

    def named(self) -> dict[str, str]:
        """Part of an example to the column that is named for it."""
        return {part: column for part, column in vars(self).items() if column is not None}


@dataclass(frozen=True)
class DataSource:
    """One of several data sets that are mixed."""

    source: str = ""
    """As `data.source` when it is one."""

    weight: float = 1.0
    """How often an epoch visits each training example of this source: 0.5 takes a fixed half of
    them, 2 each twice.
    """

    split: str | None = None
    """Split of this source; null is `data.split`."""

    format: DataFormat | None = None
    """Format of this source; null is `data.format`."""

    columns: DataColumns = field(default_factory=DataColumns)
    """Columns of this source; those of `data.columns` when none is named."""


@dataclass(frozen=True)
class DataConfig:
    source: str | tuple[DataSource, ...] = ""
    """A .json, .jsonl, .parquet, .csv, .tsv, .txt or .md file, a folder of such files or one that
    `datasets` saved, an entry of a registry (path/dataset_info.json:name), or a Hugging Face data
    set id. Several are mixed when this is a list of {source, weight, split, format, columns}.
    """

    format: DataFormat = "auto"
    """How a row becomes tokens; `auto` looks at the columns and says what it found."""

    columns: DataColumns = field(default_factory=DataColumns)
    """Which column is what, such as {prompt: Question, completion: Reply}, where the names of the
    columns do not tell.
    """

    split: str = "train"
    """Split to train on, for data sets that have several."""

    max_seq_len: int = 1024
    """Tokens per row at most; longer examples are cut and counted."""

    packing: bool = True
    """Put several examples into one row, with attention kept inside each example."""

    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens carry loss: the answers only, or every token."""

    eval_fraction: float = 0.02
    """Share of the examples held out for evaluation; 0 holds none out."""

    shuffle: bool = True
    """Visit the examples in a seeded random order, a new one each epoch; without it several sources
    come one after another.
    """

    @property
    def title(self) -> str:
        """The sources in words."""
        if isinstance(self.source, str):
            return self.source
        return " + ".join(
            part.source if part.weight == 1 else f"{part.weight:g} x {part.source}"
            for part in self.source
        )

    def parts(self) -> list[tuple[DataConfig, float]]:
        """Each source as the settings of it alone, and its weight."""
        if isinstance(self.source, str):
            return [(self, 1.0)]
        return [
            (
                dataclasses.replace(
                    self,
                    source=part.source,
                    split=part.split or self.split,
                    format=part.format or self.format,
                    columns=part.columns if part.columns.named() else self.columns,
                ),
                part.weight,
            )
            for part in self.source
        ]


FORMAT_PARTS = {
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("messages", "system", "tools"),
    "alpaca": ("prompt", "completion", "input", "system"),
    "prompt_completion": ("prompt", "completion", "system", "tools"),
    "text": ("text",),
}
"""What an example of each format is made of, as `data.columns` calls it."""


def check_columns(data: DataConfig) -> None:
    """Raises ConfigError for columns that no format, or not the wanted one, can have together."""
    named, wanted = data.columns.named(), data.format
    for part, column in named.items():
        if not column:
            raise ConfigError(
                f"data.columns.{part}", "this names no column; give its name, or null."
            )
        twice = next(
            (other for other, taken in named.items() if other != part and taken == column), None
        )
        if twice is not None:
            raise ConfigError(
                f"data.columns.{part}",
                f"the column {column} is also named as the {twice}; name another one.",
            )
        if wanted != "auto" and part not in FORMAT_PARTS[wanted]:
            raise ConfigError(
                f"data.columns.{part}",
                f"data.format is {wanted}, which has {', '.join(FORMAT_PARTS[wanted])}; "
                "set data.format to auto, or this to null.",
            )
        clash = next(
            (
                other
                for other in named
                if not any({part, other} <= {*parts} for parts in FORMAT_PARTS.values())
            ),
            None,
        )
        if clash is not None:
            raise ConfigError(
                f"data.columns.{clash}",
                f"no example has both {part} and {clash}; set one of them to null.",
            )
    if not any({*named} <= {*parts} for parts in FORMAT_PARTS.values()):
        raise ConfigError(
            "data.columns.tools", "no format has both input and tools; set one of them to null."
        )
