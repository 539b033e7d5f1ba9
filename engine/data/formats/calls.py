"""Tool calls and tools in the one form that chat templates expect."""

from __future__ import annotations

from typing import Any

from engine.data.formats.example import Arguments
from engine.data.formats.values import (
    is_blank,
    parsed_json,
    parsed_list,
    type_text,
    valid_text,
    valid_tree,
)
from engine.errors import DataError

_MOST_QUOTES = 8
"""Number of times that arguments may be JSON within JSON text."""
_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Names of a call's arguments, the likeliest first."""
_END_OF_THOUGHTS = "</think>"
_NO_TOOLS = ("null", "None", "{}", "[]")
"""Texts by which a row has no tools."""


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
            f"The tool_calls of {place} are {type_text(value)}, not a list; write one object for "
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
    if "function" in call:
        return call | {"function": _function(function, place)}
    about = {key: function[key] for key in ("id", "index") if key in function}
    bare = {key: value for key, value in function.items() if key not in (*about, "type")}
    return {**about, "type": "function", "function": _function(bare, place)}


def named_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns a call in the form {type: function, function: {name, arguments}}. `call` has a name,
    and its arguments under any of their names; its other keys are left out.
    """
    keys = {key: value for key, value in call.items() if key in ("name", *_ARGUMENTS)}
    return {"type": "function", "function": _function(valid_tree(keys, place), place)}


def _function(function: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the name and the arguments of a call, whatever the name of the arguments is."""
    given = next((key for key in _ARGUMENTS if key in function), None)
    if given is None:
        return function
    value = function[given]
    is_empty = isinstance(value, str) and not value.strip()
    arguments = {} if is_empty else _arguments(value, place)
    return _renamed(function, given, "arguments") | {"arguments": arguments}


def _renamed(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Returns `values`, in their order, with the key `new` in the place of `old`."""
    names = {old: new}
    return {names.get(key, key): value for key, value in values.items()}


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


def spoken_calls(content: Any, place: str) -> tuple[str, list[Any]]:
    """Returns the calls of a turn that holds nothing else, as JSON text or as objects, and the
    thoughts within <think> and </think> before them, with these tags. Raises DataError if it holds
    something else.
    """
    thoughts, parsed = "", content
    if isinstance(content, str):
        parsed = parsed_json(content)
        before, tag, behind = content.rpartition(_END_OF_THOUGHTS)
        if parsed is None and tag:
            thoughts, parsed = valid_text(before + tag), parsed_json(behind)
    calls = parsed if isinstance(parsed, list | tuple) else [parsed]
    calls = [parsed_list(call) for call in calls]
    if not calls or not all(isinstance(call, dict) and _has_name(call) for call in calls):
        raise DataError(
            f"There is no call in {place}, whose role says that it is one; write its content as "
            "JSON {name, arguments}, or its role as assistant to train its text as it is."
        )
    return thoughts, tool_calls(calls, place)


def _has_name(call: dict[str, Any]) -> bool:
    function = parsed_list(call.get("function", call))
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# ---------------------------------------------------------------------- tools


def read_tools(value: Any, place: str) -> list[Any] | None:
    """Returns the tools of a row, or None if there are none: a list or its JSON text, one tool, or
    an object with the key tools. A function is put within {type: function, function}, and its
    parameters have that name, whatever Anthropic and Bedrock call them.
    """
    if isinstance(value, str):
        text = value.strip()
        if not text or text in _NO_TOOLS:
            return None
        value = parsed_json(text)
        if value is None:
            raise DataError(f"{place} is not valid JSON; write a list of function schemas.")
    if isinstance(value, dict) and "tools" in value:  # toolConfig of Bedrock
        value = value["tools"]
    if is_blank(value):
        return None
    if isinstance(value, dict) and not set(value) & {"name", "function", "toolSpec"}:
        value = [None]  # it is no tool either
    given = value if isinstance(value, list | tuple) else [value]
    tools = [parsed_list(tool) for tool in given]
    if not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{place} is not a list of function schemas; write one object for each tool."
        )
    # Bedrock marks by cachePoint what a server keeps.
    described = [tool for tool in tools if set(tool) != {"cachePoint"}]
    return [_tool(tool, place) for tool in valid_tree(described, place)] or None


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if isinstance(tool.get("toolSpec"), dict):  # Bedrock
        tool = {key: value for key, value in tool["toolSpec"].items() if key != "type"}
        schema = tool.pop("inputSchema", None)
        tool |= {"parameters": schema.get("json", schema)} if isinstance(schema, dict) else {}
    is_named = isinstance(tool.get("name"), str)
    is_bare = is_named and tool.get("type", "function") in ("function", "custom")
    if "function" in tool or not is_bare:
        return tool
    # `cache_control` of Anthropic is for servers: what to cache.
    function = {key: value for key, value in tool.items() if key not in ("type", "cache_control")}
    if "input_schema" in function:
        if "parameters" in function:
            raise DataError(f"A tool in {place} has both parameters and input_schema; keep one.")
        function = _renamed(function, "input_schema", "parameters")
    return {"type": "function", "function": function}
