"""The columns of an entry of a registry, and the names of its speakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.data.sources.json_files import Row
from engine.errors import DataError

ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
"""Default column for each of an entry's names for a column (prompt)."""
SHAREGPT = {"messages": "conversations"}
SHARED = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected"}
"""Columns that may be named in entries of each formatting."""
BETWEEN = "\n"
"""Text of LLaMA-Factory between an instruction and its input, where neither is empty."""
_PARTS = {"query": "input", "response": "completion"}
"""Names for a column that differ from those of `data.columns`."""
_ANSWERS = ("chosen", "rejected")
_NEEDED = ("prompt", "response", "messages", *_ANSWERS)
SPEAKERS = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""An entry's name (user_tag) and ShareGPT's name (human) of each speaker."""
OPENAI = {"role_tag": "role", "content_tag": "content"}
"""Names of the keys of a turn for entries with the formatting openai."""


@dataclass(frozen=True)
class Entry:
    """An entry whose contents have been checked."""

    title: str
    """The name of the entry in errors."""
    values: dict[str, Any]
    formatting: str
    """One of alpaca, sharegpt and openai."""
    columns: dict[str, str]
    """Name in the file for each of an entry's names for a column."""
    tags: dict[str, str]
    """Name in the file for each of an entry's names for a speaker, or for a key of a turn."""

    @property
    def is_ranking(self) -> bool:
        """Whether each row has a chosen answer and a rejected one."""
        return bool(self.values.get("ranking")) or "chosen" in self.columns

    @property
    def is_text(self) -> bool:
        """Whether rows are whole texts: an entry that names only the prompt means that."""
        return (
            self.formatting == "alpaca" and list(self.columns) == ["prompt"] and not self.is_ranking
        )

    @property
    def format(self) -> str:
        """Name of the format of the entry's rows."""
        if self.is_text:
            return "text"
        if self.is_ranking:
            return "preference"
        return "alpaca" if self.formatting == "alpaca" else "sharegpt"

    def parts(self) -> dict[str, str]:
        """Returns the column of the file for each part of an example, with the names from
        `data.columns`.
        """
        if self.is_text:
            return {"text": self.columns["prompt"]}
        names = ALPACA if self.formatting == "alpaca" else SHAREGPT
        # An entry that names the prompt names all that it uses.
        defaults = [name for name in names if name in ("prompt", "response", "messages")]
        if "query" in names and "prompt" not in self.columns:
            defaults.append("query")
        if self.is_ranking:
            defaults += _ANSWERS
        used = {name: (names | SHARED)[name] for name in defaults} | self.columns
        if self.is_ranking:
            used.pop("response", None)
            parts = _PARTS | {"messages": "prompt"}
        else:
            parts = _PARTS
        return {parts.get(name, name): column for name, column in used.items()}


class Translation:
    """Checks the rows of an entry, and gives speakers the names of ShareGPT."""

    def __init__(self, entry: Entry):
        self._entry = entry
        named = entry.columns
        if entry.is_ranking:
            named = {name: name for name in _ANSWERS} | named
            named.pop("response", None)
        self._needed = [(name, column) for name, column in named.items() if name in _NEEDED]
        parts = entry.parts()
        self._turns = [parts[part] for part in ("messages", "prompt", *_ANSWERS) if part in parts]
        if entry.formatting == "alpaca":
            self._turns = []

    def row(self, row: Row, where: str) -> Row:
        """Returns a row of the data set, found at `where`. Raises DataError if it lacks a column
        that the entry names.
        """
        for name, column in self._needed:
            if column not in row:
                raise DataError(
                    f"{self._entry.title} takes the column {column} (columns.{name}), which is not "
                    f"in {where}; name one that is there."
                )
        turns = {column: self._speakers(row[column]) for column in self._turns if column in row}
        return row | turns if turns else row

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
