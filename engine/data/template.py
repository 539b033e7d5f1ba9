"""A model's chat template writes conversations as text."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from engine.data.dates import fixed_date
from engine.data.template_process import Asked, Chat, Refusal, template_process
from engine.examples.example import Message

_EMPTY = Refusal("there is no turn")


class Template:
    """A `Template` applies the chat template of `tokenizer` as the library would, on a fixed
    date.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @property
    def available(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @cached_property
    def sources(self) -> list[str]:
        """Returns the code of the template, or of each if there are several."""
        templates = self._tokenizer.chat_template
        return list(templates.values()) if isinstance(templates, dict) else [templates or ""]

    def write(self, chats: list[Chat], generation: bool) -> list[str | Refusal]:
        """Returns the template's text for each chat, or its refusal. `generation` adds the
        beginning of an answer. Raises DataError when the template exceeds the limits of
        `template_process.py`.
        """
        found: list[str | Refusal] = [_EMPTY] * len(chats)
        for has_tools in (False, True):
            places = [place for place, chat in enumerate(chats) if _is_written(chat, has_tools)]
            if not places:
                continue
            try:
                asked = self._asked([chats[place] for place in places], generation)
            except ValueError as error:  # there are several templates and none is the default
                texts: list[str | Refusal] = [Refusal(str(error))] * len(places)
            else:
                texts = template_process().write(asked)
            for place, text in zip(places, texts):
                found[place] = text
        return found

    def _asked(self, chats: list[Chat], generation: bool) -> Asked:
        """Returns the request for chats that all have tools, or all have none: a tokenizer may have
        a template of its own for tools.
        """
        variables = fixed_date(self._tokenizer, chats[0].tools)
        template = variables.pop("chat_template")
        # The library leaves out keys without a value too, because many templates write "None".
        without = [Chat(list(map(_without_nothing, chat.messages)), chat.tools) for chat in chats]
        return Asked(
            template, {**self._tokenizer.special_tokens_map, **variables}, without, generation
        )


def _is_written(chat: Chat, has_tools: bool) -> bool:
    return bool(chat.messages) and bool(chat.tools) is has_tools


def _without_nothing(message: Message) -> Message:
    if None not in message.values():
        return message  # the same object is sent once, however many chats have it
    return {key: value for key, value in message.items() if value is not None}
