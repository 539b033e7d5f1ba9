"""Conversations of Gemini: `contents` is a list of {role, parts}."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeGuard

from engine.data.formats.calls import read_tools
from engine.data.formats.example import Example
from engine.data.formats.flags import take_weight
from engine.data.formats.format import SYSTEM, TOOLS, Format
from engine.data.formats.roles import role_of
from engine.data.formats.row_parts import Parts
from engine.data.formats.turns import Turn, TurnSettings, conversation, with_system
from engine.data.formats.values import (
    is_blank,
    listed,
    parsed_list,
    type_text,
    valid_text,
    valid_tree,
)
from engine.data.sources.not_trained import WITHOUT
from engine.errors import DataError


def _read_gemini(parts: Parts) -> Example | None:
    value = parts.value("messages")
    if is_blank(value):
        return None
    if not isinstance(value, list | tuple):
        raise DataError(
            f"The column {parts.place('messages')} is {type_text(value)}, not a list of turns; "
            f"write {parts.needs}."
        )
    turns: list[Turn] = []
    for number, turn in enumerate(value):
        place = f"turn {number + 1} of {parts.place('messages')}"
        made = _gemini_turns(turn, place, parts.settings)
        turns += [replace(one, numbers=(number,)) for one in made]
    turns = with_system(parts.system(), parts.weighted(turns, len(value)))
    return conversation(turns, tools=_gemini_tools(parts))


def _gemini_turns(turn: Any, place: str, settings: TurnSettings) -> list[Turn]:
    """Returns the messages of a turn {role, parts}: one, and one for each result of a function.
    Without a role it is the user's.
    """
    keys = {}
    if isinstance(turn, dict) and all(isinstance(key, str) for key in turn):
        keys = {key: inner for key, inner in turn.items() if inner is not None}
    parts = keys.pop("parts", None)
    if isinstance(parts, dict):
        parts = [parts]
    name = keys.pop("role", None) or "user"
    if not isinstance(parts, list | tuple) or not isinstance(name, str):
        raise DataError(
            f"There is no turn of user or model in {place}; write every turn as {{role, parts}}."
        )
    role, _ = role_of(valid_text(name), place, settings.roles)
    for key in settings.unused & set(keys):
        del keys[key]
    weight = take_weight(keys, role == "assistant", place)
    if keys:
        raise DataError(
            f"There is an unknown key beside role and parts in {place} ({listed(keys)}); remove it."
        )
    texts: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: list[Any] = []
    results: list[Turn] = []
    for part in parts:
        _add_gemini(part, texts, calls, results, place)
    message: dict[str, Any] = {"role": role, "content": texts["content"]}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message["tool_calls"] = calls
    if results and not texts["content"] and not calls:
        return results
    made = Turn(message, 1.0 if weight is None else weight, weight is not None)
    return [*results, made]


def _add_gemini(
    part: Any, texts: dict[str, str], calls: list[Any], results: list[Turn], place: str
) -> None:
    """Adds one part of a turn to its texts, to its calls, or to the results of functions."""
    keys = {}
    if isinstance(part, dict):
        keys = {key: value for key, value in part.items() if value is not None}
    thought = keys.pop("thought", False) is True
    for signature in ("thoughtSignature", "thought_signature"):
        keys.pop(signature, None)
    kind, value = next(iter(keys.items()), (None, None))
    if kind == "text" and isinstance(value, str):
        texts["reasoning_content" if thought else "content"] += valid_text(value)
    elif kind in ("functionCall", "function_call") and _is_named(value):
        arguments = valid_tree(value.get("args") or {}, place)
        function = {"name": valid_text(value["name"]), "arguments": arguments}
        calls.append({"type": "function", "function": function})
    elif kind in ("functionResponse", "function_response") and _is_named(value):
        answer = json.dumps(valid_tree(value.get("response"), place), ensure_ascii=False)
        results.append(Turn({"role": "tool", "content": answer, "name": valid_text(value["name"])}))
    elif kind in ("inlineData", "inline_data", "fileData", "file_data"):
        raise DataError(f"There is an image, a sound or a file in {place}, {WITHOUT}.")
    else:
        raise DataError(
            f"A part of {place} is neither text nor a function's call or response; write it as "
            "{text: ...}."
        )
    if len(keys) > 1:
        raise DataError(f"A part of {place} holds several things; write a part for each.")


def _is_named(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _gemini_tools(parts: Parts) -> list[Any] | None:
    """Returns the function declarations of a row as tools."""
    if "tools" not in parts.columns:
        return None
    value = parsed_list(parts.optional("tools"))
    place = f"The column {parts.place('tools')}"
    if is_blank(value) or isinstance(value, str):
        return read_tools(value, place)
    found: list[Any] = []
    for tool in value if isinstance(value, list | tuple) else [value]:
        declared = None
        if isinstance(tool, dict):
            declared = tool.get("functionDeclarations", tool.get("function_declarations"))
        found += declared if isinstance(declared, list) else [tool]
    return _lower_types(read_tools(found, place))


def _lower_types(value: Any) -> Any:
    """Returns schemas with the types of JSON schema: Gemini writes them in capital letters."""
    if isinstance(value, list):
        return [_lower_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _lower_types(item) for key, item in value.items()}
    if isinstance(found.get("type"), str):
        found["type"] = found["type"].lower()
    return found


GEMINI = Format(
    name="gemini",
    required={"messages": ("contents",)},
    optional={"system": SYSTEM, "tools": TOOLS},
    read=_read_gemini,
    looks_like=lambda first: _is_gemini(first["messages"]),
    needs="a column contents: a list of {role, parts}",
    weak=frozenset({"contents"}),
)


def _is_gemini(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and ("parts" in value[0])
    )
