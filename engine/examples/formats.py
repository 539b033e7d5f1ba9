"""These functions find out what each column holds, and read rows as examples.

- `map_columns` examines the first rows of a source. It finds the format that fits their columns, or
  the columns for the format in the settings.
- It returns a `ColumnMap`, which reads every row as a conversation, a pair or a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.config.data_settings import DataColumns
from engine.errors import DataError
from engine.examples.example import Conversation, Example, Message, Pair, Text
from engine.examples.turns import (
    parsed_json,
    role_message,
    sharegpt_message,
    valid_text,
    valid_tree,
)
from engine.sources.open_source import Row, Source
from engine.sources.text_files import TURN_COLUMNS

ROWS_TO_DETECT = 20
"""The columns are found from this many rows at the start of a source."""

_REQUIRED: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": TURN_COLUMNS},
    "sharegpt": {"messages": ("conversations", "conversation", "messages")},
    "alpaca": {"prompt": ("instruction",), "completion": ("output", "response")},
    "prompt_completion": {
        "prompt": ("prompt", "question"),
        "completion": ("completion", "response", "answer"),
    },
    "text": {"text": ("text", "content")},
}
"""The parts that an example of each format must have, and the usual names of their columns."""
_OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"system": ("system",), "tools": ("tools",)},
    "sharegpt": {"system": ("system",), "tools": ("tools",)},
    "alpaca": {"input": ("input", "context"), "system": ("system",)},
    "prompt_completion": {"system": ("system",), "tools": ("tools",)},
    "text": {},
}
"""The optional parts of an example of each format, and the usual names of their columns."""
_MAIN_PARTS = ("messages", "prompt", "completion", "text")
"""Each of these parts is required by at least one format."""
_MEANING = {
    "messages": "the turns of the conversation",
    "prompt": "the user's turn",
    "input": "added to the user's turn",
    "completion": "the assistant's turn",
    "system": "the system turn",
    "tools": "the tools that the chat template is told of",
    "text": "the text, every token trained",
}
_NEEDS = {
    "messages": "a column messages: a list of {role, content}",
    "sharegpt": "a column conversations: a list of {from, value}",
    "alpaca": "columns instruction and output",
    "prompt_completion": "columns prompt and completion",
    "text": "a column text",
}


@dataclass(frozen=True)
class ColumnMap:
    """Reads rows as examples of one format, and knows which column holds which part."""

    format: str
    detected: bool
    """It is true when the format was found from the columns, and false when the user chose it."""
    columns: dict[str, str]
    """Each part of an example (messages, prompt, completion, input, system, tools, text) is mapped
    to the name of its column.
    """
    unused: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    """These sentences say what a person must know about how rows are read."""

    def meaning(self) -> dict[str, str]:
        """Returns a description of how each column is used."""
        return {column: _MEANING[part] for part, column in self.columns.items()}

    def example(self, row: Row, where: str) -> Example | None:
        """Returns the row as an example, or None if the row is empty. `where` names the row in
        errors. Raises DataError when a column is missing or holds the wrong type, and BrokenText
        for text that is not valid Unicode.
        """
        if self.format == "text":
            text = self._text(row, "text", where)
            return Text(text) if text.strip() else None
        if self.format in ("messages", "sharegpt"):
            return self._conversation(row, where)
        system = self._optional_text(row, "system", where)
        prompt = self._value(row, "prompt", where)
        completion = self._value(row, "completion", where)
        has_turns = isinstance(prompt, list) or isinstance(completion, list)
        if self.format == "prompt_completion" and has_turns:
            return self._pair_of_turns(row, system, where)
        return self._pair(row, system, where)

    def _conversation(self, row: Row, where: str) -> Conversation | None:
        system = self._optional_text(row, "system", where)
        messages = _with_system(system, self._messages(row, "messages", where))
        if not messages:
            return None
        return Conversation(messages, tools=self._tools(row, where))

    def _pair(self, row: Row, system: str, where: str) -> Pair | None:
        prompt = self._text(row, "prompt", where)
        completion = self._text(row, "completion", where)
        extra = self._optional_text(row, "input", where)
        if extra.strip():
            prompt = f"{prompt}\n\n{extra}" if prompt.strip() else extra
        if not completion.strip():
            return None
        return Pair(prompt, completion, system, separator="\n\n" if self.format == "alpaca" else "")

    def _pair_of_turns(self, row: Row, system: str, where: str) -> Conversation | None:
        """Reads a row whose prompt or completion is a list of turns. The prompt is only context."""
        before = _with_system(system, self._turns_or_text(row, "prompt", "user", where))
        after = self._turns_or_text(row, "completion", "assistant", where)
        if not after:
            return None
        return Conversation(before + after, len(before), tools=self._tools(row, where))

    def _turns_or_text(self, row: Row, part: str, role: str, where: str) -> list[Message]:
        if isinstance(self._value(row, part, where), list):
            return self._messages(row, part, where)
        return [{"role": role, "content": self._text(row, part, where)}]

    # ------------------------------------------------------------------ parts of a row

    def _value(self, row: Row, part: str, where: str) -> Any:
        column = self.columns[part]
        if column not in row and part not in _OPTIONAL[self.format]:
            raise DataError(
                f"The column {column} is missing in {where}; add it or remove that row."
            )
        return row.get(column)

    def _text(self, row: Row, part: str, where: str) -> str:
        value = self._value(row, part, where)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise DataError(
                f"The column {self.columns[part]} in {where} is {type(value).__name__}, not text; "
                "write it as text."
            )
        return valid_text(value)

    def _optional_text(self, row: Row, part: str, where: str) -> str:
        return self._text(row, part, where) if part in self.columns else ""

    def _messages(self, row: Row, part: str, where: str) -> list[Message]:
        column = self.columns[part]
        value = self._value(row, part, where)
        if value is None:
            return []
        if not isinstance(value, list):
            raise DataError(
                f"The column {column} in {where} is {type(value).__name__}, not a list of turns; "
                f"{self.format} needs {_NEEDS[self.format]}."
            )
        read = sharegpt_message if self.format == "sharegpt" else role_message
        return [
            read(turn, f"turn {number} of {column} in {where}")
            for number, turn in enumerate(value, 1)
        ]

    def _tools(self, row: Row, where: str) -> list[Any] | None:
        if "tools" not in self.columns:
            return None
        column = self.columns["tools"]
        value = self._value(row, "tools", where)
        if isinstance(value, str):
            if not value.strip():
                return None
            value = parsed_json(value)
            if value is None:
                raise DataError(
                    f"The column {column} in {where} is not valid JSON; write a list of function "
                    "schemas."
                )
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise DataError(
                f"The column {column} in {where} is not a list of function schemas; write one "
                "object for each tool."
            )
        return valid_tree(value) or None


def _with_system(system: str, messages: list[Message]) -> list[Message]:
    """Returns the messages with a system turn before them, unless they have their own."""
    if not system or not messages or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


# ---------------------------------------------------------------------- which column is which


def map_columns(wanted: str, rows: list[Row], source: Source, columns: DataColumns) -> ColumnMap:
    """Finds the columns of format `wanted` or, for `auto`, the format that fits the columns. `rows`
    are the first few rows of the source, and `columns` are the columns that the user named. Raises
    DataError when the wanted format, or any format for `auto`, does not fit, and for a named column
    that does not exist.
    """
    names = first_values(rows)
    named = columns.named()
    fitting = fitting_formats(wanted, names, named)
    if not fitting:
        raise _no_format(wanted, names, named, source)
    name, found = fitting[0]
    unused = [column for column in names if column not in found.values()]
    return ColumnMap(name, wanted == "auto" and not named, found, unused)


def _no_format(
    wanted: str, names: dict[str, Any], named: dict[str, str], source: Source
) -> DataError:
    """Returns the error that says why no format fits."""
    there = ", ".join(names) if names else "none"
    for part, column in named.items():
        if column not in names:
            return DataError(
                f"data.columns.{part} is {column}, but {source.name} has the columns {there}; name "
                "one of these."
            )
    if named:
        return DataError(
            f"In data.columns, only {' and '.join(named)} {'are' if len(named) > 1 else 'is'} "
            f"named, and {source.name} ({there}) has no column with a usual name for the rest; set "
            f"data.columns.{_first_missing_part(named)} too."
        )
    if wanted == "auto":
        return DataError(
            f"The columns of {source.name} ({there}) fit no known format; name them in "
            "data.columns, or rename them to messages, conversations, instruction and output, "
            "prompt and completion, or text."
        )
    return DataError(
        f"data.format is {wanted}, which needs {_NEEDS[wanted]}, but {source.name} has the columns "
        f"{there}; rename them or set data.format to auto."
    )


def _first_missing_part(named: dict[str, str]) -> str:
    """Returns a main part that is not named, but that some format has together with the named
    parts.
    """
    for part in _MAIN_PARTS:
        together = {*named, part}
        if part not in named and any(together <= _parts_of(name) for name in _REQUIRED):
            return part
    raise AssertionError(f"no format has {', '.join(named)}; `check_columns` refuses that")


def _parts_of(name: str) -> set[str]:
    """Returns the parts that an example of a format can have."""
    return {*_REQUIRED[name], *_OPTIONAL[name]}


def first_values(rows: list[Row]) -> dict[str, Any]:
    """Returns every column of these rows, in order, with its first non-empty value."""
    names: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if not names.get(name):
                names[name] = value
    return names


def fitting_formats(
    wanted: str, names: dict[str, Any], named: dict[str, str]
) -> list[tuple[str, dict[str, str]]]:
    """Returns every format that the columns `names` can be read as, as (format, its columns), best
    first. `named` are the columns that the user named, by part.
    """
    formats = list(_REQUIRED) if wanted == "auto" else [wanted]
    if named and "input" not in named:
        # A user who names a prompt column wants it used unchanged, so alpaca comes last.
        formats.sort(key=lambda name: name == "alpaca")
    fitting = []
    for name in formats:
        columns = _columns_of(name, names, named)
        if columns is not None:
            fitting.append((name, columns))
    # A format of which only the names fit comes later. Its errors then name the row that has the
    # wrong type.
    return sorted(fitting, key=lambda fit: not looks_like(fit[0], fit[1], names))


def rivals(columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Returns whether a main part could equally well be in another column, which has a usual name
    for that part and is not used in `columns`.
    """
    for part in _MAIN_PARTS:
        if part not in columns:
            continue
        for required in _REQUIRED.values():
            for other in required.get(part, ()):
                if other in names and other not in columns.values():
                    return True
    return False


def _columns_of(name: str, names: dict[str, Any], named: dict[str, str]) -> dict[str, str] | None:
    """Returns the column of each part if rows are read as format `name`, or None if a required part
    has no column.
    """
    has_named_parts = set(named) <= _parts_of(name)
    has_named_columns = set(named.values()) <= set(names)
    if not has_named_parts or not has_named_columns:
        return None
    columns = {}
    free = [column for column in names if column not in named.values()]
    for part, usual in _REQUIRED[name].items():
        column = named.get(part) or _first_of(usual, free)
        if column is None:
            return None
        columns[part] = column
    if named:
        return columns | named
    for part, usual in _OPTIONAL[name].items():
        column = _first_of(usual, list(names))
        if column is not None:
            columns[part] = column
    return columns


def _first_of(usual: tuple[str, ...], there: list[str]) -> str | None:
    return next((column for column in usual if column in there), None)


def looks_like(name: str, columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Returns whether the first value of the format's first part has the type that the format
    expects. The keys of a turn distinguish messages from sharegpt.
    """
    first = names[next(iter(columns.values()))]
    if name in ("messages", "sharegpt"):
        key = "from" if name == "sharegpt" else "role"
        has_turns = isinstance(first, list) and bool(first) and isinstance(first[0], dict)
        return has_turns and key in first[0]
    if name == "prompt_completion" and isinstance(first, list):
        return True
    return first is None or isinstance(first, str)
