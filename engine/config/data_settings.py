"""The data section of a `TrainConfig` says what the sources are, which format and columns they
have, and how they become rows. No torch is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from engine.config.limits import LARGEST
from engine.errors import ConfigError

DataFormat = Literal[
    "auto",
    "messages",
    "sharegpt",
    "gemini",
    "alpaca",
    "prompt_completion",
    "preference",
    "arena",
    "oasst",
    "segments",
    "tokens",
    "text",
]
DroppedTurns = Literal["turn_by_turn", "refuse"]
Reading = Literal["examples", "pairs", "labels"]
"""Rows become examples, pairs of answers of which both are read, or answers with a mark."""
TypedTokens = Literal["text", "tokens"]
LongTexts = Literal["continue", "cut", "skip"]

CHAT_ROLES = ("user", "assistant", "system", "tool", "developer")
"""The roles of chat templates."""
MOST_PASSES = 1000
"""One epoch makes at most this many passes over the examples of one source among several."""


@dataclass(frozen=True)
class DataColumns:
    """What each column holds if the column names do not show it. A required part that is not named
    here is found by its usual names. Once a part is named, `input`, `history`, `system` and `tools`
    are used only if they are named too.
    """

    messages: str | None = None
    """Column with the turns of a conversation: a list of {role, content} or {from, value}."""

    prompt: str | None = None
    """Column with the prompt, the user's turn."""

    completion: str | None = None
    """Column with the answer, the assistant's turn."""

    input: str | None = None
    """This column is added to the prompt."""

    history: str | None = None
    """Column with the earlier turns: a list of [prompt, answer]."""

    chosen: str | None = None
    """Column with the better one of two answers, which is trained."""

    rejected: str | None = None
    """Column with the other one. Runs that learn from pairs read it; it is never an example."""

    system: str | None = None
    """Column with the system turn."""

    tools: str | None = None
    """Column with the tools that the chat template is told of."""

    text: str | None = None
    """Column with a text, and every token of it is trained."""

    def named(self) -> dict[str, str]:
        """Returns the named columns, by the part of an example that each holds."""
        return {part: column for part, column in vars(self).items() if column is not None}


@dataclass(frozen=True)
class DataSource:
    """A mix has several of these data sets."""

    source: str = ""
    """It is written as `data.source` is for a single data set."""

    weight: float = 1.0
    """A pass visits each training example of this source so often: 0.5 takes a fixed half of
    them, 2 takes each twice.
    """

    split: str | None = None
    """This split of the source is read; null takes `data.split`."""

    format: DataFormat | None = None
    """The source has this format; null takes `data.format`."""

    columns: DataColumns = field(default_factory=DataColumns)
    """The source has these columns; when none is named, it has those of `data.columns`."""


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data set."""

    source: str | tuple[DataSource, ...] = ""
    """This is a .jsonl, .json, .csv, .tsv, .txt, .md, .parquet, .arrow, .feather or .xlsx file (a
    text also as .gz, .zst, .bz2 or .xz), a folder of such files or one that `datasets` saved, an
    entry of a registry (path/dataset_info.json:name), or a Hugging Face data set id. Several are
    mixed when this is a list of {source, weight, split, format, columns}.
    """

    format: DataFormat = "auto"
    """This format tells how a row becomes tokens; `auto` looks at the columns and says what it
    found.
    """

    columns: DataColumns = field(default_factory=DataColumns)
    """Say here which column is what, such as {prompt: Question, completion: Reply}, where the names
    of the columns do not tell.
    """

    split: str = "train"
    """The run reads this split, where a data set has several."""

    max_seq_len: Annotated[int, Meta(ge=2, le=LARGEST["max_seq_len"])] = 1024
    """Largest number of tokens of a row. Longer examples are cut and counted; plain texts continue
    in the next row.
    """

    long_texts: LongTexts = "continue"
    """A plain text that is longer than a row continues in the next rows, and no token is lost. Or
    it ends with its first row, and is counted as cut; or it is skipped. A .txt or .md file is one
    text.
    """

    overlap: int = 0
    """Where a text continues, a row begins with so many tokens of the row before it. They are
    context and are not trained again. With 0 it is the one token from which the next is predicted.
    """

    packing: bool = True
    """Several examples go into one row, and attention stays inside each example. Without it, a
    shuffled pass puts rows of similar length into one step, so that little is padded.
    """

    train_on: Literal["assistant", "all"] = "assistant"
    """Only these tokens carry loss: those of the answers, or all."""

    dropped_turns: DroppedTurns = "turn_by_turn"
    """A chat template may leave out a turn, such as the system's, once an answer follows. Then each
    answer is trained after the prompt that the template makes for it, which usually has the turn;
    or such rows are refused. Both are counted.
    """

    typed_tokens: TypedTokens = "text"
    """Somebody may have typed the name of a special token into a turn, such as <think>. It is
    trained as text, which nobody can misuse, or as the token that a server would make of it.
    """

    add_tokens: tuple[str, ...] = ()
    """The tokenizer gets these tokens, such as <tool>: each is one token wherever it stands in the
    data, and is never split. Embedding and head grow where they have no rows left for them. Tokens
    that the tokenizer has are not added again.
    """

    roles: tuple[str, ...] = ()
    """Names of roles that are in no table, each with what it is, such as customer=user or
    agent=assistant. A role that the chat template itself knows is named as itself: critic=critic.
    """

    unused_flags: tuple[str, ...] = ()
    """These keys of rows and turns are true or false, or 0 or 1, and say nothing of what is
    trained. A run refuses any such key that it does not know and that is not named here.
    """

    eval_fraction: Annotated[float, Meta(ge=0, le=0.9)] = 0.02
    """Share of the examples that are for validation; 0 for none."""

    shuffle: bool = True
    """Examples are visited in a seeded random order, a new one each pass. Without it, several
    sources come one after another.
    """

    @property
    def reads(self) -> Reading:
        """What rows become. `engine.config.preference_settings` has data that become pairs."""
        return "examples"

    @property
    def title(self) -> str:
        """The title names the sources in words."""
        if isinstance(self.source, str):
            return self.source
        titles = []
        for part in self.source:
            weight = "" if part.weight == 1 else f"{part.weight:g} x "
            titles.append(f"{weight}{part.source}")
        return " + ".join(titles)

    @property
    def only_source(self) -> str:
        """The source if there is only one, as in the settings that `parts` returns."""
        assert isinstance(self.source, str), "several sources are read one by one, see `parts`"
        return self.source

    def validation_count(self, total: int) -> int:
        """Returns how many of `total` rows are for validation. With two rows or more, at least one
        is, but never all.
        """
        if self.eval_fraction == 0 or total < 2:
            return 0
        return min(max(1, round(total * self.eval_fraction)), total - 1)

    def parts(self) -> list[tuple[DataConfig, float]]:
        """Returns the settings of each source alone, with its weight."""
        if isinstance(self.source, str):
            return [(self, 1.0)]
        return [(self._of_part(part), part.weight) for part in self.source]

    def _of_part(self, part: DataSource) -> DataConfig:
        return dataclasses.replace(
            self,
            source=part.source,
            split=part.split or self.split,
            format=part.format or self.format,
            columns=part.columns if part.columns.named() else self.columns,
        )

    def check(self) -> None:
        """Raises ConfigError for the first rule that is broken."""
        for part, weight in self.parts():
            if not part.only_source.strip():
                raise ConfigError(
                    "data.source",
                    "no data set is given; name a file, a folder or a Hugging Face id.",
                )
            if not 0 < weight <= MOST_PASSES:
                raise ConfigError(
                    "data.source",
                    f"the weight {weight:g} of {part.only_source} is outside 0 to {MOST_PASSES} (0 "
                    "excluded); 1 visits every example once a pass.",
                )
        for part, _ in self.parts():
            check_columns(part)
        if not 0 <= self.overlap <= self.max_seq_len // 2:
            raise ConfigError(
                "data.overlap",
                f"{self.overlap:,} is outside 0 to {self.max_seq_len // 2:,}, half of "
                "data.max_seq_len; choose a smaller overlap or longer rows.",
            )
        self._check_added_tokens()
        self._check_roles()

    def _check_roles(self) -> None:
        names = [pair.partition("=")[0].strip() for pair in self.roles]
        for name, pair in zip(names, self.roles):
            role = pair.partition("=")[2].strip()
            if not name or role not in (*CHAT_ROLES, name):
                raise ConfigError(
                    "data.roles",
                    f"{pair!r} does not say what a role is; write NAME=ROLE with the role "
                    f"{', '.join(CHAT_ROLES)}, or the name again if the chat template has it.",
                )
            if names.count(name) > 1:
                raise ConfigError("data.roles", f"{name} is named twice; name it once.")

    def _check_added_tokens(self) -> None:
        named: set[str] = set()
        for token in self.add_tokens:
            if not token.strip():
                raise ConfigError(
                    "data.add_tokens",
                    f"{token!r} has no letter or sign; give each token a text such as <tool>.",
                )
            if token in named:
                raise ConfigError("data.add_tokens", f"{token} is named twice; name it once.")
            named.add(token)
        ready = [part.only_source for part, _ in self.parts() if part.format == "tokens"]
        if self.add_tokens and ready:
            raise ConfigError(
                "data.add_tokens",
                f"the rows of {ready[0]} are token ids (data.format is tokens), which no tokenizer "
                "reads; save the tokenizer that made them with the model, and leave this empty.",
            )


FORMAT_PARTS = {
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("messages", "system", "tools"),
    "gemini": ("messages", "system", "tools"),
    "alpaca": ("prompt", "completion", "input", "system", "history", "tools"),
    "prompt_completion": ("prompt", "completion", "system", "history", "tools"),
    "preference": ("chosen", "rejected", "prompt", "input", "system", "history", "tools"),
    "arena": (),
    "oasst": (),
    "segments": (),
    "tokens": (),
    "text": ("text",),
}
"""An example of each format is made of these parts, as `data.columns` calls them. The columns of a
format without parts have fixed names.
"""


def check_columns(data: DataConfig) -> None:
    """Raises ConfigError for columns that no format, or not the wanted format, can have
    together.
    """
    named = data.columns.named()
    for part, column in named.items():
        if not column:
            raise ConfigError(
                f"data.columns.{part}", "this names no column; give its name, or null."
            )
        for other, other_column in named.items():
            if other != part and other_column == column:
                raise ConfigError(
                    f"data.columns.{part}",
                    f"the column {column} is also named as the {other}; name another one.",
                )
        if data.format != "auto" and part not in FORMAT_PARTS[data.format]:
            parts = ", ".join(FORMAT_PARTS[data.format]) or "columns of fixed names"
            raise ConfigError(
                f"data.columns.{part}",
                f"data.format is {data.format}, which has {parts}; set data.format to auto, or "
                "this to null.",
            )
        for other in named:
            if not _have_a_format({part, other}):
                raise ConfigError(
                    f"data.columns.{other}",
                    f"no example has both {part} and {other}; set one of them to null.",
                )


def _have_a_format(parts: set[str]) -> bool:
    """Whether examples of some format can have all of these parts."""
    return any(parts <= set(of_format) for of_format in FORMAT_PARTS.values())
