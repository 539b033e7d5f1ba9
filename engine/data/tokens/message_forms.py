"""The form in which a chat template wants messages; `in_form` writes them so.

In this program every conversation has one form: contents are text, the arguments of calls are
objects, and reasoning is a key of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.data.formats.example import Arguments, Message

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
ReasoningWay = Literal["reasoning_content", "reasoning", "part"]
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_EMPTY_SCHEMA = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Form:
    """What a template wants that differs from the usual form."""

    parts: frozenset[str] = frozenset()
    """Roles whose content is a list of parts, {type: text, text}."""
    developer: str = "developer"
    """The role of developers' turns."""
    reasoning: ReasoningWay = "reasoning_content"
    """The key of an answer's reasoning. `part` is a part of the content, {type: thinking}. The
    library itself gives `thinking` to templates that read it.
    """
    arguments_are_text: bool = False
    no_text: str | None = ""
    """The content of an answer that has calls and no text."""
    fills: tuple[str, ...] = ()
    """Values that are filled in where a row lacks them: the `type` of calls, their `arguments`, the
    `name` of the tool in its result, the `id` in both.
    """
    short_ids: bool = False
    """Ids have nine letters and digits, as Mistral's templates want."""


def in_form(
    messages: Sequence[Message], form: Form, made: dict[tuple[int, ...], Message]
) -> list[Message]:
    """Returns messages in a form. `made` has the messages made so far: one that several chats begin
    with becomes one object, which is sent to the template's process once.
    """
    found: list[Message] = []
    calls = _Calls(form)
    first = id(messages[0]) if messages else 0
    for place, message in enumerate(messages):
        known = (id(message), place, first)
        full = calls.filled(message)
        if known not in made:
            made[known] = _message(full, form)
        found.append(made[known])
    return found


def _message(message: Message, form: Form) -> Message:
    """Returns a message in its form, without keys that have no value: the library leaves them out
    too, because many templates write "None".
    """
    found = message
    if None in message.values():
        found = {key: value for key, value in message.items() if value is not None}
    role = form.developer if message["role"] == "developer" else message["role"]
    if role != message["role"]:
        found = found | {"role": role}
    content = found.get("content")
    thought = next((found[key] for key in REASONING_KEYS if found.get(key)), None)
    if thought and form.reasoning == "reasoning":
        found = found | {"reasoning": thought}
    if role in form.parts and isinstance(content, str):
        found = found | {"content": [{"type": "text", "text": content}]}
    if thought and form.reasoning == "part":
        text = [{"type": "text", "text": content}] if content else []
        found = found | {"content": [{"type": "thinking", "thinking": thought}, *text]}
    if found.get("tool_calls") and form.arguments_are_text:
        found = found | {"tool_calls": [_with_text(call) for call in found["tool_calls"]]}
    if found.get("tool_calls") and not content and form.no_text is None:
        found = found | {"content": None}
    return found


def _with_text(call: Any) -> Any:
    """Returns a call whose arguments are JSON text: that of the row, if it gave text."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | list):
        return call
    text = arguments.text if isinstance(arguments, Arguments) else None
    if text is None:
        text = json.dumps(arguments, ensure_ascii=False)
    function = function | {"arguments": text}
    return call | {"function": function} if "function" in call else function


class _Calls:
    """The calls of a conversation up to a message, and the ids under which they continue."""

    def __init__(self, form: Form):
        self._form = form
        self._made = 0
        self._ids: dict[str, str] = {}
        """The id of a row, and the one that is written."""
        self._waiting: list[tuple[str | None, str]] = []
        """Calls without a result so far: their id in the row, and the name of the tool."""

    def filled(self, message: Message) -> Message:
        """Returns a message with what its form fills in."""
        if not self._form.fills and not self._form.short_ids:
            return message
        if message.get("tool_calls"):
            self._waiting = []
            calls = [self._call(call) for call in message["tool_calls"]]
            return message | {"tool_calls": calls}
        return self._result(message) if message["role"] == "tool" else message

    def _call(self, call: Any) -> Any:
        fills = self._form.fills
        if "type" in fills and "type" not in call:
            call = {"type": "function"} | call
        function = call.get("function", call)
        if "arguments" in fills and function.get("arguments") is None and "function" in call:
            call = call | {"function": function | {"arguments": {}}}
        given = call.get("id")
        if given is None and "id" in fills:
            call = call | {"id": made_id(self._made)}
        elif isinstance(given, str):
            call = call | {"id": self._written(given)}
        self._made += 1
        self._waiting.append((call.get("id"), str(function.get("name"))))
        return call

    def _result(self, message: Message) -> Message:
        fills = self._form.fills
        given = message.get("tool_call_id")
        if isinstance(given, str):
            message = message | {"tool_call_id": self._written(given)}
        own = [each for each in self._waiting if each[0] == message.get("tool_call_id")]
        call = next(iter(own if given else self._waiting), None)
        if call is None:
            return message
        self._waiting.remove(call)
        if "name" in fills and not message.get("name"):
            message = message | {"name": call[1]}
        if "id" in fills and given is None and call[0] is not None:
            message = message | {"tool_call_id": call[0]}
        return message

    def _written(self, given: str) -> str:
        """Returns the id that is written for one of the row: its last nine characters, as servers
        shorten it, if they are letters and digits and no other call has them.
        """
        if not self._form.short_ids:
            return given
        if given not in self._ids:
            short = given[-9:]
            is_taken = short in self._ids.values() or not _SHORT_ID.fullmatch(short)
            self._ids[given] = made_id(len(self._ids)) if is_taken else short
        return self._ids[given]


def made_id(number: int) -> str:
    """Returns an id for a call that has none, of nine letters and digits."""
    return f"call{number:05d}"


def described(tool: Any) -> Any:
    """Returns a tool with an empty description and no parameters where it has none."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    missing = {"description": "", "parameters": _EMPTY_SCHEMA}
    return tool | {"function": missing | {k: v for k, v in function.items() if v is not None}}
