"""Chat templates as the texts before and after each turn.

Ollama writes templates in Go, and models have theirs in Jinja. A template whose turns are put
together in this simple way can be expressed in both; `shape_of` finds its texts in what it writes
of a few conversations, and compares the tokens of both ways for others. A template that differs has
no shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.data.formats.example import Message
from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.template_process import Chat, Refusal
from engine.errors import RamstreamError, first_line

_SYSTEM, _USER, _ANSWER, _AGAIN = "SYSTEMWORD", "USERWORD", "ANSWERWORD", "AGAINWORD"
_TEXTS = (
    "What is 7 times 8?",
    "First line.\n\nSecond line: café, 北京, 🙂.",
    "```python\nprint({'a': 1})\n```",
    "I",
)


class NoShape(Exception):
    """Raised for a chat template that no `ChatShape` can express, with the reason."""


@dataclass(frozen=True)
class ChatShape:
    """A chat template that writes turns one after the other, each between two texts."""

    system_before: str
    system_after: str
    no_system: str
    """Text at the start of a conversation without a system message."""
    user_before: str
    user_after: str
    answer_before: str
    answer_after: str
    generation: str
    """Text before an answer."""
    takes_system: bool = True

    def written(self, messages: list[Message]) -> str:
        """Returns a conversation as Ollama writes it, with the beginning of an answer."""
        has_system = messages[0]["role"] == "system"
        text = self.no_system
        if has_system:
            text = self.system_before + messages[0]["content"] + self.system_after
        around = {
            "user": (self.user_before, self.user_after),
            "assistant": (self.answer_before, self.answer_after),
        }
        for message in messages[has_system:]:
            before, after = around[message["role"]]
            text += before + message["content"] + after
        return text + self.generation

    @property
    def in_go(self) -> str:
        """The template in the language of Ollama (Go)."""
        system = self.no_system
        if self.takes_system:
            system = (
                "{{ if .System }}"
                + self.system_before
                + "{{ .System }}"
                + self.system_after
                + ("{{ else }}" + self.no_system if self.no_system else "")
                + "{{ end }}"
            )
        return (
            system
            + '{{ range .Messages }}{{ if eq .Role "user" }}'
            + self.user_before
            + "{{ .Content }}"
            + self.user_after
            + '{{ else if eq .Role "assistant" }}'
            + self.answer_before
            + "{{ .Content }}"
            + self.answer_after
            + "{{ end }}{{ end }}"
            + self.generation
        )

    @property
    def texts(self) -> tuple[str, ...]:
        return (
            self.system_before,
            self.system_after,
            self.no_system,
            self.user_before,
            self.user_after,
            self.answer_before,
            self.answer_after,
            self.generation,
        )


def shape_of(tokenizer: Any) -> ChatShape:
    """Returns the shape of a tokenizer's chat template, whose tokens were compared with those of
    the template itself. Raises NoShape where they differ, or where no shape can express them.
    """
    template = ChatTemplate(tokenizer)
    if not template.available:
        raise NoShape("the tokenizer has no chat template")
    if any("strftime_now" in code or "date_string" in code for code in template.sources):
        raise NoShape("the chat template writes the date of the day")
    try:
        shape = _found(template)
        if any(mark in text for text in shape.texts for mark in ("{{", "}}", '"""')):
            raise NoShape("the chat template has marks that Ollama's templates give a meaning")
        shape = _without_own_start(shape, tokenizer)
        _compare(shape, template, tokenizer)
    except RamstreamError as error:
        raise NoShape(first_line(error)) from None
    return shape


def _found(template: ChatTemplate) -> ChatShape:
    """Returns the texts around turns, as they are in a few conversations."""
    asked = _turns(None, _USER)
    longer_turns = _turns(None, _USER, _ANSWER, _AGAIN)
    with_system = _turns(_SYSTEM, _USER)
    alone, longer = (_text(text) for text in template.write([asked, longer_turns], False))
    (begun,) = (_text(text) for text in template.write([asked], True))
    (found,) = template.write([with_system], False)
    first, user_after = _split(alone, _USER)
    _, rest = _split(longer, _USER)
    between, rest = _split(rest, _ANSWER)
    again, _ = _split(rest, _AGAIN)
    is_plain = between.startswith(user_after) and begun.startswith(alone)
    if not is_plain:
        raise NoShape("the chat template writes a turn differently in other places")
    starts = [first, again]
    takes_system = isinstance(found, str) and found.count(_SYSTEM) == 1
    system_before = after_system = ""
    if takes_system:
        system_before, after = _split(_text(found), _SYSTEM)
        after_system, _ = _split(after, _USER)
        starts.append(after_system)
    user_before = _common_end(starts)
    cut = len(user_before)
    return ChatShape(
        system_before=system_before,
        system_after=after_system[: len(after_system) - cut] if takes_system else "",
        no_system=first[: len(first) - cut],
        user_before=user_before,
        user_after=user_after,
        answer_before=between[len(user_after) :],
        answer_after=again[: len(again) - cut],
        generation=begun[len(alone) :],
        takes_system=takes_system,
    )


def _without_own_start(shape: ChatShape, tokenizer: Any) -> ChatShape:
    """Returns the shape without the first token where the tokenizer, and so Ollama, adds it."""
    start = getattr(tokenizer, "bos_token", None)
    if not start or tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return shape
    return replace(
        shape,
        system_before=shape.system_before.removeprefix(start),
        no_system=shape.no_system.removeprefix(start),
    )


def _compare(shape: ChatShape, template: ChatTemplate, tokenizer: Any) -> None:
    """Raises NoShape unless both ways give the same tokens for every conversation of a set."""
    one, two, three, four = _TEXTS
    chats = [_turns(None, one), _turns(None, two), _turns(None, four, three, two)]
    chats.append(_turns(None, one, four, two, three, four))
    if shape.takes_system:
        chats += [_turns(two, one), _turns(one, three, two, four), _turns(four, *_TEXTS, one)]
    for chat, text in zip(chats, template.write(chats, True)):
        own = tokenizer(_text(text), add_special_tokens=False)["input_ids"]
        if own != tokenizer(shape.written(chat.messages))["input_ids"]:
            raise NoShape("the tokens of a conversation are not those of the chat template")


def _turns(system: str | None, *texts: str) -> Chat:
    """Returns a chat of turns by user and assistant, after a system message if there is one."""
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for place, text in enumerate(texts):
        messages.append({"role": "assistant" if place % 2 else "user", "content": text})
    return Chat(messages)


def _text(found: str | Refusal) -> str:
    if isinstance(found, Refusal):
        raise NoShape(f"the chat template refuses a conversation ({found.message})")
    return found


def _split(text: str, word: str) -> tuple[str, str]:
    """Returns what is before and after a text that a template must write once."""
    if text.count(word) != 1:
        raise NoShape("the chat template leaves out a turn, or writes it twice")
    before, _, after = text.partition(word)
    return before, after


def _common_end(texts: list[str]) -> str:
    """Returns the longest text with which all of these end."""
    shortest = min(texts, key=len)
    for start in range(len(shortest)):
        if all(text.endswith(shortest[start:]) for text in texts):
            return shortest[start:]
    return ""
