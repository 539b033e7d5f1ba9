"""These functions turn the turns of a conversation in a data set into messages for chat templates.

- The `messages` format has turns {role, content}, with tool calls in `tool_calls`.
- The `sharegpt` format has turns {from, value}. A turn from `function_call` holds its calls as JSON
  text.
- Text with half of a surrogate pair is refused: no tokenizer accepts it.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import DataError
from engine.examples.example import Message

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


class BrokenText(Exception):
    """A text has half of a surrogate pair, as scraped JSON sometimes does. No tokenizer accepts
    it.
    """


def valid_text(text: str) -> str:
    """Checks `text` and returns it. Raises BrokenText if it is not valid Unicode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BrokenText from None
    return text


def valid_tree(value: Any) -> Any:
    """Returns a copy of a nested value. Raises BrokenText if a text in it is not valid Unicode."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_tree(key): valid_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [valid_tree(item) for item in value]
    return value


def parsed_json(text: str) -> Any:
    """Returns the value of a JSON text, or None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def role_message(turn: Any, place: str) -> Message:
    """Returns the message of a turn {role, content, ...}. Keys without a value are left out. For
    anything else, raises DataError with `place`.
    """
    _refuse_other_turns(turn, "role", "content", place)
    content = _content(turn.get("content"), "content", place)
    rest = {
        key: valid_tree(value)
        for key, value in turn.items()
        if value is not None and key not in ("role", "content")
    }
    calls = _tool_calls(rest.pop("tool_calls", None), place)
    if calls:
        rest["tool_calls"] = calls
    return {"role": turn["role"], "content": content, **rest}


def sharegpt_message(turn: Any, place: str) -> Message:
    """Returns the message of a turn {from, value}. For anything else, raises DataError with
    `place`.
    """
    _refuse_other_turns(turn, "from", "value", place)
    content = _content(turn.get("value"), "value", place)
    speaker = turn["from"].lower()
    if speaker not in _SHAREGPT_ROLES:
        raise DataError(
            f"{turn['from']!r} in {place} is not a known speaker; use system, human, gpt or tool."
        )
    role = _SHAREGPT_ROLES[speaker]
    calls = _spoken_calls(content) if speaker == "function_call" else None
    if calls:
        return {"role": role, "content": "", "tool_calls": calls}
    return {"role": role, "content": content}


def _refuse_other_turns(turn: Any, role_key: str, text_key: str, place: str) -> None:
    if not isinstance(turn, dict) or not isinstance(turn.get(role_key), str):
        raise DataError(
            f"There is no {role_key} in {place}; write every turn as {{{role_key}, {text_key}}}."
        )


def _content(value: Any, key: str, place: str) -> str:
    """Returns the text of a turn, which may be a list of {type: text, text}."""
    if value is None:
        return ""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in value):
            return valid_text("".join(part["text"] for part in value))
        raise DataError(
            f"The {key} of {place} holds something other than text; only text can be trained on."
        )
    raise DataError(f"The {key} of {place} is {type(value).__name__}, not text; write it as text.")


# ---------------------------------------------------------------------- tool calls


def _tool_calls(value: Any, place: str) -> list[Any]:
    """Returns calls in the form that chat templates expect: arguments given as JSON text become
    objects.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(
            f"The tool_calls of {place} are {type(value).__name__}, not a list; write one object "
            "for each call."
        )
    return [_tool_call(call, place) for call in value]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"A call in the tool_calls of {place} has no function name; write it as "
            "{type: function, function: {name, arguments}}."
        )
    if isinstance(function.get("arguments"), str):
        arguments = parsed_json(function["arguments"])
        if isinstance(arguments, dict):
            function = function | {"arguments": valid_tree(arguments)}
    if "function" in call:
        return call | {"function": function}
    return {"type": "function", "function": function}


def _spoken_calls(text: str) -> list[Any] | None:
    """Returns the calls that a ShareGPT turn from `function_call` holds as JSON, or None when it
    holds something else.
    """
    said = parsed_json(text)
    calls = said if isinstance(said, list) else [said]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return _tool_calls(valid_tree(calls), "the turn")
