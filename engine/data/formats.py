"""From a row's columns to what is said in it: which column is which, and a row as a conversation, a
pair or a text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from engine.config.data_settings import DataColumns
from engine.data.sources import Row, Source
from engine.data.text_files import TURN_COLUMNS
from engine.errors import DataError

Message = dict[str, Any]

ROWS_TO_DETECT = 20
"""The first rows of a source, by which its columns are told."""


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them. Messages before `context` are never trained on."""

    messages: list[Message]
    context: int = 0
    tools: list[Any] | None = None
    """JSON schemas of the functions that may be called, for the chat template."""

    @property
    def asked(self) -> str:
        """The last thing said before the last answer."""
        for i in range(len(self.messages) - 1, 0, -1):
            if self.messages[i]["role"] == "assistant":
                return str(self.messages[i - 1].get("content", ""))
        return ""


@dataclass(frozen=True)
class Pair:
    """One question and its answer. `separator` stands between them only where there is no chat
    template.
    """

    prompt: str
    completion: str
    system: str = ""
    separator: str = ""

    @property
    def asked(self) -> str:
        return self.prompt

    def conversation(self) -> Conversation:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation(
            [
                *system,
                {"role": "user", "content": self.prompt},
                {"role": "assistant", "content": self.completion},
            ]
        )


@dataclass(frozen=True)
class Text:
    """A document for continued pre-training."""

    text: str

    @property
    def asked(self) -> str:
        return ""


Example = Conversation | Pair | Text

_ALTERNATIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": TURN_COLUMNS},
    "sharegpt": {"messages": ("conversations", "conversation", "messages")},
    "alpaca": {"prompt": ("instruction",), "completion": ("output", "response")},
    "prompt_completion": {
        "prompt": ("prompt", "question"),
        "completion": ("completion", "response", "answer"),
    },
    "text": {"text": ("text", "content")},
}
_OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"system": ("system",), "tools": ("tools",)},
    "sharegpt": {"system": ("system",), "tools": ("tools",)},
    "alpaca": {"input": ("input", "context"), "system": ("system",)},
    "prompt_completion": {"system": ("system",), "tools": ("tools",)},
    "text": {},
}
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
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}


@dataclass(frozen=True)
class ColumnMap:
    """Which column became what."""

    format: str
    detected: bool
    """True when the columns told the format, False when the user did."""
    columns: dict[str, str]
    """Part of an example (messages, prompt, completion, input, system, tools, text) to the column
    that holds it.
    """
    unused: list[str] = field(default_factory=list)

    def meaning(self) -> dict[str, str]:
        """Column name to what it became, in words."""
        return {column: _MEANING[part] for part, column in self.columns.items()}

    def example(self, row: Row, where: str) -> Example | None:
        """The row as an example, or None when it is empty. `where` names the row in an error.
        Raises DataError when a column is missing or holds the wrong type.
        """
        if self.format == "text":
            text = self._text(row, "text", where)
            return Text(text) if text.strip() else None
        system = self._text(row, "system", where) if "system" in self.columns else ""
        if self.format in ("messages", "sharegpt"):
            messages = self._messages(row, "messages", where)
            if system and messages and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": system})
            return Conversation(messages, tools=self._tools(row, where)) if messages else None
        prompt, completion = (
            self._value(row, "prompt", where),
            self._value(row, "completion", where),
        )
        if self.format == "prompt_completion" and (
            isinstance(prompt, list) or isinstance(completion, list)
        ):
            return self._message_pair(row, prompt, completion, system, where)
        prompt, completion = self._text(row, "prompt", where), self._text(row, "completion", where)
        extra = self._text(row, "input", where) if "input" in self.columns else ""
        if extra.strip():
            prompt = f"{prompt}\n\n{extra}" if prompt.strip() else extra
        if not completion.strip():
            return None
        return Pair(prompt, completion, system, separator="\n\n" if self.format == "alpaca" else "")

    def _message_pair(
        self, row: Row, prompt: Any, completion: Any, system: str, where: str
    ) -> Conversation | None:
        before = (
            self._messages(row, "prompt", where)
            if isinstance(prompt, list)
            else [{"role": "user", "content": self._text(row, "prompt", where)}]
        )
        after = (
            self._messages(row, "completion", where)
            if isinstance(completion, list)
            else [{"role": "assistant", "content": self._text(row, "completion", where)}]
        )
        if system and before and before[0]["role"] != "system":
            before.insert(0, {"role": "system", "content": system})
        return Conversation(before + after, len(before), self._tools(row, where)) if after else None

    def _tools(self, row: Row, where: str) -> list[Any] | None:
        value = self._value(row, "tools", where) if "tools" in self.columns else None
        if isinstance(value, str):
            value = _parsed(value) if value.strip() else None
            if value is None and row[self.columns["tools"]].strip():
                raise DataError(
                    f"The column {self.columns['tools']} in {where} is not valid JSON; write a "
                    "list of function schemas."
                )
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise DataError(
                f"The column {self.columns['tools']} in {where} is not a list of function schemas; "
                "write one object for each tool."
            )
        return _valid_tree(value) or None

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
        return _valid(value)

    def _messages(self, row: Row, part: str, where: str) -> list[Message]:
        column, value = self.columns[part], self._value(row, part, where)
        if value is None:
            return []
        if not isinstance(value, list):
            raise DataError(
                f"The column {column} in {where} is {type(value).__name__}, not a list of turns; "
                f"{self.format} needs {_NEEDS[self.format]}."
            )
        role_key, text_key = ("from", "value") if self.format == "sharegpt" else ("role", "content")
        messages = []
        for turn, message in enumerate(value, 1):
            place = f"turn {turn} of {column} in {where}"
            if not isinstance(message, dict) or not isinstance(message.get(role_key), str):
                raise DataError(
                    f"There is no {role_key} in {place}; write every turn as {{{role_key}, "
                    f"{text_key}}}."
                )
            content = _content(message.get(text_key), text_key, place)
            role = message[role_key]
            if self.format == "sharegpt":
                if role.lower() not in _SHAREGPT_ROLES:
                    raise DataError(
                        f"{role!r} in {place} is not a known speaker; use system, human, gpt or "
                        "tool."
                    )
                calls = _spoken_calls(content) if role.lower() == "function_call" else None
                messages.append(
                    {
                        "role": _SHAREGPT_ROLES[role.lower()],
                        "content": "" if calls else content,
                        **({"tool_calls": calls} if calls else {}),
                    }
                )
                continue
            rest = {
                k: _valid_tree(v)
                for k, v in message.items()
                if v is not None and k not in ("role", "content")
            }
            if calls := _tool_calls(rest.pop("tool_calls", None), place):
                rest["tool_calls"] = calls
            messages.append({"role": role, "content": content, **rest})
        return messages


class BrokenText(Exception):
    """Text with half of a surrogate pair, as scraped JSON sometimes has it: no tokenizer takes it."""


def _valid(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BrokenText from None
    return text


def _valid_tree(value: Any) -> Any:
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, dict):
        return {_valid_tree(key): _valid_tree(item) for key, item in value.items()}
    return [_valid_tree(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    """What a text that holds JSON says, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tool_calls(value: Any, place: str) -> list[Any]:
    """Calls as chat templates take them: arguments that are JSON in a text become objects."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(
            f"The tool_calls of {place} are {type(value).__name__}, not a list; write one object "
            "for each call."
        )
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"A call in the tool_calls of {place} has no function name; write it as "
                "{type: function, function: {name, arguments}}."
            )
        if isinstance(function.get("arguments"), str):
            arguments = _parsed(function["arguments"])
            if isinstance(arguments, dict):
                function = function | {"arguments": _valid_tree(arguments)}
        calls.append(
            call | {"function": function}
            if "function" in call
            else {"type": "function", "function": function}
        )
    return calls


def _spoken_calls(text: str) -> list[Any] | None:
    """The calls that a ShareGPT turn `function_call` holds as JSON, or None when it holds something
    else.
    """
    said = _parsed(text)
    said = said if isinstance(said, list) else [said]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in said):
        return None
    return _tool_calls(_valid_tree(said), "the turn")


def _content(value: Any, key: str, place: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in value):
            return _valid("".join(part["text"] for part in value))
        raise DataError(
            f"The {key} of {place} holds something other than text; only text can be trained on."
        )
    raise DataError(f"The {key} of {place} is {type(value).__name__}, not text; write it as text.")


def map_columns(
    wanted: str, rows: list[Row], source: Source, columns: DataColumns = DataColumns()
) -> ColumnMap:
    """Find the columns of format `wanted`, or, for `auto`, the format whose columns are there.
    `columns` are those that the user named.

    `rows` are the first few of the data set. Raises DataError when no format, or not the wanted
    one, fits, and for a column that is named and not there.
    """
    names, named = first_values(rows), columns.named()
    if fitting := fitting_formats(wanted, names, named):
        name, found = fitting[0]
        return ColumnMap(
            name,
            wanted == "auto" and not named,
            found,
            [c for c in names if c not in found.values()],
        )
    found = ", ".join(names) if names else "none"
    for part, column in named.items():
        if column not in names:
            raise DataError(
                f"data.columns.{part} is {column}, but {source.name} has the columns {found}; name "
                "one of these."
            )
    if named:
        wants = [
            part
            for part in ("messages", "prompt", "completion", "text")
            if part not in named
            and any(
                {*named, part} <= {*_ALTERNATIVES[name], *_OPTIONAL[name]} for name in _ALTERNATIVES
            )
        ]
        raise DataError(
            f"In data.columns, only {' and '.join(named)} {'are' if len(named) > 1 else 'is'} "
            f"named, and {source.name} ({found}) has no column with a usual name for the rest; set "
            f"data.columns.{wants[0]} too."
        )
    if wanted == "auto":
        raise DataError(
            f"The columns of {source.name} ({found}) fit no known format; name them in "
            "data.columns, or rename them to messages, conversations, instruction and output, "
            "prompt and completion, or text."
        )
    raise DataError(
        f"data.format is {wanted}, which needs {_NEEDS[wanted]}, but {source.name} has the columns "
        f"{found}; rename them or set data.format to auto."
    )


def first_values(rows: list[Row]) -> dict[str, Any]:
    """Every column of these rows, in order, with its first value that is not empty."""
    names: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            if not names.get(name):
                names[name] = value
    return names


def fitting_formats(
    wanted: str, names: dict[str, Any], named: dict[str, str]
) -> list[tuple[str, dict[str, str]]]:
    """(format, its columns) of every format that the columns `names` can be read as, the one that
    is taken first. `named` are columns by part, as the user named them.
    """
    formats = list(_ALTERNATIVES) if wanted == "auto" else [wanted]
    if named and "input" not in named:
        formats.sort(
            key=lambda name: name == "alpaca"
        )  # whoever names a prompt means it as it stands
    fitting = [
        (name, columns)
        for name in formats
        if (columns := _columns_of(name, names, named)) is not None
    ]
    # When only the names fit, that format says which row holds the wrong type.
    return sorted(fitting, key=lambda fit: not looks_like(*fit, names))


def rivals(columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Whether another column has as usual a name for a part that has to be there, and nothing else
    takes it.
    """
    usual = {
        part: {column for parts in _ALTERNATIVES.values() for column in parts.get(part, ())}
        for part in columns
    }
    return any(
        part in ("messages", "prompt", "completion", "text")
        and other in names
        and other not in columns.values()
        for part in columns
        for other in usual[part]
    )


def _columns_of(name: str, names: dict[str, Any], named: dict[str, str]) -> dict[str, str] | None:
    if not {*named} <= {*_ALTERNATIVES[name], *_OPTIONAL[name]} or not {*named.values()} <= {
        *names
    }:
        return None
    columns = {}
    for part, alternatives in _ALTERNATIVES[name].items():
        column = named.get(part) or next(
            (c for c in alternatives if c in names and c not in named.values()), None
        )
        if column is None:
            return None
        columns[part] = column
    if named:
        return columns | named
    for part, alternatives in _OPTIONAL[name].items():
        column = next((c for c in alternatives if c in names), None)
        if column is not None:
            columns[part] = column
    return columns


def looks_like(name: str, columns: dict[str, str], names: dict[str, Any]) -> bool:
    """Whether the first values are of the kinds that the format has; a list of turns tells messages
    from sharegpt.
    """
    first = names[next(iter(columns.values()))]
    if name in ("messages", "sharegpt"):
        key = "from" if name == "sharegpt" else "role"
        return (
            isinstance(first, list)
            and bool(first)
            and isinstance(first[0], dict)
            and key in first[0]
        )
    return (
        first is None
        or isinstance(first, str)
        or (name == "prompt_completion" and isinstance(first, list))
    )
