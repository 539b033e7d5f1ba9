"""These functions turn the turns of a conversation in a data set into messages for chat templates.

- The turns {role, content} are those of OpenAI and of chat templates.
- The turns {from, value} are those of ShareGPT. A turn from `function_call` holds its calls as JSON
  text.
- What a turn says of its weight in training is in `flags.py`, and what its content may be in
  `content.py`. All other keys are kept for the template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import DataError
from engine.examples.calls import spoken_calls, tool_calls
from engine.examples.content import Content, read_content
from engine.examples.example import Conversation, Message
from engine.examples.flags import take_weight
from engine.examples.values import (
    in_words,
    is_blank,
    parsed_list,
    shown,
    valid_text,
    valid_tree,
)
from engine.sources.not_trained import MEDIA_COLUMNS, WITHOUT

_SPEAKERS = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""The role of each speaker that a turn {from, value} may name."""
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
}
"""Roles of a turn {role, content} that have another name in chat templates."""
_OURS = ("role", "content")


@dataclass(frozen=True)
class Turn:
    """A turn is a message, and by what its losses are multiplied in training."""

    message: Message
    weight: float = 1.0
    """An answer of weight 0 is not trained."""


TurnReader = Callable[[Any, str], Turn]
"""It reads a turn. The second argument is the place of the turn, for errors. Raises DataError."""


def role_turn(turn: Any, place: str) -> Turn:
    """Reads a turn {role, content, ...}. Keys without a value are left out."""
    keys = _keys(turn, ("role", "content"), place)
    role = keys.pop("role")
    content = read_content(keys.pop("content", None), "content", place)
    return _turn(_ROLES.get(role.lower(), role), content, keys, place)


def sharegpt_turn(turn: Any, place: str) -> Turn:
    """Reads a turn {from, value, ...}. Keys without a value are left out."""
    keys = _keys(turn, ("from", "value"), place)
    speaker = keys.pop("from")
    role = _SPEAKERS.get(speaker.lower())
    if role is None:
        raise DataError(
            f"{shown(speaker)} in {place} is not a known speaker; use system, human, gpt or tool."
        )
    value = keys.pop("value", None)
    if any(key in keys for key in _OURS):
        raise DataError(f"There are both from, value and role, content in {place}; keep one pair.")
    content = read_content(value, "value", place)
    calls = spoken_calls(content.text, place) if speaker.lower() == "function_call" else None
    if calls:
        content = Content("", content.thoughts, content.calls + calls)
    return _turn(role, content, keys, place)


def any_turn(turn: Any, place: str) -> Turn:
    """Reads a turn {from, value} or {role, content}."""
    is_sharegpt = isinstance(turn, dict) and "from" in turn and "role" not in turn
    return sharegpt_turn(turn, place) if is_sharegpt else role_turn(turn, place)


def read_turns(turns: list[Any], read: TurnReader, place: str) -> list[Turn]:
    """Reads each turn of a list that is at `place`."""
    return [read(turn, f"turn {number} of {place}") for number, turn in enumerate(turns, 1)]


def as_turns(value: Any) -> list[Any] | None:
    """Returns a value as a list of turns, or None if it is not one. It may be the JSON text of a
    list, a single turn, or an object of lists, as Arrow stores them: {role: [...], content: [...]}.
    """
    value = parsed_list(value)
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, dict) or not ("role" in value or "from" in value):
        return None
    columns = {key: inner for key, inner in value.items() if inner is not None}
    if not all(isinstance(inner, list | tuple) for inner in columns.values()):
        return [value]
    lengths = {len(inner) for inner in columns.values()}
    if len(lengths) > 1:
        return None
    return [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def has_turns(value: Any, key: str | None = None) -> bool:
    """Returns whether a value is a conversation whose first turn has this `key`, or one of those
    that name the speaker.
    """
    turns = as_turns(value)
    if not turns or not isinstance(turns[0], dict):
        return False
    return key in turns[0] if key else "role" in turns[0] or "from" in turns[0]


def conversation(
    turns: list[Turn], context: int = 0, tools: list[Any] | None = None
) -> Conversation | None:
    """Returns the turns as an example, or None if there are none."""
    if not turns:
        return None
    answers = {
        place: turn.weight
        for place, turn in enumerate(turns)
        if turn.message["role"] == "assistant"
    }
    untrained = frozenset(place for place, weight in answers.items() if not weight)
    weights = {place: weight for place, weight in answers.items() if weight not in (0, 1)}
    return Conversation([turn.message for turn in turns], context, untrained, tools, weights)


def with_system(system: str, turns: list[Turn]) -> list[Turn]:
    """Returns the turns with a system turn before them, unless they have their own."""
    if not system or not turns or turns[0].message["role"] == "system":
        return turns
    return [Turn({"role": "system", "content": system}), *turns]


# ---------------------------------------------------------------------- one turn


def _keys(turn: Any, names: tuple[str, str], place: str) -> dict[str, Any]:
    """Returns the keys of a turn that have a value. `names` are those of its role and its text."""
    role, text = names
    if not isinstance(turn, dict) or not isinstance(turn.get(role), str):
        raise DataError(f"There is no {role} in {place}; write every turn as {{{role}, {text}}}.")
    for key in turn:
        if not isinstance(key, str):
            raise DataError(f"There is a key in {place} that is {in_words(key)}, not text.")
    valid_text(turn[role])
    return {key: value for key, value in turn.items() if value is not None}


def _turn(role: str, content: Content, keys: dict[str, Any], place: str) -> Turn:
    """Returns a turn from its content and its other keys."""
    is_answer = role == "assistant"
    weight = take_weight(keys, is_answer, place)
    for key, what in MEDIA_COLUMNS.items():
        if not is_blank(keys.pop(key, None)):
            raise DataError(f"There is {what} in {place}, {WITHOUT}.")
    calls = [*content.calls, *_calls_of(keys, is_answer, place)]
    text = _with_refusal(content.text, keys, place)
    rest = valid_tree(keys, place)
    if content.thoughts:
        rest.setdefault("reasoning_content", content.thoughts)
    if calls:
        rest["tool_calls"] = calls
    return Turn({"role": role, "content": text, **rest}, weight)


def _calls_of(keys: dict[str, Any], is_answer: bool, place: str) -> list[Any]:
    """Takes the calls of a turn from its keys: tool_calls, or function_call of older rows."""
    older = keys.pop("function_call", None)
    calls = tool_calls(keys.pop("tool_calls", None), place)
    if is_blank(older):
        return calls
    if calls or not is_answer:
        problem = "both tool_calls and a function_call" if calls else "a function_call"
        raise DataError(f"There is {problem} in {place}; an answer calls its tools in one of them.")
    return tool_calls(older, place)


def _with_refusal(text: str, keys: dict[str, Any], place: str) -> str:
    """Returns the text of a turn. An answer that refuses has its words in `refusal`."""
    refusal = keys.pop("refusal", None)
    if is_blank(refusal):
        return text
    if not isinstance(refusal, str) or text.strip():
        raise DataError(f"There are both a content and a refusal in {place}; keep one of them.")
    return valid_text(refusal)
