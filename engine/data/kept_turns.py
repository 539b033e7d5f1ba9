"""These functions find out what of a conversation a chat template has left out of its text.

A template may trim a turn, move it, or write it as JSON or HTML, so white space is ignored and
escaped forms count. What is still missing is lost.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.data.chat import Chat
from engine.examples.example import Message

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
USED_KEYS = frozenset(("role", "content", "tool_calls", *REASONING_KEYS))
"""These keys of a turn are looked for by what they hold."""
_NO_WORD = re.compile(r"[\W_]+")
_COUNTED = 200
"""A text of fewer characters may stand in the text of another turn, so its places are counted."""
_HTML_SAFE = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "'": r"\u0027"})


@dataclass(frozen=True)
class Lost:
    """A template has left out this part of a chat."""

    roles: tuple[str, ...] = ()
    """The roles of turns without their text, one for each turn."""
    answers: int = 0
    """So many answers are not as they were given: a template often drops earlier reasoning."""
    tools: bool = False

    @property
    def context(self) -> int:
        """Counts what an answer should have seen."""
        return len(self.roles) + self.tools


def lost_from(text: str, chat: Chat, answer: int | None) -> Lost:
    """Returns what of `chat` is missing from `text`. `answer` is the place of the answer that ends
    the text, which `missing_of_answer` checks, or None.
    """
    written = _Written(text)
    found: list[str] = []
    roles: list[str] = []
    answers = 0
    for place, message in enumerate(chat.messages):
        said = str(message.get("content") or "")
        if place == answer or written.holds(said):
            found.append(without_space(said))
        elif message["role"] == "assistant":
            answers += 1
        else:
            roles.append(message["role"])
    roles += _not_often_enough(written, chat, found, answer)
    has_tools = all(written.holds(name) for name in _names(chat.tools or []))
    return Lost(tuple(roles), answers, not has_tools)


def _not_often_enough(
    written: _Written, chat: Chat, found: list[str], answer: int | None
) -> list[str]:
    """Returns the roles of short turns whose text occurs less often than all turns together have
    it. A turn "yes" that was left out may still be found in an answer "yes, gladly".
    """
    together = "\n".join(found)
    roles = []
    for place, message in enumerate(chat.messages):
        if place == answer or message["role"] == "assistant":
            continue
        said = without_space(str(message.get("content") or ""))
        times = written.text.count(said) if 0 < len(said) < _COUNTED else 0
        if 0 < times < together.count(said):
            roles.append(message["role"])
    return roles


class _Written:
    """The text of a template, in which other texts are looked for."""

    def __init__(self, text: str):
        self.text = without_space(text)
        self._words: str | None = None

    def holds(self, said: str) -> bool:
        """Returns whether the text has `said`, as it is or escaped, with any white space."""
        bare = without_space(said)
        if bare in self.text:
            return True
        if any(without_space(form) in self.text for form in _escaped(said.strip())):
            return True
        words = _NO_WORD.sub("", bare)
        if self._words is None:
            self._words = _NO_WORD.sub("", self.text)
        return bool(words) and words in self._words


def _escaped(said: str) -> Iterator[str]:
    """Yields a text as templates escape it: as JSON, with or without ASCII alone, and as HTML."""
    for ascii_only in (False, True):
        written = json.dumps(said, ensure_ascii=ascii_only)[1:-1]
        yield written
        yield written.translate(_HTML_SAFE)
    yield html.escape(said)


def _names(tools: list[Any]) -> Iterator[str]:
    """Yields the names of the functions that `tools` describe."""
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name.strip():
            yield name


def missing_of_answer(answer: Message, written: str) -> tuple[str, str] | None:
    """Returns why an answer cannot be trained, and what to do, if its content, its reasoning or its
    calls are missing from `written`, the template's text for it; None if nothing is missing.
    """
    text = _Written(written)
    if without_space(str(answer.get("content") or "")) not in text.text:
        return (
            "the chat template leaves out part of the answer",
            "reasoning inside the answer is often dropped; use a template that keeps it",
        )
    for key in REASONING_KEYS:
        if without_space(str(answer.get(key) or "")) not in text.text:
            return (
                "the chat template leaves out the reasoning of the answer",
                f"remove the {key} or use a template that keeps it",
            )
    for call in answer.get("tool_calls") or ():
        function = call.get("function", call)
        said = [str(function.get("name") or ""), *_leaves(function.get("arguments"))]
        if not all(map(text.holds, said)):
            return (
                "the chat template leaves out the tool calls of the answer",
                "use a model whose chat template writes tool_calls",
            )
    return None


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
    return {
        key
        for key in keys
        if not any(re.search(rf"\b{re.escape(key)}\b", template) for template in templates)
    }


def is_blank(answer: Message) -> bool:
    """Returns whether an answer has neither text nor reasoning nor calls."""
    texts = (answer.get(key) for key in ("content", *REASONING_KEYS))
    return not answer.get("tool_calls") and not any(str(text or "").strip() for text in texts)


def without_space(text: str) -> str:
    """Returns a text without white space."""
    return "".join(text.split())
