"""The content of a turn is a text, or a list of parts such as {type: text, text}."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import DataError
from engine.examples.calls import tool_calls
from engine.examples.values import in_words, is_blank, parsed_list, shown, valid_text
from engine.sources.not_trained import MEDIA_COLUMNS, WITHOUT, medium

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


@dataclass
class Content:
    """A `Content` is what a turn holds, sorted by what it is."""

    text: str = ""
    thoughts: str = ""
    """This is what the model thinks before its answer."""
    calls: list[Any] = field(default_factory=list)

    def add(self, text: str = "", thoughts: str = "", calls: Sequence[Any] = ()) -> None:
        """Adds what a part of the turn holds."""
        self.text += text
        self.thoughts += thoughts
        self.calls.extend(calls)


def read_content(value: Any, key: str, place: str) -> Content:
    """Reads the content of a turn. Raises DataError, with the `key` and the `place`, for anything
    but text.
    """
    if value is None:
        return Content()
    if isinstance(value, str):
        return Content(valid_text(value))
    if not isinstance(value, list | tuple):
        what = medium(value) or in_words(value)
        raise DataError(f"The {key} of {place} is {what}, not text; write it as text.")
    found = Content()
    for part in value:
        _add(found, part, f"the {key} of {place}")
    return found


def _add(found: Content, part: Any, place: str) -> None:
    """Adds one part of a list to what was found before."""
    if not isinstance(part, dict):
        raise DataError(
            f"A part in {place} is {in_words(part)}; write it as {{type: text, text: ...}}."
        )
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise DataError(f"A part in {place} has a type that is {in_words(kind)}; write text.")
    media = [name for name, inner in part.items() if name in _MEDIA and not is_blank(inner)]
    if kind in _MEDIA or media:
        what = _MEDIA[kind if kind in _MEDIA else media[0]]
        raise DataError(f"There is {what} in {place}, {WITHOUT}.")
    if kind in _CALLS:
        found.add(calls=tool_calls(parsed_list(_value_of(part, kind)), place))
    elif kind in _TEXTS:
        found.add(text=_text_of(part, kind, place))
    elif kind in _THOUGHTS:
        found.add(thoughts=_text_of(part, kind, place))
    else:
        raise DataError(
            f"A part in {place} has the type {shown(kind)}, which is not known; write it as "
            "{type: text, text: ...}."
        )


def _value_of(part: dict[str, Any], kind: str) -> Any:
    """Returns what a part holds: under `text`, `value`, or its type's own name."""
    for key in ("text", "value", kind):
        if part.get(key) is not None:
            return part[key]
    return None


def _text_of(part: dict[str, Any], kind: str, place: str) -> str:
    value = _value_of(part, kind)
    if not isinstance(value, str):
        raise DataError(
            f"A part in {place} has no text but {in_words(value)}; write it as {{type: text, "
            "text: ...}."
        )
    return valid_text(value)
