"""The content of a turn: a text, or a list of parts, {type: text, text} of OpenAI and Anthropic,
{text} of Bedrock. Parts may also be calls and their results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.data.formats.calls import named_call, tool_calls
from engine.data.formats.example import Message
from engine.data.formats.flags import KNOWN, take_weight
from engine.data.formats.roles import plain_name
from engine.data.formats.values import (
    is_blank,
    legible,
    parsed_list,
    shown,
    type_text,
    valid_text,
    valid_tree,
)
from engine.data.sources.not_trained import MEDIA_COLUMNS, WITHOUT, medium
from engine.errors import DataError

_TEXTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("reasoning", "thinking")
_CALLS = ("tool_call", "tool_calls", "function_call")
_MEDIA = MEDIA_COLUMNS | {
    "input_image": "an image",
    "video_url": "a video",
    "input_video": "a video",
    "audio_url": "a sound",
    "input_audio": "a sound",
    "file": "a file",
    "input_file": "a file",
    "document": "a file",
}
_BEDROCK = {
    "toolUse": "tool_use",
    "toolResult": "tool_result",
    "reasoningContent": "thinking",
    "cachePoint": "cachePoint",
}
"""Types of the parts that Bedrock writes without one, by the key that each has."""
_IGNORED_TYPES = ("cachePoint",)
"""Types of parts without text, which mark what a server is to cache."""


@dataclass
class Content:
    """What a turn holds, sorted by what it is."""

    text: str = ""
    thoughts: str = ""
    """What the model thinks before its answer."""
    calls: list[Any] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """What calls gave, each as a turn with the role tool."""
    weights: list[float | None] = field(default_factory=list)
    """Weight of each part in training; None for a part that gives none."""

    def add(
        self,
        text: str = "",
        thoughts: str = "",
        calls: Sequence[Any] = (),
        results: Sequence[Message] = (),
    ) -> None:
        """Adds what a part of the turn holds."""
        self.text += text
        self.thoughts += thoughts
        self.calls.extend(calls)
        self.results.extend(results)

    def add_weight(self, weight: float | None) -> None:
        """Adds the weight of the next part, or None."""
        self.weights.append(weight)


def read_content(value: Any, key: str, place: str, is_answer: bool = True) -> Content:
    """Reads the content of a turn. Raises DataError, with the `key` and the `place`, for anything
    but text, calls and what they gave.
    """
    if value is None:
        return Content()
    if isinstance(value, str):
        return Content(valid_text(value))
    if not isinstance(value, list | tuple):
        what = medium(value) or type_text(value)
        raise DataError(f"The {key} of {place} is {what}, not text; write it as text.")
    found = Content()
    for part in value:
        found.add_weight(_add(found, part, f"the {key} of {place}", is_answer))
    return found


def read_system(value: Any, place: str) -> str:
    """Returns the text of a system column: a text, a list of parts or of texts, or one part. Texts
    of a list are joined by line ends. Raises DataError, with `place`, for anything else.
    """
    if isinstance(value, dict):
        for key in ("content", "parts"):
            if value.get(key) is not None:
                return read_system(value[key], place)
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        return "\n".join(map(valid_text, value))
    found = read_content(value, "text", place)
    if found.thoughts or found.calls or found.results:
        raise DataError(f"There is something else than text in {place}; write it as text.")
    return found.text


def _add(found: Content, part: Any, place: str, is_answer: bool) -> float | None:
    """Adds one part of a list to what was found before, and returns its weight in training."""
    if not isinstance(part, dict):
        raise DataError(
            f"A part in {place} is {type_text(part)}; write it as {{type: text, text: ...}}."
        )
    flags = {key: part[key] for key in part if isinstance(key, str) and plain_name(key) in KNOWN}
    weight = take_weight({k: v for k, v in flags.items() if v is not None}, is_answer, place)
    kind = _kind(part, place)
    media = [name for name, inner in part.items() if name in _MEDIA and not is_blank(inner)]
    if kind in _MEDIA or media:
        what = _MEDIA[kind if kind in _MEDIA else media[0]]
        raise DataError(f"There is {what} in {place}, {WITHOUT}.")
    if kind in _CALLS:
        found.add(calls=tool_calls(parsed_list(_value_of(part, kind)), place))
    elif kind in _TEXTS:
        found.add(text=_text_of(part, kind, place))
    elif kind in _THOUGHTS:
        found.add(thoughts=_thoughts_of(part, kind, place))
    elif kind == "tool_use":
        found.add(calls=[_call_of(part.get("toolUse", part), place)])
    elif kind == "tool_result":
        found.add(results=[_result_of(part.get("toolResult", part), place)])
    elif kind not in _IGNORED_TYPES:
        raise DataError(
            f"A part in {place} has the type {shown(kind)}, which is not known; write it as "
            "{type: text, text: ...}."
        )
    return weight


def _kind(part: dict[str, Any], place: str) -> str:
    """Returns the type of a part, under the names of OpenAI and Anthropic."""
    kind = part.get("type")
    if kind is None:
        kinds = [kind for key, kind in _BEDROCK.items() if part.get(key) is not None]
        kind = kinds[0] if len(kinds) == 1 else "text"
        has_text = any(part.get(key) is not None for key in ("text", "value", *_MEDIA))
        if len(kinds) > 1 or has_text is bool(kinds):
            keys = ", ".join(legible(str(key)) for key in part) or "no key"
            raise DataError(
                f"A part in {place} has no type, and its keys ({keys}) do not tell it; write it as "
                "{type: text, text: ...}."
            )
    if not isinstance(kind, str):
        raise DataError(f"A part in {place} has a type that is {type_text(kind)}; write text.")
    return kind


def _call_of(call: Any, place: str) -> dict[str, Any]:
    """Returns a call that Anthropic or Bedrock wrote, in the form of OpenAI."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise DataError(
            f"A call in {place} has no name; write it as {{type: tool_use, id, name, input}}."
        )
    made = named_call(call, place)
    name = call.get("id") or call.get("toolUseId")
    return {"id": valid_text(name), **made} if isinstance(name, str) else made


def _result_of(result: Any, place: str) -> Message:
    """Returns what a call gave, as Anthropic or Bedrock wrote it, in the form of OpenAI."""
    if not isinstance(result, dict):
        raise DataError(
            f"A result in {place} is {type_text(result)}; write it as {{type: tool_result, "
            "tool_use_id, content}."
        )
    content = result.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    text = ""
    for part in parts:
        if isinstance(part, dict) and part.get("json") is not None:
            text += json.dumps(valid_tree(part["json"], place), ensure_ascii=False)
        elif isinstance(part, str):
            text += valid_text(part)
        elif part is not None:
            text += read_system(part, f"a result in {place}")
    made: Message = {"role": "tool", "content": text}
    name = result.get("tool_use_id") or result.get("toolUseId")
    if isinstance(name, str):
        made["tool_call_id"] = valid_text(name)
    return made


def _value_of(part: dict[str, Any], kind: str) -> Any:
    """Returns what a part holds: under `text`, `value`, or its type's own name."""
    for key in ("text", "value", kind):
        if part.get(key) is not None:
            return part[key]
    return None


def _thoughts_of(part: dict[str, Any], kind: str, place: str) -> str:
    of_bedrock = part.get("reasoningContent")
    if isinstance(of_bedrock, dict):
        part = {"text": of_bedrock.get("reasoningText")}
        if isinstance(part["text"], dict):
            part = part["text"]
    return _text_of(part, kind, place)


def _text_of(part: dict[str, Any], kind: str, place: str) -> str:
    value = _value_of(part, kind)
    if not isinstance(value, str):
        raise DataError(
            f"A part in {place} has no text but {type_text(value)}; write it as {{type: text, "
            "text: ...}."
        )
    return valid_text(value)
