"""Tool calls and tools are put into the one form that chat templates expect."""

from __future__ import annotations

from typing import Any

from engine.errors import DataError
from engine.examples.example import Arguments
from engine.examples.values import in_words, parsed_json, parsed_list, valid_tree

_MOST_QUOTES = 8
"""Arguments may be JSON within JSON text so many times."""


def tool_calls(value: Any, place: str) -> list[Any]:
    """Returns the calls of a turn: a list, or one call. Arguments given as JSON text become
    objects. Raises DataError for anything else.
    """
    value = parsed_list(value)
    if value is None:
        return []
    calls = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str | bytes | bool | int | float):
        raise DataError(
            f"The tool_calls of {place} are {in_words(value)}, not a list; write one object for "
            "each call."
        )
    return [_tool_call(valid_tree(call, place), place) for call in calls]


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    call = parsed_list(call)
    function = parsed_list(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"A call in the tool_calls of {place} has no function name; write it as "
            "{type: function, function: {name, arguments}}."
        )
    if "arguments" in function:
        function = function | {"arguments": _arguments(function["arguments"], place)}
    if "function" in call:
        return call | {"function": function}
    return {"type": "function", "function": function}


def _arguments(value: Any, place: str) -> Any:
    """Returns the object that the arguments of a call are. Some programs write them as JSON text,
    and some write that text as JSON text again. Other texts are returned unchanged.
    """
    inner, text = value, None
    for _ in range(_MOST_QUOTES):
        if not isinstance(inner, str):
            break
        inner, text = parsed_json(inner), inner
    if not isinstance(inner, dict):
        return value
    arguments = valid_tree(inner, place)
    return arguments if text is None else Arguments(arguments, text)


def spoken_calls(text: str, place: str) -> list[Any] | None:
    """Returns the calls that a turn from `function_call` holds as JSON text, or None when it holds
    something else.
    """
    said = parsed_json(text)
    calls = said if isinstance(said, list) else [said]
    if not calls or not all(
        isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
    ):
        return None
    return tool_calls(calls, place)


def read_tools(value: Any, place: str) -> list[Any] | None:
    """Returns the tools of a row, a list or its JSON text, or None if there are none. A function
    that is not within {type: function, function} is put there.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = parsed_json(value)
        if value is None:
            raise DataError(f"{place} is not valid JSON; write a list of function schemas.")
    if value is None:
        return None
    tools = [parsed_list(tool) for tool in value] if isinstance(value, list | tuple) else [None]
    if not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{place} is not a list of function schemas; write one object for each tool."
        )
    return [_tool(tool) for tool in valid_tree(tools, place)] or None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    is_bare = isinstance(tool.get("name"), str) and tool.get("type", "function") == "function"
    if "function" in tool or not is_bare:
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}
