"""Conversations as text, by a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from engine.data.formats.example import Message
from engine.data.tokens.message_forms import REASONING_KEYS
from engine.data.tokens.template_habits import Habits, Reasoning
from engine.data.tokens.template_process import Asked, Chat, Refusal, template_process

# ---------------------------------------------------------------------- dates

# Chat templates see the same date every day, so that a resumed run, or a trained model that answers
# questions, sees the same text as in training.
#
# Templates read the date from `date_string`, or call `strftime_now(format)`. The library passes
# only plain values to a template, not functions, so a macro put before the template's own text
# defines `strftime_now`.


_DATE = datetime(2024, 7, 26)
"""Date that Llama's templates write if none is given."""
_DIRECTIVES = [
    f"%{flag}{letter}" for letter in "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYZz" for flag in ("", "-")
]
# The macro returns its argument with every directive replaced.
_REPLACED = "".join(
    f".replace({directive!r}, {_DATE.strftime(directive)!r})" for directive in _DIRECTIVES
)
# The empty expression keeps a line break at the start of the template: Jinja drops a line break
# right after a tag.
_MACRO = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"


def fixed_date(tokenizer: Any, tools: list[Any] | None = None) -> dict[str, Any]:
    """Returns the arguments with which a chat template takes 26 July 2024, at
    midnight, as the current date. `tools` are those of the conversation, because a tokenizer may
    have a separate template for tools. Raises ValueError for a tokenizer without a template.
    """
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = _MACRO + template
    return {"date_string": _DATE.strftime("%d %b %Y"), "chat_template": template}


# ---------------------------------------------------------------------- template


_EMPTY = Refusal("there is no turn")


class ChatTemplate:
    """Applies the chat template of `tokenizer` as the library would, on a fixed date, to
    conversations in the form that this template wants.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._habits: dict[bool, Habits] = {}

    @property
    def available(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @cached_property
    def sources(self) -> list[str]:
        """The code of the template, or of each if there are several."""
        templates = self._tokenizer.chat_template
        return list(templates.values()) if isinstance(templates, dict) else [templates or ""]

    def apart(self, messages: Sequence[Message], has_tools: bool) -> list[Message]:
        """Returns messages with the reasoning of answers as a key of its own, if the template
        writes reasoning. Raises DataError when the template exceeds the limits of
        `template_process.py`.
        """
        habits = self._habits_of(has_tools)
        return list(messages) if habits is None else list(map(habits.apart, messages))

    def reasoning(self, has_tools: bool) -> Reasoning | None:
        """Returns how the template writes the reasoning of answers, or None if it leaves it out."""
        habits = self._habits_of(has_tools)
        way = None if habits is None else habits.reasoning
        return None if way is None or way.is_left_out else way

    def renames_developer(self, chat: Chat) -> bool:
        """Returns whether a turn of the developer in a chat is written as the system's."""
        if all(message["role"] != "developer" for message in chat.messages):
            return False
        habits = self._habits_of(bool(chat.tools))
        return habits is not None and habits.renames_developer

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
            habits = self._habits_of(has_tools)
            asked = [chats[place] for place in places]
            if habits is None:
                texts = self._raw(asked, generation)
            else:
                texts = self._raw(habits.in_form(asked), generation)
                if not generation:
                    texts = self._with_reasoning(asked, texts, habits)
            for place, text in zip(places, texts):
                found[place] = text
        return found

    def write_begun(self, chat: Chat) -> str | Refusal:
        """Returns the template's text for a chat whose last message continues, or its refusal.
        Raises DataError as `write` does.
        """
        habits = self._habits_of(bool(chat.tools))
        asked = [chat] if habits is None else habits.in_form([chat])
        return self._raw(asked, False, continue_final_message=True)[0]

    def _with_reasoning(
        self, chats: list[Chat], texts: list[str | Refusal], habits: Habits
    ) -> list[str | Refusal]:
        """Returns the texts with the reasoning of each last answer, where the prompt begins it and
        the template leaves it out.
        """
        places = [place for place, chat in enumerate(chats) if _thought(chat)]
        way = habits.reasoning if places else None
        if way is None or not way.is_left_out:
            return texts
        asked = [chats[place].until(len(chats[place].messages) - 1) for place in places]
        prompts = self._raw(habits.in_form(asked), True)
        found = list(texts)
        for place, prompt in zip(places, prompts):
            text = texts[place]
            if isinstance(text, str) and isinstance(prompt, str):
                found[place] = _joined(text, prompt, _thought(chats[place]), way)
        return found

    def _habits_of(self, has_tools: bool) -> Habits | None:
        """Returns the habits of the template, or None if there is no template for such chats."""
        if has_tools not in self._habits:
            tools: list[Any] | None = [{}] if has_tools else None
            try:
                code = self._tokenizer.get_chat_template(tools=tools)
            except ValueError:
                return None
            self._habits[has_tools] = Habits(self._raw, code, has_tools)
        return self._habits[has_tools]

    def _raw(self, chats: list[Chat], generation: bool, **more: Any) -> list[str | Refusal]:
        """Returns the texts of chats as they are, which all have tools, or all have none: a
        tokenizer may have a template of its own for tools. The library is given `more`.
        """
        try:
            variables = fixed_date(self._tokenizer, chats[0].tools)
        except ValueError as error:  # there are several templates and none is the default
            return [Refusal(str(error))] * len(chats)
        template = variables.pop("chat_template")
        variables = {**self._tokenizer.special_tokens_map, **variables, **more}
        return template_process().write(Asked(template, variables, chats, generation))


def _is_written(chat: Chat, has_tools: bool) -> bool:
    return bool(chat.messages) and bool(chat.tools) is has_tools


def _thought(chat: Chat) -> str:
    """Returns the reasoning of the answer that ends a chat, or an empty text."""
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") != "assistant":
        return ""
    return str(next((last[key] for key in REASONING_KEYS if last.get(key)), ""))


def _joined(text: str, prompt: str, thought: str, way: Reasoning) -> str:
    """Returns the text of an answer with its reasoning, which follows the prompt as a model writes
    it.
    """
    begun = prompt.removesuffix(way.opening)
    if not text.startswith(begun):
        return text
    written = text[len(begun) :]
    between = "" if written.startswith("\n") else "\n\n"
    return begun + way.opening + thought.strip("\n") + way.closing + between + written
