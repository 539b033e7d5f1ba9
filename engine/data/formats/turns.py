"""The turns of a conversation in a data set as messages for chat templates.

- A turn is {role, content}, as OpenAI and chat templates have it, or {from, value}, as ShareGPT.
  `roles.py` has the names of roles.
- A turn of calls alone (tool_call, function_call) becomes a part of the answer before it, or with
  its neighbors one answer. A turn may hold results of calls beside a question, as Anthropic and
  Bedrock write it: then it becomes several.
- `flags.py` reads the weight of a turn in training, and `content.py` its content. All other keys
  are kept for the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.data.formats.calls import spoken_calls, tool_calls
from engine.data.formats.content import Content, read_content
from engine.data.formats.example import Conversation, Message
from engine.data.formats.flags import KNOWN, take_weight
from engine.data.formats.roles import plain_name, role_of
from engine.data.formats.values import (
    is_blank,
    parsed_list,
    type_text,
    valid_text,
    valid_tree,
)
from engine.data.sources.not_trained import MEDIA_COLUMNS, WITHOUT
from engine.errors import DataError

_TEXT_KEYS = ("content", "value")
_OTHER_TEXT_KEYS = ("text", "message")
"""Further names of the text of a turn in some programs (Cohere: message)."""


@dataclass(frozen=True)
class TurnSettings:
    """Settings of roles and flags."""

    roles: Mapping[str, str] = field(default_factory=dict)
    """The role of each name in `data.roles`."""
    unused: frozenset[str] = frozenset()
    """Keys (`data.unused_flags`) that do not concern training, whatever they are called."""


@dataclass(frozen=True)
class Turn:
    """A message, and the factor of its losses in training."""

    message: Message
    weight: float = 1.0
    """Factor of its losses; 0 for an answer that is not trained."""
    has_weight: bool = False
    """The turn itself has its weight."""
    is_call: bool = False
    """The turn holds nothing but calls, by its role."""
    numbers: tuple[int, ...] = ()
    """The turns of the row that it comes from, counted from 0."""


def read_turns(turns: list[Any], place: str, settings: TurnSettings) -> list[Turn]:
    """Reads each turn of a list that is at `place`. Raises DataError."""
    found: list[Turn] = []
    for number, turn in enumerate(turns):
        for made in _read(turn, number, f"turn {number + 1} of {place}", settings):
            before = found[-1] if found else None
            if made.is_call and before is not None and _goes_on(before):
                found[-1] = _joined(before, made, f"turn {number + 1} of {place}")
            else:
                found.append(made)
    return found


def _read(turn: Any, number: int, place: str, settings: TurnSettings) -> list[Turn]:
    """Reads the turn {role, content, ...} or {from, value, ...} with this number, from 0 on: one
    or, with what calls gave, several. Keys without a value are left out.
    """
    name, keys = _keys(turn, place)
    role, is_call = role_of(name, place, settings.roles)
    value = _take_text(keys, place)
    if settings.unused and keys:
        keys = {
            key: inner
            for key, inner in keys.items()
            if key not in settings.unused or plain_name(key) not in KNOWN
        }
    if is_call:
        thoughts, calls = spoken_calls(value, place)
        made = _turn(role, Content(thoughts, calls=calls), keys, number, place)
        return [replace(made, is_call=True)]
    if role == "tool" and isinstance(value, dict):
        value = json.dumps(valid_tree(value, place), ensure_ascii=False)
    content = read_content(value, "content", place, role == "assistant")
    if not content.results:
        return [_turn(role, content, keys, number, place)]
    if role == "assistant":
        raise DataError(
            f"There is a result of a tool in {place}, which is an answer; write it as a turn of "
            "its own with the role tool."
        )
    rest = {key: value for key, value in keys.items() if plain_name(key) not in KNOWN}
    results = [
        Turn(valid_tree(rest, place) | result, numbers=(number,)) for result in content.results
    ]
    is_empty = not content.text.strip() and not content.calls
    take_weight(dict(keys), False, place)
    return results if is_empty else [*results, _turn(role, content, keys, number, place)]


def _goes_on(turn: Turn) -> bool:
    """Whether calls behind this turn belong to it."""
    is_answer = turn.message["role"] == "assistant"
    return is_answer and (turn.is_call or "tool_calls" not in turn.message)


def _joined(turn: Turn, call: Turn, place: str) -> Turn:
    """Returns an answer with the calls of the next turn."""
    before, after = dict(turn.message), dict(call.message)
    text = before["content"] + after["content"]
    # ms-swift: of several calls, the first with a weight has it for all.
    only_turn_weighs = turn.is_call and not call.has_weight
    only_call_weighs = turn.is_call and not turn.has_weight and not before["content"]
    weight = call.weight if only_call_weighs and call.has_weight else turn.weight
    if not only_turn_weighs and not only_call_weighs and turn.weight != call.weight:
        raise DataError(
            f"The calls in {place} belong to the answer before them, and both say different things "
            "of what is trained; only whole answers are trained, so write the same in both."
        )
    calls = [*before.pop("tool_calls", ()), *after.pop("tool_calls", ())]
    message = {**after, **before, "content": text, "tool_calls": calls}
    has_weight = turn.has_weight or call.has_weight
    return Turn(message, weight, has_weight, True, (*turn.numbers, *call.numbers))


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
    if not system or not turns or turns[0].message["role"] in ("system", "developer"):
        return turns
    return [Turn({"role": "system", "content": system}), *turns]


# ---------------------------------------------------------------------- one turn


def _keys(turn: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a turn's role, and its other keys that have a value."""
    keys = {}
    if isinstance(turn, dict):
        keys = {key: value for key, value in turn.items() if value is not None}
    is_sharegpt = "role" not in keys and ("from" in keys or "value" in keys)
    role, text = ("from", "value") if is_sharegpt else ("role", "content")
    if not isinstance(keys.get(role), str):
        raise DataError(f"There is no {role} in {place}; write every turn as {{{role}, {text}}}.")
    for key in keys:
        if not isinstance(key, str):
            raise DataError(f"There is a key in {place} that is {type_text(key)}, not text.")
    name = valid_text(keys[role])
    del keys[role]
    return name, keys


def _take_text(keys: dict[str, Any], place: str) -> Any:
    """Takes the text of a turn from its keys, or None if it has none."""
    there = [key for key in _TEXT_KEYS if key in keys]
    there = there or [key for key in _OTHER_TEXT_KEYS if key in keys]
    if len(there) > 1:
        raise DataError(f"There are both {' and '.join(there)} in {place}; keep one of them.")
    return keys.pop(there[0]) if there else None


def _turn(role: str, content: Content, keys: dict[str, Any], number: int, place: str) -> Turn:
    """Returns a turn from its content and its other keys."""
    message: Message = {"role": role, "content": content.text}
    is_answer = role == "assistant"
    weight, calls = None, content.calls
    if keys:  # most turns have no others
        weight = take_weight(keys, is_answer, place)
        for key, what in MEDIA_COLUMNS.items():
            if not is_blank(keys.pop(key, None)):
                raise DataError(f"There is {what} in {place}, {WITHOUT}.")
        calls = [*content.calls, *_calls_of(keys, is_answer, place)]
        message["content"] = _with_refusal(content.text, keys, place)
        message |= valid_tree(keys, place)
    if content.weights:
        weight = _weight_of_all(weight, content, place)
    if calls and not is_answer:
        raise DataError(f"There is a call in {place}; only an answer (assistant) calls tools.")
    if content.thoughts:
        message.setdefault("reasoning_content", content.thoughts)
    if calls:
        message["tool_calls"] = calls
    return Turn(message, 1.0 if weight is None else weight, weight is not None, numbers=(number,))


def _weight_of_all(weight: float | None, content: Content, place: str) -> float | None:
    """Returns the weight of a turn, which its parts may have in its place."""
    values = {part for part in content.weights if part is not None}
    if not values:
        return weight
    if None in content.weights or weight is not None:
        values.add(1.0 if weight is None else weight)
    if len(values) > 1:
        raise DataError(
            f"The parts of {place} say different things of what is trained, but only whole answers "
            "are trained; divide the turn, or give the row as segments of {label, text}."
        )
    return values.pop()


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
    """Returns the text of a turn. An answer that refuses has its text in `refusal`."""
    refusal = keys.pop("refusal", None)
    if is_blank(refusal):
        return text
    if not isinstance(refusal, str) or text.strip():
        raise DataError(f"There are both a content and a refusal in {place}; keep one of them.")
    return valid_text(refusal)
