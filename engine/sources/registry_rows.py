"""The rows of an entry of a registry are given the names of columns that Ramstream knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import DataError
from engine.sources.json_files import Row
from engine.sources.not_trained import MEDIA_COLUMNS

ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
"""For each of an entry's names for a column (prompt), this is our name for it."""
SHAREGPT = {"messages": "conversations"}
SHARED = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected"}
"""These columns may be named in entries of each formatting."""
_DEFAULTS = ("prompt", "query", "response", "messages")
"""These columns have our names in files too, if an entry does not name them."""
_ANSWERS = ("chosen", "rejected")
_NEEDED = ("prompt", "response", "messages", "chosen", "rejected")
_KEPT = (*MEDIA_COLUMNS, "kto_tag")
"""Columns with these names are never renamed: a row with a value there is refused."""
SPEAKERS = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""For each speaker, this is an entry's name (user_tag) and ShareGPT's name (human)."""
OPENAI = {"role_tag": "role", "content_tag": "content"}
"""An entry with the formatting openai has these names for the keys of a turn."""


@dataclass(frozen=True)
class Entry:
    """The contents of an `Entry` have been checked."""

    title: str
    """This is the name of the entry in errors."""
    values: dict[str, Any]
    formatting: str
    """It is alpaca, sharegpt or openai."""
    columns: dict[str, str]
    """It gives the name in the file for each of an entry's names for a column."""
    tags: dict[str, str]
    """It gives the name in the file for each of an entry's names for a speaker, or for a key of a
    turn.
    """

    @property
    def is_ranking(self) -> bool:
        """It tells whether each row has a chosen answer and a rejected one."""
        return bool(self.values.get("ranking")) or "chosen" in self.columns

    @property
    def is_text(self) -> bool:
        """It tells whether rows are whole texts: an entry that names only the prompt means that."""
        return (
            self.formatting == "alpaca"
            and list(self.columns) == ["prompt"]
            and not (self.is_ranking)
        )

    def our_names(self) -> dict[str, str]:
        """Returns our name for each column of the file that is used."""
        if self.is_text:
            return {self.columns["prompt"]: "text"}
        names = (ALPACA if self.formatting == "alpaca" else SHAREGPT) | SHARED
        used = {name: ours for name, ours in names.items() if name in self.columns}
        for name in _DEFAULTS:
            # An entry that names the prompt names all that it uses; the answer may go without.
            if name in names and not (name == "query" and "prompt" in self.columns):
                used.setdefault(name, names[name])
        if self.is_ranking:
            used.pop("response", None)
            used |= {"chosen": "chosen", "rejected": "rejected"}
        return {self.columns.get(name, ours): ours for name, ours in used.items()}


class Translation:
    """Renames the columns of an entry's rows to our names."""

    def __init__(self, entry: Entry):
        self._entry = entry
        self._our_names = entry.our_names()
        our_names = self._our_names
        named = entry.columns | {name: name for name in _ANSWERS if name not in entry.columns}
        self._needed = [
            (name, column)
            for name, column in named.items()
            if name in _NEEDED and column in our_names
        ]

    def row(self, row: Row, where: str) -> Row:
        """Returns a row of the data set, found at `where`, under our names. Raises DataError if it
        lacks a column that the entry names.
        """
        for name, column in self._needed:
            if column not in row:
                raise DataError(
                    f"{self._entry.title} takes the column {column} (columns.{name}), which is not "
                    f"in {where}; name one that is there."
                )
        renamed: Row = {}
        for column, value in row.items():
            # Another column that happens to have a name that we know must not be mistaken for it.
            other = column if column in _KEPT else f"{column} (not named)"
            renamed[self._our_names.get(column, other)] = value
        if self._entry.formatting != "alpaca":
            for part in ("conversations", "chosen", "rejected"):
                if part in renamed:
                    renamed[part] = self._speakers(renamed[part])
        return renamed

    def _speakers(self, value: Any) -> Any:
        """Returns a turn, or a list of them, as {from, value, ...} with ShareGPT's names of
        speakers. Values that are not turns are left unchanged; `turns.py` refuses them.
        """
        if isinstance(value, list):
            return [self._speakers(turn) for turn in value]
        tags = self._entry.tags
        if self._entry.formatting == "openai":
            tags = OPENAI | tags
        role_tag = tags.get("role_tag", "from")
        content_tag = tags.get("content_tag", "value")
        if not isinstance(value, dict) or not isinstance(value.get(role_tag), str):
            return value
        speakers = {tags.get(tag, speaker): speaker for tag, speaker in SPEAKERS.items()}
        others = {key: inner for key, inner in value.items() if key not in (role_tag, content_tag)}
        speaker = speakers.get(value[role_tag], value[role_tag])
        return {**others, "from": speaker, "value": value.get(content_tag)}
