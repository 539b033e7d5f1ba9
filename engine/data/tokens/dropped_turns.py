"""What of a conversation a chat template has left out of its text.

A template may trim a turn, move it, or write it as JSON or HTML, so white space is ignored and
escaped forms count. What is still missing is dropped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import markupsafe

from engine.data.formats.example import Message
from engine.data.tokens.message_forms import REASONING_KEYS
from engine.data.tokens.template_process import Chat

USED_KEYS = frozenset(("role", "content", "tool_calls", *REASONING_KEYS))
"""Keys of a turn whose content is searched for."""
_NO_LETTER = re.compile(r"[\W_]+")
_COPIED = 20
"""Number of characters from which an earlier turn is not found in an answer by chance."""
_SHORTEST_DESCRIPTION = 8
"""Number of characters from which a description is not found in a template's own words by chance.
"""
_COUNTED = 200
"""Number of characters below which a text may stand in the text of another turn, so its places are
counted.
"""
_LONG = 1 << 20
_HTML_SAFE = (("<", r"\u003c"), (">", r"\u003e"), ("&", r"\u0026"), ("'", r"\u0027"))
"""Characters that Jinja's `tojson` escapes, with their escaped forms."""


@dataclass(frozen=True)
class DroppedTurns:
    """The part of a chat that a template has left out."""

    roles: tuple[str, ...] = ()
    """Roles of turns without their text."""
    answers: int = 0
    """Number of answers that differ from the given ones: a template often drops earlier
    reasoning.
    """
    tools: bool = False

    @property
    def context(self) -> int:
        """How much is missing that an answer should have seen."""
        return len(self.roles) + self.tools


def dropped_by(
    text: str, chat: Chat, answer: int | None, writes_tools: Callable[[], bool]
) -> DroppedTurns:
    """Returns what of `chat` is missing from `text`. `answer` is the place of the answer that ends
    the text, which `missing_of_answer` checks, or None. The text is without special tokens, as part
    of their names might be taken for a turn. `writes_tools` returns whether the template has
    written the tools, where the text alone does not show it.
    """
    written = _Written(text)
    contents = [_content_of(message) for message in chat.messages]
    found: list[str] = []
    roles: list[str] = []
    answers = 0
    for place, message in enumerate(chat.messages):
        if place == answer or (
            written.holds(contents[place]) and all(map(written.holds, _thoughts(message)))
        ):
            found.append(contents[place])
        elif message["role"] == "assistant":
            answers += 1
        else:
            roles.append(message["role"])
    for place, message in enumerate(chat.messages):
        if place == answer or message["role"] == "assistant":
            continue
        # A turn "yes" that was left out may still be found in an answer "yes, gladly", so the
        # places of short texts are counted.
        times = text.count(contents[place]) if 0 < len(contents[place]) < _COUNTED else 0
        if 0 < times < sum(other.count(contents[place]) for other in found):
            roles.append(message["role"])
    return DroppedTurns(tuple(roles), answers, not _has_tools(written, chat, writes_tools))


def _has_tools(written: _Written, chat: Chat, writes_tools: Callable[[], bool]) -> bool:
    """Returns whether a text has the tools of a chat. Their names may stand in it because a turn
    calls them or uses the words, so a description that stands in no turn shows it, or the template
    does.
    """
    names = list(tool_names(chat.tools or []))
    if not all(map(written.holds, names)):
        return False
    turns = _Written("\n".join(map(_all_of, chat.messages)))
    if not any(map(turns.holds, names)):
        return True
    missing = [text for text in _descriptions(chat.tools or []) if not turns.holds(text)]
    return any(map(written.holds, missing)) or writes_tools()


def _thoughts(message: Message) -> Iterator[str]:
    """Yields the reasoning of an answer, without white space around it."""
    for key in REASONING_KEYS:
        if message["role"] == "assistant" and message.get(key):
            yield str(message[key]).strip()


def _all_of(message: Message) -> str:
    """Returns all text of a turn: content, reasoning and calls."""
    parts = [_content_of(message), *_thoughts(message)]
    calls = message.get("tool_calls")
    return "\n".join([*parts, json.dumps(calls, ensure_ascii=False, default=str) if calls else ""])


def _content_of(message: Message) -> str:
    """Returns the text of a turn as templates often write it, without white space around it."""
    return str(message.get("content") or "").strip()


class _Written:
    """The text of a template, in which other texts are searched for."""

    def __init__(self, text: str):
        self._text = text
        self._bare: str | None = None
        self._letters: str | None = None

    def holds(self, content: str) -> bool:
        """Returns whether the text has `content`, unchanged or escaped, with any white space."""
        if content in self._text or self.has_letters_of(content):
            return True
        if any(self.has_letters_of(form) for form in _escaped(content)):
            return True
        letters = _NO_LETTER.sub("", content)
        if self._letters is None:
            self._letters = _NO_LETTER.sub("", self._text)
        return bool(letters) and letters in self._letters

    def has_letters_of(self, content: str) -> bool:
        """Returns whether the text has the same characters as `content`, white space left out."""
        if self._bare is None:
            self._bare = without_space(self._text)
        return without_space(content) in self._bare


def _escaped(content: str) -> Iterator[str]:
    """Yields a text as templates escape it: as JSON, with or without ASCII alone, and as HTML."""
    for ascii_only in (False, True):
        written = json.dumps(content, ensure_ascii=ascii_only)[1:-1]
        yield written
        for character, code in _HTML_SAFE:
            written = written.replace(character, code)
        yield written
    yield str(markupsafe.escape(content))


def tool_names(tools: list[Any]) -> Iterator[str]:
    """Yields the names of the functions that `tools` describe."""
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name.strip():
            yield name


def renamed_tools(tools: list[Any], names: list[str]) -> list[Any]:
    """Returns tools with other names, one for each that `tool_names` yields."""
    others = iter(names)
    found = []
    for tool in tools:
        if next(tool_names([tool]), None) is None:
            found.append(tool)
        elif isinstance(tool.get("function"), dict):
            found.append(tool | {"function": tool["function"] | {"name": next(others)}})
        else:
            found.append(tool | {"name": next(others)})
    return found


def _descriptions(value: Any) -> Iterator[str]:
    """Yields every description in nested schemas that is long enough to be known by its text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if (
                key == "description"
                and isinstance(item, str)
                and len(item.strip()) >= _SHORTEST_DESCRIPTION
            ):
                yield item
            else:
                yield from _descriptions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _descriptions(item)


def missing_of_answer(answer: Message, written: str) -> tuple[str, str] | None:
    """Returns why an answer cannot be trained, and what to do, if its content, its reasoning or its
    calls are missing from `written`, the template's text for it without special tokens. Returns
    None if nothing is missing.
    """
    text = _Written(written)
    content = _content_of(answer)
    if content not in written and not text.has_letters_of(content):
        return (
            "the chat template leaves out part of the answer",
            "reasoning inside the answer is often dropped; use a template that keeps it",
        )
    for key in REASONING_KEYS:
        reasoning = str(answer.get(key) or "").strip()
        if reasoning not in written and not text.has_letters_of(reasoning):
            return (
                "the chat template leaves out the reasoning of the answer",
                f"remove the {key} or use a template that keeps it",
            )
    for call in answer.get("tool_calls") or ():
        function = call.get("function", call)
        values = [str(function.get("name") or ""), *_leaves(function.get("arguments"))]
        if not all(map(text.holds, values)):
            return (
                "the chat template leaves out the tool calls of the answer",
                "use a model whose chat template writes tool_calls",
            )
    return None


def is_more_than_answer(chat: Chat, place: int, written: str, end_of_turn: str) -> bool:
    """Returns whether `written`, what the template writes for the answer at `place` up to its
    `end_of_turn` token, is more than that answer: it continues after an end of turn, or has the
    text of an earlier turn. Calls may be written as turns of their own.
    """
    answer = chat.messages[place]
    if answer.get("tool_calls"):
        return False
    if end_of_turn and end_of_turn in written:
        return True
    own = "".join(str(answer.get(key) or "") for key in ("content", *REASONING_KEYS))
    if len(written) < len(own) + _COPIED:
        return False
    earlier = (_content_of(message) for message in chat.messages[:place])
    return any(len(each) >= _COPIED and each in written and each not in own for each in earlier)


def _leaves(value: Any) -> Iterator[str]:
    """Yields every text in a nested value, and the names of its members."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)


def unused_keys(chat: Chat, templates: list[str]) -> set[str]:
    """Returns the keys of turns that the code of no template names."""
    keys = {key for message in chat.messages for key in message if key not in USED_KEYS}
    code = "\n".join(templates)
    return {key for key in keys if not re.search(rf"\b{re.escape(key)}\b", code)}


def is_blank(answer: Message) -> bool:
    """Returns whether an answer has neither text nor reasoning nor calls."""
    texts = (answer.get(key) for key in ("content", *REASONING_KEYS))
    return not answer.get("tool_calls") and not any(str(text or "").strip() for text in texts)


def without_space(text: str) -> str:
    """Returns a text without white space."""
    if len(text) < _LONG:
        return "".join(text.split())
    return text.translate(_no_space())  # slower, but without a list of all words in memory


@functools.cache
def _no_space() -> dict[int, None]:
    """Returns what `translate` takes to leave out white space: no such character is above
    U+3000.
    """
    return {code: None for code in range(0x3001) if chr(code).isspace()}
